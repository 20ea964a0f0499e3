//! One reply: sends the request and reads its events. Everything that it hands on is clean.

use std::time::Duration;

use baton_link::transport::short_body;
use baton_proxy::serve::CommandFailure;
use reqwest::redirect::Policy;
use reqwest::{Response, StatusCode};
use serde::Deserialize;
use serde_json::Value;

use super::super::endpoint::root_cause;
use super::clean::{Cleaner, clean};
use super::connect::Connection;

/// The longest wait for a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// The longest silence. A Baton endpoint sends a comment every few seconds; a prompt may take other servers minutes.
const SILENCE: Duration = Duration::from_secs(600);

/// The longest line of a stream; an event has some hundred bytes.
const MAX_LINE_BYTES: usize = 4 << 20;

/// The longest body of an error.
const MAX_ERROR_BYTES: usize = 64 << 10;

/// The longest reply, with its reasoning and its calls.
const MAX_REPLY_BYTES: usize = 64 << 20;

/// Calls of one reply.
const MAX_CALLS: usize = 128;

/// A piece of a reply.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReplyPiece {
    Text(String),
    Reasoning(String),
    /// A whole call, after the text.
    Call {
        name: String,
        arguments: String,
    },
}

/// A reply that is being read. Dropping it closes its connection, which cancels the request.
pub(super) struct ChatReply {
    response: Response,
    /// Its `x-baton-route`.
    pub(super) route: Option<String>,
    pending: Vec<u8>,
    ready: std::collections::VecDeque<ReplyPiece>,
    text: Cleaner,
    reasoning: Cleaner,
    calls: Vec<CollectedCall>,
    n_bytes: usize,
    has_ended: bool,
}

#[derive(Default)]
struct CollectedCall {
    name: String,
    arguments: String,
}

#[derive(Deserialize)]
struct ReplyChunk {
    #[serde(default)]
    choices: Vec<DeltaChoice>,
    error: Option<ErrorDetail>,
}

#[derive(Deserialize)]
struct DeltaChoice {
    #[serde(default)]
    delta: Delta,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Delta {
    content: Option<String>,
    reasoning_content: Option<String>,
    /// The same, from other servers.
    reasoning: Option<String>,
    /// Words with which the model of an upstream refuses to answer.
    refusal: Option<String>,
    tool_calls: Option<Vec<CallDelta>>,
}

#[derive(Deserialize)]
struct CallDelta {
    #[serde(default)]
    index: usize,
    #[serde(default)]
    function: FunctionDelta,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct FunctionDelta {
    name: Option<String>,
    arguments: Option<String>,
}

#[derive(Deserialize)]
struct FailedReply {
    error: ErrorDetail,
}

#[derive(Deserialize)]
struct ErrorDetail {
    message: String,
}

impl ChatReply {
    /// Sends a request. Errors: nothing answers, or the endpoint refuses it.
    pub(super) async fn ask(to: &Connection, request: &Value) -> Result<ChatReply, CommandFailure> {
        // A redirect would send the key and the chat to another server.
        let client = reqwest::Client::builder()
            .connect_timeout(CONNECT_DEADLINE)
            .read_timeout(SILENCE)
            .no_proxy()
            .redirect(Policy::none())
            .build()?;
        let mut call = client.post(format!("{}/v1/chat/completions", to.base)).json(request);
        if let Some(key) = &to.api_key {
            call = call.bearer_auth(key);
        }
        let sent = call.send().await;
        let response = sent.map_err(|error| {
            CommandFailure(format!("no endpoint answers at {}: {}", to.base, clean(&root_cause(&error))))
        })?;
        if response.status() != StatusCode::OK {
            return Err(refusal(response).await);
        }
        let route = response.headers().get("x-baton-route").and_then(|route| route.to_str().ok()).map(clean);
        Ok(ChatReply {
            response,
            route,
            pending: Vec::new(),
            ready: std::collections::VecDeque::new(),
            text: Cleaner::default(),
            reasoning: Cleaner::default(),
            calls: Vec::new(),
            n_bytes: 0,
            has_ended: false,
        })
    }

