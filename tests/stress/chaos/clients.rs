//! Clients: eight at a time, half of them with streams. Every reply is compared with the undisturbed one.

use std::fmt::{Display, Formatter};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use harness::{Answer, PROMPTS, long_prompt};
use reqwest::RequestBuilder;
use serde_json::{Value, json};

use super::service::{Failure, Service, exchange};

/// Requests at once.
pub(crate) const CONCURRENCY: usize = 8;

/// A reply as a client sees it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reply {
    text: String,
    finish_reason: Value,
    n_prompt: Value,
    n_completion: Value,
    /// One for each token, if the request asked for them.
    logprobs: Vec<SeenToken>,
    /// `x-baton-route`.
    route: String,
}

/// A token as a client sees it.
#[derive(Debug, Clone, PartialEq)]
struct SeenToken {
    text: String,
    logprob: f32,
    /// The likeliest tokens at its position with their log-probabilities. A token that the request bars, as the end of
    /// the turn with `ignore_eos`, may be among them.
    top: Vec<(String, f32)>,
}

/// The place where a reply of the real model leaves the undisturbed one. Rounding can do that between near ties.
#[derive(Debug, Clone)]
pub(crate) struct Divergence {
    /// The request, and both replies.
    pub(crate) body: Value,
    pub(crate) undisturbed: Reply,
    pub(crate) text: String,
    /// The first different token, by its place in the reply, and the token that the reply has there.
    pub(crate) at: usize,
    pub(crate) other: String,
    /// By how much the undisturbed reply preferred its own token there to the other reply's, in nats; infinite if the other
    /// token was not among its likeliest ones.
    pub(crate) margin: f32,
    /// The largest difference of a token's log-probability up to there, in nats. Rounding moves every one a little; KV that
    /// is wrong moves them by whole nats.
    pub(crate) noise: f32,
    /// `x-baton-route` of the reply.
    pub(crate) route: String,
}

impl Display for Divergence {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let Divergence { body, undisturbed, text, at, other, margin, noise, route } = self;
        let expected = &undisturbed.text;
        write!(f, "{}: {text:?} and not {expected:?} ({other:?} at {at}", body["seed"])?;
        write!(f, ", margin {margin:.3}, noise {noise:.3}, route {route})")
    }
}

/// The results of all requests.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Requests made.
    pub(crate) n_requests: usize,
    /// Incomplete replies, each with its fault.
    pub(crate) wrong: Vec<String>,
    /// Complete replies with another text than the undisturbed one.
    pub(crate) differing: Vec<Divergence>,
    /// The largest difference of a token's log-probability between replies that are equal so far: what rounding does.
    pub(crate) noise: f32,
    /// The time of each request, sorted.
    pub(crate) times: Vec<Duration>,
}

impl Reply {
    /// Returns true if both have the same length, finish reason and text.
    pub(crate) fn is_same(&self, other: &Reply) -> bool {
        self.is_as_complete_as(other) && self.text == other.text
    }

    /// Returns true if both have the same length and finish reason.
    fn is_as_complete_as(&self, other: &Reply) -> bool {
        let end = |reply: &Reply| {
            let Reply { finish_reason, n_prompt, n_completion, .. } = reply.clone();
            (finish_reason, n_prompt, n_completion)
        };
        end(self) == end(other)
    }

    /// The length of the common beginning, in tokens.
    fn n_common(&self, other: &Reply) -> usize {
        self.logprobs.iter().zip(&other.logprobs).take_while(|(a, b)| a.text == b.text).count()
    }

    /// The largest difference of a log-probability in the common beginning.
    fn noise(&self, undisturbed: &Reply) -> f32 {
        let common = self.logprobs.iter().zip(&undisturbed.logprobs).take(self.n_common(undisturbed));
        common.map(|(a, b)| (a.logprob - b.logprob).abs()).fold(0.0, f32::max)
    }

    /// By how much this reply prefers the undisturbed reply's token at a place to another one, in nats. `None` if the replies
    /// differ before, or if one of the tokens is not among the likeliest.
    pub(crate) fn margin(&self, undisturbed: &Reply, at: usize, other: &str) -> Option<f32> {
        let own = &undisturbed.logprobs.get(at)?.text;
        let top = &self.logprobs.get(at).filter(|_| self.n_common(undisturbed) >= at)?.top;
        let logprob = |token: &str| top.iter().find(|(text, _)| text == token).map(|(_, logprob)| *logprob);
        Some(logprob(own)? - logprob(other)?)
    }

