//! Clients: eight at a time, each request another, half of them streams; every reply is compared with the undisturbed one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use harness::{PROMPTS, long_prompt};
use serde_json::{Value, json};

/// Requests at once.
pub(crate) const CONCURRENCY: usize = 8;

/// A request that has not ended by then hangs. The longest that one may have to wait are several silences of 5 s.
const HUNG: Duration = Duration::from_secs(120);

/// What a client has seen of a reply.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reply {
    text: String,
    finish_reason: Value,
    n_prompt: Value,
    n_completion: Value,
    /// Of each token, where they were asked for.
    logprobs: Vec<TokenLogprob>,
}

/// A token as a client sees it.
#[derive(Debug, Clone, PartialEq)]
struct TokenLogprob {
    text: String,
    logprob: f32,
    /// By how much the likeliest token is likelier than the second, in nats.
    margin: f32,
}

/// Where a reply of the real model leaves the undisturbed one, which other rounding can do between near ties.
#[derive(Debug, Clone)]
pub(crate) struct Divergence {
    /// The request, and both replies.
    pub(crate) text: String,
    /// Of the undisturbed reply's two likeliest tokens there, in nats; `None` if nothing is known of the place.
    pub(crate) margin: Option<f32>,
}

/// What came of all requests.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Requests made.
    pub(crate) n_requests: usize,
    /// Those that were not complete, with what was wrong.
    pub(crate) wrong: Vec<String>,
    /// Those whose text was complete and another than that of the undisturbed reply.
    pub(crate) differing: Vec<Divergence>,
    /// The largest difference of a token's log-probability between replies that are equal so far: what rounding does.
    pub(crate) noise: f32,
    /// How long each took, in order of size.
    pub(crate) times: Vec<Duration>,
}

impl Reply {
    /// Whether the two are of the same length and ended in the same way.
    fn is_as_complete_as(&self, other: &Reply) -> bool {
        let end = |reply: &Reply| {
            let Reply { finish_reason, n_prompt, n_completion, .. } = reply.clone();
            (finish_reason, n_prompt, n_completion)
        };
        end(self) == end(other)
    }

    /// Tokens that are the same from the start.
    fn n_common(&self, other: &Reply) -> usize {
        self.logprobs.iter().zip(&other.logprobs).take_while(|(a, b)| a.text == b.text).count()
    }

    /// How far rounding has moved a log-probability of what is common.
    fn noise(&self, undisturbed: &Reply) -> f32 {
        let common = self.logprobs.iter().zip(&undisturbed.logprobs).take(self.n_common(undisturbed));
        common.map(|(a, b)| (a.logprob - b.logprob).abs()).fold(0.0, f32::max)
    }

    /// The margin at the first token that is another.
    fn margin(&self, undisturbed: &Reply) -> Option<f32> {
        undisturbed.logprobs.get(self.n_common(undisturbed)).map(|token| token.margin)
    }
}

impl Outcome {
    /// The time that this share of the requests took at most.
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
        json!({ "model": "smollm2", "messages": message, "max_tokens": 40 + i * 13 % 60, "temperature": 0, "logprobs": true, "top_logprobs": 2 }),
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

/// Sends a request and reads its reply to the end. Errors: whatever a client would not take for a complete reply.
pub(crate) async fn ask(client: &reqwest::Client, base: &str, body: &Value) -> Result<Reply, String> {
    // A key of its own for each, so that none finds another's prompt cached: a cached beginning has the rounding of the
    // prompt that it was computed for.
    let key = format!("client {}", body["seed"]);
    let call = client.post(format!("{base}/v1/chat/completions")).bearer_auth(key).json(body);
    let response = call.send().await.map_err(|e| format!("not sent: {e}"))?;
    let status = response.status().as_u16();
    let text = response.text().await.map_err(|e| format!("HTTP {status}, broken off: {e}"))?;
    if status != 200 {
        return Err(format!("HTTP {status}: {text}"));
    }
    if body["stream"] == true { streamed(&text) } else { whole(&text) }
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
    })
}

/// What a choice, or a part of one, says of its tokens.
fn logprobs(choice: &Value) -> Vec<TokenLogprob> {
    let content = choice["logprobs"]["content"].as_array().map_or(&[][..], Vec::as_slice);
    let number = |value: &Value| value["logprob"].as_f64().unwrap() as f32;
    let token = |token: &Value| TokenLogprob {
        text: token["token"].as_str().unwrap().to_owned(),
        logprob: number(token),
        margin: number(&token["top_logprobs"][0]) - number(&token["top_logprobs"][1]),
    };
    content.iter().map(token).collect()
}

fn streamed(text: &str) -> Result<Reply, String> {
    let events: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let Some((&"[DONE]", events)) = events.split_last() else { return Err(format!("no [DONE]: {text}")) };
    let mut reply = Reply {
        text: String::new(),
        finish_reason: Value::Null,
        n_prompt: Value::Null,
        n_completion: Value::Null,
        logprobs: Vec::new(),
    };
    for event in events {
        let event: Value = serde_json::from_str(event).map_err(|e| format!("no JSON ({e}): {event}"))?;
        if !event["error"].is_null() {
            return Err(event.to_string());
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

/// What the same requests get where nothing breaks.
pub(crate) async fn undisturbed(base: &str, bodies: &[Value]) -> Vec<Reply> {
    let client = reqwest::Client::new();
    let replies = futures::stream::iter(bodies).map(|body| ask(&client, base, body)).buffered(1);
    replies.map(|reply| reply.unwrap()).collect().await
}

/// Sends all requests, so many at a time, and compares.
pub(crate) async fn run(base: &str, bodies: &[Value], expected: &[Reply], concurrency: usize) -> Outcome {
    let (client, n_done) = (reqwest::Client::new(), AtomicUsize::new(0));
    let one = async |i: usize| {
        let began = Instant::now();
        let reply = tokio::time::timeout(HUNG, ask(&client, base, &bodies[i])).await;
        let expected = &expected[i];
        let both = |reply: &Reply| format!("{i}: {:?} and not {:?}", reply.text, expected.text);
        let noise = reply.as_ref().ok().and_then(|reply| reply.as_ref().ok()).map_or(0.0, |r| r.noise(expected));
        let (wrong, differs) = match reply {
            Err(_) => (Some(format!("{i}: hung for {HUNG:?}")), None),
            Ok(Err(problem)) => (Some(format!("{i}: {problem}")), None),
            Ok(Ok(reply)) if !reply.is_as_complete_as(expected) => (Some(format!("{reply:?}, {}", both(&reply))), None),
            Ok(Ok(reply)) if reply.text != expected.text => {
                (None, Some(Divergence { text: both(&reply), margin: reply.margin(expected) }))
            }
            Ok(Ok(_)) => (None, None),
        };
        wrong.iter().for_each(|wrong| println!("WRONG {wrong}"));
        differs.iter().for_each(|differs| println!("DIFFERS {} (margin {:?})", differs.text, differs.margin));
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
