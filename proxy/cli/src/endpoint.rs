//! The client of a running endpoint: its address, its key, and errors in plain words.

use std::time::Duration;

use baton_link::transport::{ShortBodyError, short_body};
use baton_proxy::config::{API_KEY_VARIABLE, DEFAULT_LISTEN};
use baton_proxy::observe::snapshot::EndpointState;
use baton_proxy::serve::{CommandFailure, endpoint_url};
use baton_schemas::printable::{printable, printable_within};
use clap::Args;
use reqwest::redirect::Policy;
use reqwest::{RequestBuilder, Response, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The longest text of an answer, characters. Warnings have some hundred.
const MAX_TEXT_CHARS: usize = 1_000;

/// The deadline of a state: longer than a busy endpoint takes to answer, shorter than a person waits.
const STATE_DEADLINE: Duration = Duration::from_secs(5);

/// A state has some kilobytes per model.
const MAX_STATE_BYTES: usize = 16 << 20;

/// The endpoint to call.
#[derive(Args)]
pub(super) struct EndpointArgs {
    /// Address of the endpoint [default: 127.0.0.1:8080]
    #[arg(value_name = "HOST:PORT|URL")]
    endpoint: Option<String>,
    /// The endpoint's key, if it needs one; `baton status` needs an operator's
    #[arg(long = "api-key", value_name = "KEY", env = API_KEY_VARIABLE, hide_env_values = true)]
    api_key: Option<String>,
}

/// Why an endpoint gave no answer.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct AskFailure {
    /// Nothing answers at the address. Otherwise the endpoint is there and refuses.
    pub(super) is_unreachable: bool,
    message: String,
}

impl AskFailure {
    fn refused(CommandFailure(message): CommandFailure) -> AskFailure {
        AskFailure { is_unreachable: false, message }
    }
}

impl EndpointArgs {
    /// The endpoint at an address.
    pub(super) fn at(endpoint: String, api_key: Option<String>) -> EndpointArgs {
        EndpointArgs { endpoint: Some(endpoint), api_key }
    }

    /// Returns true if its address was given.
    pub(super) fn is_named(&self) -> bool {
        self.endpoint.is_some()
    }

    fn address(&self) -> &str {
        self.endpoint.as_deref().unwrap_or(DEFAULT_LISTEN)
    }

    /// Returns the address as a URL. Errors: it is not one.
    pub(super) fn base(&self) -> Result<String, CommandFailure> {
        endpoint_url(self.address())
    }

    /// Sends the request that `prepare` builds from a client and the address. Errors: no answer in time, or the key is
    /// missing or wrong.
    pub(super) async fn ask(
        &self,
        deadline: Duration,
        prepare: impl FnOnce(&reqwest::Client, &str) -> RequestBuilder,
    ) -> Result<Response, AskFailure> {
        let base = self.base().map_err(AskFailure::refused)?;
        // A redirect would send the key and the prompt to another server.
        let client = reqwest::Client::builder().timeout(deadline).no_proxy().redirect(Policy::none()).build();
        let client = client.map_err(|error| AskFailure::refused(error.into()))?;
        let mut request = prepare(&client, &base);
        if let Some(key) = &self.api_key {
            request = request.bearer_auth(key);
        }
        let response = request.send().await.map_err(|error| {
            let CommandFailure(message) = self.unreachable(&error);
            AskFailure { is_unreachable: true, message }
        })?;
        match (response.status(), self.api_key.as_deref().unwrap_or_default()) {
            (StatusCode::UNAUTHORIZED, "") => {
                let message = format!("{base} needs a key: give one with --api-key or BATON_API_KEY");
                Err(AskFailure::refused(CommandFailure(message)))
            }
            (StatusCode::UNAUTHORIZED, _) => {
                Err(AskFailure::refused(CommandFailure(format!("{base} does not know this key"))))
            }
            _ => Ok(response),
        }
    }