    /// The next piece; `None` at the end. Errors: the reply broke off, in words.
    pub(super) async fn next(&mut self) -> Result<Option<ReplyPiece>, CommandFailure> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Ok(Some(piece));
            }
            if self.has_ended {
                return Ok(None);
            }
            let lost = |cause: &str| CommandFailure(format!("the endpoint was lost ({cause}); the reply ends here"));
            let chunk = self.response.chunk().await.map_err(|error| lost(&clean(&root_cause(&error))))?;
            let chunk = chunk.ok_or_else(|| lost("it closed the connection"))?;
            self.n_bytes += chunk.len();
            if self.n_bytes > MAX_REPLY_BYTES {
                return Err(CommandFailure("the reply is too long".into()));
            }
            self.pending.extend_from_slice(&chunk);
            self.read_lines()?;
            if self.pending.len() > MAX_LINE_BYTES {
                return Err(CommandFailure("the endpoint sends no events, but one endless line".into()));
            }
        }
    }

    fn read_lines(&mut self) -> Result<(), CommandFailure> {
        let Some(end) = self.pending.iter().rposition(|byte| *byte == b'\n') else { return Ok(()) };
        let rest = self.pending.split_off(end + 1);
        let lines = std::mem::replace(&mut self.pending, rest);
        for line in lines.split(|byte| *byte == b'\n') {
            // The head of a request that waits for long leaves before its route is known.
            if let Some(route) = line.trim_ascii().strip_prefix(b": x-baton-route: ") {
                self.route = Some(clean(&String::from_utf8_lossy(route)));
            }
            match line.trim_ascii().strip_prefix(b"data:").map(<[u8]>::trim_ascii) {
                Some(b"[DONE]") => {
                    self.has_ended = true;
                    let calls = std::mem::take(&mut self.calls);
                    let calls = calls.into_iter().filter(|call| !call.name.is_empty());
                    let piece = |call: CollectedCall| ReplyPiece::Call {
                        name: clean(&call.name),
                        arguments: clean(&call.arguments),
                    };
                    self.ready.extend(calls.map(piece));
                }
                Some(data) => {
                    let chunk = serde_json::from_slice(data);
                    self.take(
                        chunk.map_err(|_| CommandFailure("the endpoint sent an event that is no chunk".into()))?,
                    )?;
                }
                // Comments, names of events, and the empty lines between them.
                None => {}
            }
        }
        Ok(())
    }

    fn take(&mut self, chunk: ReplyChunk) -> Result<(), CommandFailure> {
        if let Some(error) = chunk.error {
            return Err(CommandFailure(format!("the reply failed: {}", one_line(&error.message))));
        }
        let Some(DeltaChoice { delta }) = chunk.choices.into_iter().next() else { return Ok(()) };
        if let Some(text) = delta.reasoning_content.or(delta.reasoning) {
            self.ready
                .extend(Some(self.reasoning.clean(&text)).filter(|text| !text.is_empty()).map(ReplyPiece::Reasoning));
        }
        if let Some(text) = delta.content.or(delta.refusal) {
            self.ready.extend(Some(self.text.clean(&text)).filter(|text| !text.is_empty()).map(ReplyPiece::Text));
        }
        for CallDelta { index, function } in
            delta.tool_calls.into_iter().flatten().filter(|call| call.index < MAX_CALLS)
        {
            if self.calls.len() <= index {
                self.calls.resize_with(index + 1, CollectedCall::default);
            }
            let call = &mut self.calls[index];
            call.name += &function.name.unwrap_or_default();
            call.arguments += &function.arguments.unwrap_or_default();
        }
        Ok(())
    }
}

/// The endpoint's own words for a refused request.
async fn refusal(response: Response) -> CommandFailure {
    let status = response.status();
    let body = short_body(response, MAX_ERROR_BYTES).await.unwrap_or_default();
    match (serde_json::from_slice(&body), status) {
        (Ok(FailedReply { error }), _) => CommandFailure(one_line(&error.message)),
        (Err(_), status) => CommandFailure(format!("the endpoint answered {status}")),
    }
}

/// A message of the endpoint, clean and in one line.
fn one_line(message: &str) -> String {
    clean(message).split_whitespace().collect::<Vec<_>>().join(" ")
}
