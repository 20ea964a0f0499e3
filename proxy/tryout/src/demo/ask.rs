//! Sends one streaming request and reads its reply, with the figures that the reply reports.

use std::time::{Duration, Instant};

use baton_proxy::serve::CommandFailure;
use futures::StreamExt;
use serde::Deserialize;
use serde_json::json;

/// The public name under which the demonstration serves its model.
pub(super) const MODEL: &str = "demo";

/// A small model on a busy machine takes a minute at most.
const DEADLINE: Duration = Duration::from_secs(300);

/// The longest stream that is read; a normal one has a few kilobytes.
const MAX_REPLY_BYTES: usize = 1 << 20;

/// A reply and the figures that it reports.
#[derive(Debug, Default)]
pub(super) struct DemoReply {
    /// The value of `x-baton-route`.
    pub(super) route: String,
    pub(super) text: String,
    /// From sending the request to the first text, as the client sees it.
    pub(super) ttft_ms: f64,
    /// From sending the request to the end of the reply.
    pub(super) total_ms: f64,
    pub(super) n_prompt: u64,
    /// Tokens of the prompt that a cache had.
    pub(super) n_cached: u64,
    /// Tokens of the reply.
    pub(super) n_reply: u64,
    /// The handoff's report, if there was a handoff.
    pub(super) handoff: Option<DemoHandoff>,
}

/// `timings.handoff`. Times in milliseconds.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct DemoHandoff {
    pub(super) n_bytes: u64,
    pub(super) queue_ms: f64,
    pub(super) prefill_ms: f64,
    pub(super) transfer_ms: f64,
    pub(super) import_ms: f64,
    pub(super) after_prefill_ms: f64,
    pub(super) total_ms: f64,
    pub(super) failure: Option<String>,
}

#[derive(Deserialize)]
struct DemoChunk {
    choices: Vec<DemoChoice>,
    usage: Option<DemoUsage>,
    timings: Option<DemoTimings>,
}

#[derive(Deserialize)]
struct DemoChoice {
    delta: DemoDelta,
}

#[derive(Deserialize)]
struct DemoDelta {
    content: Option<String>,
}

#[derive(Deserialize)]
struct DemoUsage {
    prompt_tokens: u64,
    completion_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: DemoPromptDetails,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct DemoPromptDetails {
    cached_tokens: u64,
}

#[derive(Deserialize)]
struct DemoTimings {
    handoff: Option<DemoHandoff>,
}

/// Sends a prompt and reads the reply, of at most `max_tokens`, to its end.
pub(super) async fn ask(base: &str, prompt: &str, max_tokens: u32) -> Result<DemoReply, CommandFailure> {
    let body = json!({
        "model": MODEL, "messages": [{ "role": "user", "content": prompt }], "temperature": 0,
        "max_tokens": max_tokens, "stream": true, "stream_options": { "include_usage": true },
    });
    let client = reqwest::Client::builder().no_proxy().build()?;
    let call = client.post(format!("{base}/v1/chat/completions")).json(&body);
    let reading = read(call);
    tokio::time::timeout(DEADLINE, reading).await.map_err(|_| CommandFailure("the reply takes too long".into()))?
}

async fn read(call: reqwest::RequestBuilder) -> Result<DemoReply, CommandFailure> {
    let sent = Instant::now();
    let response = call.send().await?.error_for_status()?;
    let route = response.headers().get("x-baton-route").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let mut reply = DemoReply { route: route.to_owned(), ..DemoReply::default() };
    let mut bytes = response.bytes_stream();
    let mut pending = Vec::new();
    let mut n_read = 0;
    while let Some(piece) = bytes.next().await {
        let piece = piece?;
        n_read += piece.len();
        if n_read > MAX_REPLY_BYTES {
            return Err(CommandFailure("the reply is too long".into()));
        }
        pending.extend_from_slice(&piece);
        while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            match line.trim_ascii().strip_prefix(b"data: ") {
                Some(b"[DONE]") => {
                    reply.total_ms = millis(sent);
                    return Ok(reply);
                }
                Some(data) => reply.take(serde_json::from_slice(data)?, sent),
                // Comments and the empty lines between events.
                None => {}
            }
        }
    }
    Err(CommandFailure("the reply ended early".into()))
}

impl DemoReply {
    fn take(&mut self, chunk: DemoChunk, sent: Instant) {
        for content in chunk.choices.into_iter().filter_map(|choice| choice.delta.content) {
            if self.text.is_empty() && !content.is_empty() {
                self.ttft_ms = millis(sent);
            }
            self.text += &content;
        }
        if let Some(usage) = chunk.usage {
            self.n_prompt = usage.prompt_tokens;
            self.n_cached = usage.prompt_tokens_details.cached_tokens;
            self.n_reply = usage.completion_tokens;
        }
        if let Some(handoff) = chunk.timings.and_then(|timings| timings.handoff) {
            self.handoff = Some(handoff);
        }
    }
}

fn millis(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}
