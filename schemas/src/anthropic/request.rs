//! `POST /v1/messages` and `POST /v1/messages/count_tokens`: a body → one [`GenerateRequest`], or a conversation.
//!
//! Accepted and ignored: `metadata`, `service_tier`, `cache_control`, `context_management`, the `anthropic-version` and
//! `anthropic-beta` headers, and any field nobody here has heard of.

use serde_json::{Map, Value};

use super::messages;
use crate::constraint::{Constraint, check_schema};
use crate::generate::{Conversation, GenerateRequest, Input, Sampling};
use crate::request::fields::Fields;
use crate::request::{InvalidRequest, json, sampling, stop};
use crate::tools::ToolUse;

/// A message as the client asked for it.
#[derive(Debug, Clone, PartialEq)]
pub struct MessagesRequest {
    /// What to generate.
    pub generate: GenerateRequest,
    /// As server-sent events.
    pub stream: bool,
}

/// A conversation whose tokens are to be counted.
#[derive(Debug, Clone, PartialEq)]
pub struct CountRequest {
    /// The model's public name, as the client wrote it.
    pub model: String,
    /// What to count.
    pub conversation: Conversation,
}

impl MessagesRequest {
    /// Reads a body. `drawn_seed` is used where the client sent none.
    pub fn parse(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        let object = json::read_object(body)?;
        let root = Fields::root(&object);
        let model = root.model()?;
        let max_tokens = root.integer("max_tokens", 1..=i64::from(u32::MAX))?.map(|n| n as u32);
        let max_tokens = max_tokens.ok_or_else(|| InvalidRequest::at("max_tokens", "is missing"))?;
        let generate = GenerateRequest {
            model,
            input: Input::Chat(conversation(root)?),
            n: 1,
            max_tokens: Some(max_tokens),
            stop: stop::parse_named(root, "stop_sequences")?,
            sampling: sampling::parse(root, Sampling { seed: drawn_seed, ..Sampling::default() })?,
            top_logprobs: None,
            ignore_eos: false,
            constraint: constraint(root)?,
            tools: ToolUse::default(),
            wants_thinking: false,
        };
        Ok(MessagesRequest { generate, stream: root.boolean("stream")?.unwrap_or(false) })
    }
}

impl CountRequest {
    /// Reads a body.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let object = json::read_object(body)?;
        let root = Fields::root(&object);
        Ok(CountRequest { model: root.model()?, conversation: conversation(root)? })
    }
}

fn conversation(root: Fields<'_>) -> Result<Conversation, InvalidRequest> {
    refuse(root)?;
    let mut template_args = Map::new();
    if thinking(root) == Some("disabled") {
        template_args.insert("enable_thinking".to_owned(), false.into());
    }
    Ok(Conversation { messages: messages::parse(root)?, template_args, ..Conversation::default() })
}

/// The kind of thinking that is asked for.
fn thinking<'a>(root: Fields<'a>) -> Option<&'a str> {
    root.get("thinking").and_then(|value| value.get("type")).and_then(Value::as_str)
}

/// Refuses what is asked for in earnest and not built.
fn refuse(root: Fields<'_>) -> Result<(), InvalidRequest> {
    if root.array("tools")?.is_some_and(|tools| !tools.is_empty()) {
        return Err(InvalidRequest::unsupported("tools", "Tool calling on this route"));
    }
    let kind = |field: &str| root.get(field).and_then(|value| value.get("type")).and_then(Value::as_str);
    match kind("tool_choice") {
        None | Some("auto" | "none") => {}
        Some(_) => return Err(InvalidRequest::unsupported("tool_choice", "Tool choice on this route")),
    }
    match thinking(root) {
        // 'adaptive' leaves it to the model.
        None | Some("disabled" | "adaptive") => Ok(()),
        Some(_) => Err(InvalidRequest::unsupported("thinking", "Asking for thinking on this route")),
    }
}

/// `output_config.format`, or the older `output_format`.
fn constraint(root: Fields<'_>) -> Result<Option<Constraint>, InvalidRequest> {
    let newer = match root.get("output_config") {
        Some(config) => Fields::at(config, "output_config")?.get("format"),
        None => None,
    };
    let (format, name) = match newer {
        Some(format) => (format, "output_config.format"),
        None => match root.get("output_format") {
            Some(format) => (format, "output_format"),
            None => return Ok(None),
        },
    };
    if Fields::at(format, name)?.string("type")? != Some("json_schema") {
        return Err(InvalidRequest::at(name, "type must be json_schema"));
    }
    let schema = format.get("schema").filter(|schema| !schema.is_null());
    let schema = schema.ok_or_else(|| InvalidRequest::at(name, "needs a schema"))?;
    check_schema(schema).map_err(|e| InvalidRequest::at(name, e))?;
    Ok(Some(Constraint::JsonSchema { schema: schema.clone() }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed(extra: Value) -> Result<MessagesRequest, InvalidRequest> {
        let mut body = json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        MessagesRequest::parse(body.to_string().as_bytes(), 7)
    }

    fn refused(extra: Value, param: &str) {
        assert_eq!(parsed(extra.clone()).unwrap_err().param.as_deref(), Some(param), "{extra}");
    }

    #[test]
    fn fields_reach_the_request() {
        let request = parsed(json!({})).unwrap();
        assert_eq!((request.generate.max_tokens, request.stream, request.generate.sampling.seed), (Some(9), false, 7));
        let schema = json!({"type": "object"});
        let request = parsed(json!({"stream": true, "temperature": 0, "top_k": 3, "stop_sequences": ["a", "b"],
            "thinking": {"type": "adaptive"}, "metadata": {"user_id": "x"}, "tools": [],
            "output_config": {"format": {"type": "json_schema", "schema": schema}}}))
        .unwrap();
        assert!(request.stream);
        assert_eq!((request.generate.sampling.top_k, request.generate.stop), (3, vec!["a".into(), "b".into()]));
        assert_eq!(request.generate.constraint, Some(Constraint::JsonSchema { schema }));
        let count = CountRequest::parse(br#"{"model": "m", "messages": [{"role": "user", "content": "hi"}]}"#).unwrap();
        assert_eq!(count.conversation.messages.len(), 1);
    }

    #[test]
    fn what_cannot_be_read_or_honoured_is_named() {
        refused(json!({"max_tokens": null}), "max_tokens");
        refused(json!({"max_tokens": 0}), "max_tokens");
        refused(json!({"model": ""}), "model");
        refused(json!({"messages": []}), "messages");
        refused(json!({"stop_sequences": [""]}), "stop_sequences");
        refused(json!({"temperature": 3}), "temperature");
        refused(json!({"tools": [{"name": "f", "input_schema": {}}]}), "tools");
        refused(json!({"tool_choice": {"type": "any"}}), "tool_choice");
        refused(json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}), "thinking");
        refused(json!({"output_config": {"format": {"type": "xml"}}}), "output_config.format");
        refused(json!({"output_format": {"type": "json_schema"}}), "output_format");
    }
}