    /// Where this reply leaves the undisturbed one.
    fn divergence(&self, undisturbed: &Reply, body: &Value) -> Divergence {
        let at = self.n_common(undisturbed);
        let other = self.logprobs.get(at).map(|token| token.text.clone()).unwrap_or_default();
        Divergence {
            body: body.clone(),
            undisturbed: undisturbed.clone(),
            text: self.text.clone(),
            at,
            margin: undisturbed.margin(undisturbed, at, &other).unwrap_or(f32::INFINITY),
            noise: self.noise(undisturbed),
            route: self.route.clone(),
            other,
        }
    }
}

impl Outcome {
    /// Adds the results of further requests.
    pub(crate) fn add(&mut self, more: Outcome) {
        self.n_requests += more.n_requests;
        self.wrong.extend(more.wrong);
        self.differing.extend(more.differing);
        self.noise = self.noise.max(more.noise);
        self.times.extend(more.times);
        self.times.sort_unstable();
    }

    /// The time within which this share of the requests ended.
    pub(crate) fn quantile(&self, share: f64) -> Duration {
        let at = (share * self.times.len() as f64) as usize;
        self.times.get(at.min(self.times.len().saturating_sub(1))).copied().unwrap_or_default()
    }
}

/// The `i`-th request of a run at simulated engines. Prompts differ from the first word on, so that each is computed.
pub(crate) fn request(seed: u64, i: usize) -> Value {
    let words = long_prompt(&format!("{seed} {i}"), 100 + i * 37 % 200);
    body(
        i,
        json!({ "model": "sim", "messages": [{ "role": "user", "content": words }], "max_tokens": 60 + i * 13 % 120 }),
    )
}

/// The `i`-th request of a run at the real model.
pub(crate) fn real_request(i: usize) -> Value {
    let words = PROMPTS[i % PROMPTS.len()];
    let message = json!([{ "role": "user", "content": words }]);
    body(
        i,
        json!({ "model": "smollm2", "messages": message, "max_tokens": 40 + i * 13 % 60, "temperature": 0, "logprobs": true, "top_logprobs": 5 }),
    )
}

/// Every second one is a stream.
fn body(i: usize, mut body: Value) -> Value {
    let is_stream = i % 2 == 1;
    let usage = if is_stream { json!({ "include_usage": true }) } else { Value::Null };
    body["seed"] = json!(i);
    body["ignore_eos"] = json!(true);
    body["stream"] = json!(is_stream);
    body["stream_options"] = usage;
    body
}

/// A chat. Each has its own key, so that none uses another's cached prompt, which may have been rounded differently.
pub(crate) fn chat(client: &reqwest::Client, base: &str, body: &Value) -> RequestBuilder {
    let key = format!("client {}", body["seed"]);
    client.post(format!("{base}/v1/chat/completions")).bearer_auth(key).json(body)
}

/// The reply of a chat. Errors: anything that a client would not accept as complete.
pub(crate) fn read(answer: Answer, is_stream: bool) -> Result<Reply, Failure> {
    let reply = if is_stream { streamed(&answer.text)? } else { whole(&answer.text).map_err(Failure::Broken)? };
    Ok(Reply { route: answer.route, ..reply })
}

fn whole(text: &str) -> Result<Reply, String> {
    let reply: Value = serde_json::from_str(text).map_err(|e| format!("no JSON ({e}): {text}"))?;
    let choice = &reply["choices"][0];
    Ok(Reply {
        text: choice["message"]["content"].as_str().ok_or(format!("no text: {text}"))?.to_owned(),
        finish_reason: choice["finish_reason"].clone(),
        n_prompt: reply["usage"]["prompt_tokens"].clone(),
        n_completion: reply["usage"]["completion_tokens"].clone(),
        logprobs: logprobs(choice),
        route: String::new(),
    })
}

