//! One request of each kind besides OpenAI's chats, again and again, each compared with its undisturbed reply.

use std::time::{Duration, Instant};

use harness::Answer;
use serde_json::{Value, json};

use crate::chaos::service::{Failure, Service, exchange};

/// Time between two requests, so that chats have most of the engine.
const PAUSE: Duration = Duration::from_millis(200);

/// A red picture of 48 by 40 pixels.
const PICTURE: &str = "data:image/png;base64,\
    iVBORw0KGgoAAAANSUhEUgAAADAAAAAoCAIAAAA35e4mAAAAMklEQVR42u3OAQkAAAjAsPcvrTUEBwuwpk5JSEhISEhISEhI\
    SEhISEhISEhISEjoU2gBj0t46viuQiUAAAAASUVORK5CYII=";

/// Fields that differ from one reply to the next: ids, times, and what was cached.
const DRAWN: [&str; 12] = [
    "id",
    "call_id",
    "item_id",
    "created",
    "created_at",
    "completed_at",
    "usage",
    "timings",
    "total_duration",
    "load_duration",
    "prompt_eval_duration",
    "eval_duration",
];

/// The requests and their undisturbed replies.
pub(super) struct Mixed {
    model: &'static str,
    exchanges: Vec<Exchange>,
    compares: bool,
}

struct Exchange {
    path: &'static str,
    body: Value,
    expected: Value,
}

/// How many there were, and what was wrong.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) n: usize,
    pub(super) wrong: Vec<String>,
}

fn requests(model: &str) -> Vec<(&'static str, Value)> {
    let weather =
        json!({ "type": "object", "properties": { "city": { "enum": ["Oslo", "Rome"] } }, "required": ["city"] });
    let said = json!([{ "role": "user", "content": "What is the weather in Rome?" }]);
    let function = json!({ "type": "function", "function": { "name": "weather", "parameters": weather } });
    vec![
        (
            "/v1/chat/completions",
            json!({ "model": model, "messages": said, "tools": [function], "tool_choice": "required",
                "max_tokens": 64, "temperature": 0, "seed": 1 }),
        ),
        (
            "/v1/chat/completions",
            json!({ "model": model, "max_tokens": 12, "temperature": 0, "seed": 1, "messages": [{ "role": "user", "content": [
                { "type": "text", "text": "What do you see?" }, { "type": "image_url", "image_url": { "url": PICTURE } }] }] }),
        ),
        (
            "/v1/completions",
            json!({ "model": model, "prompt": ["Once upon", "There was"], "max_tokens": 12, "temperature": 0, "seed": 1 }),
        ),
        (
            "/v1/messages",
            json!({ "model": model, "messages": said, "max_tokens": 16, "temperature": 0,
                "tools": [{ "name": "weather", "input_schema": weather }] }),
        ),
        ("/v1/responses", json!({ "model": model, "input": "hi", "max_output_tokens": 16, "temperature": 0 })),
        (
            "/api/chat",
            json!({ "model": model, "messages": said, "stream": false, "options": { "num_predict": 16, "temperature": 0, "seed": 1 } }),
        ),
        (
            "/api/generate",
            json!({ "model": model, "prompt": "hi", "stream": false, "options": { "num_predict": 16, "temperature": 0, "seed": 1 } }),
        ),
        ("/v1/embeddings", json!({ "model": model, "input": ["a river", "a stone"] })),
        ("/tokenize", json!({ "model": model, "content": "hello" })),
    ]
}

impl Mixed {
    /// Asks a server on which nothing breaks. A request that it does not serve, such as vectors of a model that has none, or
    /// an image for the simulator, is left out.
    pub(super) async fn undisturbed(base: &str, model: &'static str) -> Mixed {
        let client = reqwest::Client::new();
        let mut exchanges = Vec::new();
        for (path, body) in requests(model) {
            match exchange(client.post(format!("{base}{path}")).json(&body)).await.and_then(read) {
                Ok(expected) => exchanges.push(Exchange { path, body, expected }),
                Err(refused) => println!("{model}: without {path}: {refused}"),
            }
        }
        assert!(exchanges.len() >= 5, "{model} serves nearly nothing");
        Mixed { model, exchanges, compares: true }
    }

    /// Compares only the fields of replies: a model that runs beside other streams rounds differently.
    pub(super) fn of_form_only(self) -> Mixed {
        Mixed { compares: false, ..self }
    }

    pub(super) fn model(&self) -> &'static str {
        self.model
    }

    /// Sends the requests in turn until `due`.
    pub(super) async fn run(&self, service: &Service, due: Instant) -> Counts {
        let client = reqwest::Client::new();
        let mut counts = Counts::default();
        for Exchange { path, body, expected } in self.exchanges.iter().cycle() {
            if Instant::now() >= due {
                break;
            }
            counts.n += 1;
            let call = client.post(format!("{}{path}", service.base)).json(body);
            let wrong = match service.ask(call, read).await {
                Err(failure) => Some(format!("{path}: {failure}")),
                Ok(reply) if self.compares && reply != *expected => Some(format!("{path}: {reply} and not {expected}")),
                Ok(reply) if form(&reply) != form(expected) => {
                    Some(format!("{path}: {reply} has another form than {expected}"))
                }
                Ok(_) => None,
            };
            wrong.iter().for_each(|wrong| println!("WRONG {wrong}"));
            counts.wrong.extend(wrong);
            tokio::time::sleep(PAUSE).await;
        }
        counts
    }
}

/// A reply without what is drawn.
fn read(answer: Answer) -> Result<Value, Failure> {
    let text = answer.text;
    let mut reply = serde_json::from_str(&text).map_err(|e| Failure::Broken(format!("no JSON ({e}): {text}")))?;
    strip(&mut reply);
    Ok(reply)
}

fn strip(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|name, _| !DRAWN.contains(&name.as_str()));
            fields.values_mut().for_each(strip);
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        _ => {}
    }
}

/// The names of a reply's own fields.
fn form(reply: &Value) -> Vec<&String> {
    reply.as_object().map(|fields| fields.keys().collect()).unwrap_or_default()
}
