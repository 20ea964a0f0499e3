//! What `/api/chat` and `/api/generate` have in common.

use serde_json::{Map, Value};

use super::format;
use super::options::{self, Options};
use crate::generate::{GenerateRequest, Input};
use crate::keep_alive::KeepAlive;
use crate::openai::TOP_LOGPROBS;
use crate::request::fields::{Fields, wrong_type};
use crate::request::{InvalidRequest, tools};

/// Whether a request only asks for its model to be loaded or unloaded, and which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadOnly {
    /// Nothing to answer: the model is to be ready.
    Load,
    /// `keep_alive` is 0: the model may go.
    Unload,
}

impl LoadOnly {
    /// A request without anything to answer.
    pub(super) fn of(root: Fields<'_>) -> Result<Self, InvalidRequest> {
        let is_nothing = keep_alive(root)?.is_some_and(KeepAlive::is_nothing);
        Ok(if is_nothing { LoadOnly::Unload } else { LoadOnly::Load })
    }

    /// Ollama's `done_reason`.
    pub fn done_reason(self) -> &'static str {
        match self {
            LoadOnly::Load => "load",
            LoadOnly::Unload => "unload",
        }
    }
}

/// The request that a dialect's body becomes, with `input` as what to continue.
pub(super) fn generate(root: Fields<'_>, input: Input, drawn_seed: u64) -> Result<GenerateRequest, InvalidRequest> {
    let Options { max_tokens, num_ctx, stop, sampling, chosen } = options::parse(root, drawn_seed)?;
    let top_logprobs = root.integer("top_logprobs", TOP_LOGPROBS)?.unwrap_or(0);
    let wants_logprobs = root.boolean("logprobs")?.unwrap_or(false);
    Ok(GenerateRequest {
        model: root.model()?,
        input,
        n: 1,
        max_tokens,
        stop,
        sampling,
        chosen,
        top_logprobs: wants_logprobs.then_some(top_logprobs as u32),
        ignore_eos: false,
        constraint: format::parse(root)?,
        tools: tools::parse_definitions(root)?,
        wants_thinking: wants_thinking(root)?,
        keep_alive: keep_alive(root)?,
        num_ctx,
        context: None,
    })
}

/// Ollama streams unless it is told not to.
pub(super) fn stream(root: Fields<'_>) -> Result<bool, InvalidRequest> {
    Ok(root.boolean("stream")?.unwrap_or(true))
}

/// What `think` asks of the chat template, for those that know these switches: `true`, `false` or an effort.
pub(super) fn template_args(root: Fields<'_>) -> Map<String, Value> {
    let mut args = Map::new();
    match root.get("think") {
        Some(Value::Bool(thinking)) => {
            args.insert("enable_thinking".to_owned(), (*thinking).into());
        }
        Some(effort @ Value::String(_)) => {
            args.insert("enable_thinking".to_owned(), true.into());
            args.insert("reasoning_effort".to_owned(), effort.clone());
        }
        _ => {}
    }
    args
}

/// Whether `think` asks for a model that can.
fn wants_thinking(root: Fields<'_>) -> Result<bool, InvalidRequest> {
    match root.get("think") {
        None => Ok(false),
        Some(Value::Bool(thinking)) => Ok(*thinking),
        Some(Value::String(effort)) if matches!(effort.as_str(), "low" | "medium" | "high" | "max") => Ok(true),
        Some(_) => Err(InvalidRequest::at("think", "must be true, false, \"low\", \"medium\", \"high\" or \"max\"")),
    }
}

/// `keep_alive`: a number of seconds, or a Go duration. An empty string says nothing.
pub(super) fn keep_alive(root: Fields<'_>) -> Result<Option<KeepAlive>, InvalidRequest> {
    const EXPECTED: &str = "a number of seconds or a duration like \"5m\"";
    let parsed = match root.get("keep_alive") {
        None => return Ok(None),
        Some(Value::String(text)) if text.is_empty() => return Ok(None),
        Some(Value::Number(seconds)) => seconds.as_f64().and_then(KeepAlive::of_seconds),
        Some(Value::String(duration)) => KeepAlive::parse(duration),
        Some(other) => return Err(wrong_type("keep_alive", EXPECTED, other)),
    };
    parsed.map(Some).ok_or_else(|| InvalidRequest::at("keep_alive", format_args!("must be {EXPECTED}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(keep_alive: Value, expected: Option<LoadOnly>) {
        let body = json!({ "keep_alive": keep_alive });
        assert_eq!(LoadOnly::of(Fields::root(body.as_object().unwrap())).ok(), expected, "{body}");
    }

    #[test]
    fn only_a_keep_alive_of_zero_unloads() {
        check(json!(null), Some(LoadOnly::Load));
        check(json!("5m"), Some(LoadOnly::Load));
        check(json!(-1), Some(LoadOnly::Load));
        check(json!("-1"), Some(LoadOnly::Load));
        check(json!("10s"), Some(LoadOnly::Load));
        check(json!("0.5s"), Some(LoadOnly::Load));
        check(json!(""), Some(LoadOnly::Load));
        check(json!(0), Some(LoadOnly::Unload));
        check(json!(0.0), Some(LoadOnly::Unload));
        check(json!("0"), Some(LoadOnly::Unload));
        check(json!("0m0s"), Some(LoadOnly::Unload));
        check(json!([]), None);
        check(json!("soon"), None);
    }
}
