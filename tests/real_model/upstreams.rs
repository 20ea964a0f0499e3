//! Every dialect through every kind of upstream that a second Baton can act as.

use std::fmt::Write as _;

use harness::BatonServer;
use harness::{Answer, ReloadableServer, said, upstream};
use serde_json::{Value, json};

const PROMPT: &str = "What is the capital of France?";

/// An endpoint in front of a second Baton.
struct Front {
    kind: &'static str,
    server: ReloadableServer,
    /// The kind has a call that forces tools.
    forces_tools: bool,
    /// The kind has calls about tokens and templates.
    has_tokens: bool,
}

/// A second Baton with an endpoint in front of it for each kind.
fn fronts() -> (BatonServer, [Front; 3]) {
    let second = BatonServer::start(&[]);
    let front = |kind: &'static str, more: &str| Front {
        kind,
        server: ReloadableServer::start(&upstream("second", kind, &second.base, more)),
        forces_tools: true,
        has_tokens: false,
    };
    let models = "models = { m = \"smollm2\" }";
    let fronts = [
        front("openai", models),
        Front { has_tokens: true, ..front("llama-server", models) },
        Front { forces_tools: false, ..front("ollama", &format!("{models}\nnum_ctx = 4096")) },
    ];
    (second, fronts)
}

async fn direct(second: &BatonServer, body: Value) -> Value {
    let url = format!("{}/v1/chat/completions", second.base);
    reqwest::Client::new().post(url).json(&body).send().await.unwrap().json().await.unwrap()
}