/// The log-probabilities of a choice or of a part of one.
fn logprobs(choice: &Value) -> Vec<SeenToken> {
    let content = choice["logprobs"]["content"].as_array().map_or(&[][..], Vec::as_slice);
    let number = |value: &Value| value["logprob"].as_f64().unwrap() as f32;
    let text = |value: &Value| value["token"].as_str().unwrap().to_owned();
    let token = |token: &Value| SeenToken {
        text: text(token),
        logprob: number(token),
        top: token["top_logprobs"].as_array().unwrap().iter().map(|top| (text(top), number(top))).collect(),
    };
    content.iter().map(token).collect()
}

fn streamed(text: &str) -> Result<Reply, Failure> {
    let events: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let error = events.iter().find(|event| event.starts_with("{\"error\":"));
    if let Some(error) = error {
        return Err(Failure::ErrorEvent((*error).to_owned()));
    }
    let Some((&"[DONE]", events)) = events.split_last() else {
        return Err(Failure::Broken(format!("no [DONE]: {text}")));
    };
    let mut reply = Reply {
        text: String::new(),
        finish_reason: Value::Null,
        n_prompt: Value::Null,
        n_completion: Value::Null,
        logprobs: Vec::new(),
        route: String::new(),
    };
    for event in events {
        let event: Value =
            serde_json::from_str(event).map_err(|e| Failure::Broken(format!("no JSON ({e}): {event}")))?;
        if !event["error"].is_null() {
            return Err(Failure::ErrorEvent(event.to_string()));
        }
        let choice = &event["choices"][0];
        reply.text += choice["delta"]["content"].as_str().unwrap_or_default();
        reply.logprobs.extend(logprobs(choice));
        for (kept, new) in [
            (&mut reply.finish_reason, &choice["finish_reason"]),
            (&mut reply.n_prompt, &event["usage"]["prompt_tokens"]),
            (&mut reply.n_completion, &event["usage"]["completion_tokens"]),
        ] {
            if !new.is_null() {
                *kept = new.clone();
            }
        }
    }
    Ok(reply)
}

/// The replies to the same requests where nothing breaks.
pub(crate) async fn undisturbed(base: &str, bodies: &[Value]) -> Vec<Reply> {
    let client = reqwest::Client::new();
    let ask = async |body: &Value| read(exchange(chat(&client, base, body)).await?, body["stream"] == true);
    let replies = futures::stream::iter(bodies).map(ask).buffered(1);
    replies.map(|reply| reply.unwrap()).collect().await
}

/// Sends all requests, `concurrency` at a time, and compares the replies.
pub(crate) async fn run(service: &Service, bodies: &[Value], expected: &[Reply], concurrency: usize) -> Outcome {
    let client = reqwest::Client::new();
    let n_done = AtomicUsize::new(0);
    let one = async |i: usize| {
        let began = Instant::now();
        let is_stream = bodies[i]["stream"] == true;
        let call = chat(&client, &service.base, &bodies[i]);
        let reply = service.ask(call, |answer| read(answer, is_stream)).await;
        let expected = &expected[i];
        let noise = reply.as_ref().map_or(0.0, |reply| reply.noise(expected));
        let (wrong, differs) = match reply {
            Err(failure) => (Some(format!("{i}: {failure}")), None),
            Ok(reply) if !reply.is_as_complete_as(expected) => {
                (Some(format!("{i}: {reply:?} and not {:?}", expected.text)), None)
            }
            Ok(reply) if reply.text != expected.text => (None, Some(reply.divergence(expected, &bodies[i]))),
            Ok(_) => (None, None),
        };
        wrong.iter().for_each(|wrong| println!("WRONG {wrong}"));
        differs.iter().for_each(|differs| println!("DIFFERS {differs}"));
        let n_done = n_done.fetch_add(1, Ordering::Relaxed) + 1;
        if n_done.is_multiple_of(50) {
            println!("{n_done} of {} requests", bodies.len());
        }
        (wrong, differs, (noise, began.elapsed()))
    };
    let outcomes = futures::stream::iter(0..bodies.len()).map(one).buffer_unordered(concurrency);
    let outcomes: Vec<_> = outcomes.collect().await;
    let mut times: Vec<Duration> = outcomes.iter().map(|(.., (_, time))| *time).collect();
    times.sort_unstable();
    let mut outcome = Outcome { n_requests: bodies.len(), times, ..Outcome::default() };
    for (wrong, differs, (noise, _)) in outcomes {
        outcome.noise = outcome.noise.max(noise);
        outcome.wrong.extend(wrong);
        outcome.differing.extend(differs);
    }
    outcome
}