    /// Asks for its state. Errors: it cannot be reached, refuses, or is of another version.
    pub(super) async fn state(&self) -> Result<EndpointState, CommandFailure> {
        let base = self.base()?;
        let response = self.ask(STATE_DEADLINE, |client, base| client.get(format!("{base}/baton/state"))).await?;
        match response.status().as_u16() {
            200 => {}
            403 => return Err(CommandFailure(format!("{base} shows its state only to operators' keys"))),
            status => return Err(CommandFailure(format!("{base} is not a Baton endpoint: it answered {status}"))),
        }
        let answer = self.answer(response, MAX_STATE_BYTES).await?;
        serde_json::from_value(answer)
            .map_err(|_| CommandFailure(format!("{base} is not a Baton endpoint of this version")))
    }

    /// Returns the JSON of at most `most` bytes with which the endpoint answers. Errors: as of [`ask`](Self::ask), the endpoint's own
    /// in its words, or it is of another version.
    pub(super) async fn json<T: DeserializeOwned>(
        &self,
        deadline: Duration,
        most: usize,
        prepare: impl FnOnce(&reqwest::Client, &str) -> RequestBuilder,
    ) -> Result<T, CommandFailure> {
        let base = self.base()?;
        let reply = self.ask(deadline, prepare).await?;
        let status = reply.status();
        let answer = self.answer(reply, most).await?;
        if !status.is_success() {
            let error = &answer["error"];
            let message = error["message"].as_str().or(error.as_str()).map(str::to_owned);
            let other = || format!("{base} is not a Baton endpoint of this version: it answered {status}");
            return Err(CommandFailure(message.unwrap_or_else(other)));
        }
        serde_json::from_value(answer)
            .map_err(|_| CommandFailure(format!("{base} is not a Baton endpoint of this version")))
    }

    /// Reads a reply of at most `most` bytes, whose texts can then be printed. Null if it is no JSON. Errors: it is longer, or does
    /// not arrive in time.
    pub(super) async fn answer(&self, reply: Response, most: usize) -> Result<Value, CommandFailure> {
        let body = self.body(reply, most).await?;
        let mut answer = serde_json::from_slice(&body).unwrap_or_default();
        make_printable(&mut answer);
        Ok(answer)
    }

    async fn body(&self, reply: Response, most: usize) -> Result<Vec<u8>, CommandFailure> {
        let base = self.base()?;
        short_body(reply, most).await.map_err(|error| match error {
            ShortBodyError::TooLong(_) => {
                CommandFailure(format!("{base} is not a Baton endpoint: its reply is too long"))
            }
            ShortBodyError::Lost(error) => self.unreachable(&error),
        })
    }

    fn unreachable(&self, error: &reqwest::Error) -> CommandFailure {
        CommandFailure(format!("no endpoint answers at {}: {}", self.address(), root_cause(error)))
    }
}

/// What an endpoint says, and what others have said to it, must not control this terminal.
fn make_printable(value: &mut Value) {
    match value {
        Value::String(text) => *text = printable_within(text, MAX_TEXT_CHARS),
        Value::Array(items) => items.iter_mut().for_each(make_printable),
        Value::Object(fields) => {
            let cleaned = std::mem::take(fields).into_iter().map(|(name, mut value)| {
                make_printable(&mut value);
                (printable(&name), value)
            });
            *fields = cleaned.collect();
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The innermost cause, which is the system's message.
pub(super) fn root_cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_an_endpoint_answers_cannot_control_the_terminal() {
        let evil = "\u{1b}[2J".repeat(1_000);
        let mut answer = json!({ "models": [{ "name": evil, "n": 1 }], evil.clone(): { "message": "\u{9b}31m" } });
        make_printable(&mut answer);
        let text = answer.to_string();
        assert!(!text.contains(|c: char| c.is_control()) && !text.contains("\\u001b"), "{text}");
        assert!(text.chars().count() < 1_300 && answer["models"][0]["n"] == 1, "{text}");
    }
}