/// All text in a reply of any dialect, streamed or whole.
fn text_of(answer: &Answer) -> String {
    let mut text = String::new();
    for line in answer.text.lines() {
        let line = line.strip_prefix("data:").unwrap_or(line).trim();
        let Ok(json) = serde_json::from_str::<Value>(line) else { continue };
        let places = [
            "/choices/0/delta/content",
            "/choices/0/message/content",
            "/choices/0/text",
            "/message/content",
            "/response",
            "/delta/text",
            "/content/0/text",
            "/output/0/content/0/text",
        ];
        let found = places.iter().find_map(|place| json.pointer(place)?.as_str());
        let delta = (json["type"] == "response.output_text.delta").then(|| json["delta"].as_str()).flatten();
        let _ = write!(text, "{}", found.or(delta).unwrap_or_default());
    }
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn every_dialect_gives_the_models_reply_through_an_upstream() {
    let (second, fronts) = fronts();
    let options = json!({ "temperature": 0, "max_tokens": 12, "seed": 1 });
    let expected = direct(&second, {
        let mut body = said(PROMPT, options.clone());
        body["model"] = json!("smollm2");
        body
    })
    .await;
    let content = expected["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(!content.is_empty());
    let n_prompt = expected["usage"]["prompt_tokens"].as_u64().unwrap();
    for Front { kind, server: front, .. } in &fronts {
        for stream in [false, true] {
            let with = |more: Value| {
                let mut body = said(PROMPT, json!({ "stream": stream }));
                body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                body
            };
            let messages = json!({ "temperature": 0, "max_tokens": 12 });
            // Ollama's default penalty of 1.1 would change the reply.
            let ollama = json!({ "options": { "temperature": 0, "num_predict": 12, "repeat_penalty": 1.0 } });
            let requests = [
                ("/v1/chat/completions", with(options.clone())),
                (
                    "/v1/responses",
                    json!({ "model": "m", "input": PROMPT, "temperature": 0, "max_output_tokens": 12, "stream": stream }),
                ),
                ("/v1/messages", with(messages)),
                ("/api/chat", with(ollama.clone())),
                (
                    "/api/generate",
                    json!({ "model": "m", "prompt": PROMPT, "stream": stream, "options": ollama["options"] }),
                ),
            ];
            for (path, body) in requests {
                let answer = front.post(path, &body).await;
                assert_eq!(answer.status, 200, "{kind} {path} {answer:?}");
                // Some last events repeat the whole text, so only the beginning is compared.
                assert!(text_of(&answer).starts_with(content), "{kind} {path} {content:?} {answer:?}");
                assert!(answer.route.contains("upstream=second"), "{kind} {path} {answer:?}");
                assert!(!answer.text.contains("\"error\":{"), "{answer:?}");
            }
        }
        let answer = front.post("/v1/chat/completions", &said(PROMPT, options.clone())).await.json();
        assert_eq!(answer["usage"]["prompt_tokens"], n_prompt, "{kind}: {answer}");
        assert_eq!(answer["usage"]["completion_tokens"], 12, "{kind}: {answer}");
        assert_eq!(answer["choices"][0]["finish_reason"], "length", "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_schemas_and_tools_reach_the_model() {
    let (_second, fronts) = fronts();
    let schema = json!({ "type": "object", "properties": { "city": { "type": "string", "maxLength": 9 } }, "required": ["city"], "additionalProperties": false });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
    let tool = json!([{ "type": "function", "function": { "name": "weather", "parameters": schema } }]);
    for Front { kind, server: front, forces_tools, .. } in &fronts {
        let body = json!({ "model": "m", "prompt": "Once upon a", "max_tokens": 5, "temperature": 0 });
        let plain = front.post("/v1/completions", &body).await;
        assert!(plain.status == 200 && !text_of(&plain).is_empty(), "{kind} {plain:?}");
        let body = json!({ "response_format": format, "temperature": 0, "max_tokens": 60 });
        let answer = front.post("/v1/chat/completions", &said("A city, in JSON.", body)).await;
        let said_json: Value = serde_json::from_str(&answer.content()).unwrap_or_else(|_| panic!("{kind} {answer:?}"));
        assert!(said_json["city"].is_string(), "{kind}");
        let body = json!({ "tools": tool, "tool_choice": "required", "temperature": 0, "max_tokens": 60 });
        let answer = front.post("/v1/chat/completions", &said("Weather in Rome?", body)).await;
        if !forces_tools {
            assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("tool_choice")), "{answer:?}");
            continue;
        }
        let call = &answer.json()["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(call["name"], "weather", "{kind} {answer:?}");
        let body = json!({ "logprobs": true, "top_logprobs": 2, "max_tokens": 3 });
        let answer = front.post("/v1/chat/completions", &said("hi", body)).await.json();
        assert_eq!(
            answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"].as_array().unwrap().len(),
            2,
            "{answer}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn vectors_and_tokens_come_from_the_upstreams_that_have_them() {
    let (second, fronts) = fronts();
    let ask = async |path: &str, body: Value| -> Value {
        let url = format!("{}{path}", second.base);
        reqwest::Client::new().post(url).json(&body).send().await.unwrap().json().await.unwrap()
    };
    let texts: Vec<String> = (0..40).map(|i| format!("Text number {i}")).collect();
    let expected = ask("/v1/embeddings", json!({ "model": "smollm2", "input": texts })).await;
    let tokens = ask("/tokenize", json!({ "content": PROMPT, "add_special": true })).await["tokens"].clone();
    let chat = json!({ "model": "smollm2", "max_tokens": 1, "messages": [{ "role": "user", "content": PROMPT }] });
    let as_m = |body: &Value| {
        let mut body = body.clone();
        body["model"] = json!("m");
        body
    };
    let prompt = ask("/apply-template", chat.clone()).await["prompt"].clone();
    let counted = ask("/v1/messages/count_tokens", chat.clone()).await["input_tokens"].clone();
    assert!(counted.as_u64().unwrap() > 5, "{counted}");
    for Front { kind, server: front, has_tokens, .. } in &fronts {
        let rendered = front.post("/apply-template", &as_m(&chat)).await;
        let count = front.post("/v1/messages/count_tokens", &as_m(&chat)).await;
        if *has_tokens {
            assert_eq!((rendered.status, &rendered.json()["prompt"]), (200, &prompt), "{rendered:?}");
            assert_eq!((count.status, &count.json()["input_tokens"]), (200, &counted), "{count:?}");
        } else {
            assert_eq!((rendered.status, count.status), (501, 501), "{kind}: {count:?}");
            assert!(rendered.text.contains("llama-server") && count.text.contains("llama-server"), "{count:?}");
        }
        // More than one batch.
        let answer = front.post("/v1/embeddings", &json!({ "model": "m", "input": texts })).await;
        assert_eq!(answer.status, 200, "{kind}: {answer:?}");
        let got = answer.json();
        assert_eq!(got["data"].as_array().unwrap().len(), 40);
        for i in [0, 39] {
            let vector = |of: &Value| -> Vec<f64> {
                of["data"][i]["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
            };
            let cosine: f64 = vector(&got).iter().zip(vector(&expected)).map(|(a, b)| a * b).sum();
            assert!(cosine > 0.99, "{kind}: text {i} has a cosine of {cosine}");
        }
        assert_eq!(got["usage"]["prompt_tokens"], expected["usage"]["prompt_tokens"], "{kind}");
        let answer = front.post("/api/embed", &json!({ "model": "m", "input": "one" })).await;
        assert_eq!(answer.json()["embeddings"].as_array().unwrap().len(), 1, "{kind}: {answer:?}");

        let answer = front.post("/tokenize", &json!({ "model": "m", "content": PROMPT, "add_special": true })).await;
        let back = front.post("/detokenize", &json!({ "model": "m", "tokens": tokens })).await;
        if *has_tokens {
            assert_eq!((answer.status, &answer.json()["tokens"]), (200, &tokens));
            assert!(back.json()["content"].as_str().unwrap().contains(PROMPT), "{back:?}");
        } else {
            assert_eq!((answer.status, back.status), (501, 501), "{kind}: {answer:?}");
            assert!(answer.text.contains(kind), "{answer:?}");
        }
    }
}
