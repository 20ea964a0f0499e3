//! `POST /v1/messages` and `POST /v1/messages/count_tokens`: a body → one [`GenerateRequest`], or a conversation.
//!
//! Accepted and ignored: `metadata`, `service_tier`, `cache_control`, `context_management`, the `anthropic-version` and
//! `anthropic-beta` headers, and any field nobody here has heard of.

use serde_json::Map;

use super::{messages, tools};
use crate::constraint::{Constraint, check_schema};
use crate::generate::{ChatPrompt, Conversation, GenerateRequest, Input, Sampling};
use crate::request::fields::Fields;
use crate::request::images::Images;
use crate::request::{InvalidRequest, json, sampling, stop};

/// A message as the client asked for it.
#[derive(Debug, Clone, PartialEq)]
pub struct MessagesRequest {
    /// What to generate.
    pub generate: GenerateRequest,
    /// As server-sent events.
    pub stream: bool,
    /// What the model thinks is a part of the reply.
    pub shows_thinking: bool,
}

/// A chat whose prompt's tokens are to be counted.
#[derive(Debug, Clone, PartialEq)]
pub struct CountRequest {
    /// The model's public name, as the client wrote it.
    pub model: String,
    /// What to count.
    pub chat: ChatPrompt,
}

impl MessagesRequest {
    /// Reads a body. `drawn_seed` is used where the client sent none.
    pub fn parse(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        let object = json::read_object(body)?;
        let root = Fields::root(&object);
        let model = root.model()?;
        let max_tokens = root.integer("max_tokens", 1..=i64::from(u32::MAX))?.map(|n| n as u32);
        let max_tokens = max_tokens.ok_or_else(|| InvalidRequest::at("max_tokens", "is missing"))?;
        let ChatPrompt { conversation, tools } = chat(root)?;
        let (sampling, chosen) = sampling::parse(root, Sampling { seed: drawn_seed, ..Sampling::default() })?;
        let generate = GenerateRequest {
            model,
            input: Input::Chat(conversation),
            n: 1,
            max_tokens: Some(max_tokens),
            stop: stop::parse_named(root, "stop_sequences")?,
            sampling,
            chosen,
            top_logprobs: None,
            ignore_eos: false,
            constraint: constraint(root)?,
            tools,
            // Claude's clients ask every model to think, whatever it is.
            wants_thinking: false,
            keep_alive: None,
            num_ctx: None,
            context: None,
        };
        let shows_thinking = matches!(thinking(root)?, Some(Thinking::Enabled | Thinking::Adaptive));
        Ok(MessagesRequest { generate, stream: root.boolean("stream")?.unwrap_or(false), shows_thinking })
    }
}

impl CountRequest {
    /// Reads a body.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let object = json::read_object(body)?;
        let root = Fields::root(&object);
        // It has no tokens, but a mistake in it is one here as it will be in the message.
        constraint(root)?;
        Ok(CountRequest { model: root.model()?, chat: chat(root)? })
    }
}

fn chat(root: Fields<'_>) -> Result<ChatPrompt, InvalidRequest> {
    let mut template_args = Map::new();
    match thinking(root)? {
        Some(Thinking::Enabled) => template_args.insert("enable_thinking".to_owned(), true.into()),
        Some(Thinking::Disabled) => template_args.insert("enable_thinking".to_owned(), false.into()),
        // The model's own habit.
        Some(Thinking::Adaptive) | None => None,
    };
    if let Some(effort) = effort(root)? {
        template_args.insert("reasoning_effort".to_owned(), effort.into());
    }
    let mut images = Images::default();
    let messages = messages::parse(root, &mut images)?;
    let conversation = Conversation { messages, template_args, images: images.into_vec(), ..Conversation::default() };
    Ok(ChatPrompt { conversation, tools: tools::parse(root)? })
}

/// The kind of thinking that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Thinking {
    Enabled,
    Disabled,
    Adaptive,
}

/// How many tokens it may take (`budget_tokens`) is not kept.
fn thinking(root: Fields<'_>) -> Result<Option<Thinking>, InvalidRequest> {
    let Some(thinking) = root.get("thinking") else { return Ok(None) };
    match Fields::at(thinking, "thinking")?.string("type")? {
        Some("enabled") => Ok(Some(Thinking::Enabled)),
        Some("disabled") => Ok(Some(Thinking::Disabled)),
        Some("adaptive") => Ok(Some(Thinking::Adaptive)),
        _ => Err(InvalidRequest::at("thinking.type", "must be enabled, disabled or adaptive")),
    }
}

/// `output_config.effort`; templates read it under the name that chats have for it.
fn effort<'a>(root: Fields<'a>) -> Result<Option<&'a str>, InvalidRequest> {
    let Some(config) = root.get("output_config") else { return Ok(None) };
    match Fields::at(config, "output_config")?.string("effort")? {
        known @ (None | Some("low" | "medium" | "high" | "xhigh" | "max")) => Ok(known),
        Some(_) => Err(InvalidRequest::at("output_config.effort", "must be low, medium, high, xhigh or max")),
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
    Ok(Some(Constraint::JsonSchema { schema: schema.clone(), field: name.to_owned() }))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

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
        assert_eq!(
            request.generate.constraint,
            Some(Constraint::JsonSchema { schema, field: "output_config.format".to_owned() })
        );
        let count = CountRequest::parse(br#"{"model": "m", "messages": [{"role": "user", "content": "hi"}]}"#).unwrap();
        assert_eq!(count.chat.conversation.messages.len(), 1);
    }

    #[test]
    fn thinking_is_shown_to_those_who_asked() {
        let args = |extra: Value| {
            let request = parsed(extra).unwrap();
            let Input::Chat(conversation) = request.generate.input else { panic!("not a chat") };
            (request.shows_thinking, Value::Object(conversation.template_args))
        };
        assert_eq!(args(json!({})), (false, json!({})));
        assert_eq!(args(json!({"thinking": {"type": "adaptive"}})), (true, json!({})));
        let enabled =
            json!({"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}});
        assert_eq!(args(enabled), (true, json!({"enable_thinking": true, "reasoning_effort": "low"})));
        assert_eq!(args(json!({"thinking": {"type": "disabled"}})), (false, json!({"enable_thinking": false})));
    }

    #[test]
    fn a_count_is_of_the_tools_too() {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}});
        let count = CountRequest::parse(body.to_string().as_bytes()).unwrap();
        assert_eq!(count.chat.tools.offered()[0].name, "f");
    }

    #[test]
    fn what_cannot_be_read_or_honoured_is_named() {
        refused(json!({"max_tokens": null}), "max_tokens");
        refused(json!({"max_tokens": 0}), "max_tokens");
        refused(json!({"model": ""}), "model");
        refused(json!({"messages": []}), "messages");
        refused(json!({"stop_sequences": [""]}), "stop_sequences");
        refused(json!({"temperature": 3}), "temperature");
        refused(json!({"tools": [{"name": "a b", "input_schema": {}}]}), "tools[0].name");
        refused(json!({"tool_choice": {"type": "any"}}), "tool_choice");
        refused(json!({"thinking": {"type": "always"}}), "thinking.type");
        refused(json!({"output_config": {"effort": "huge"}}), "output_config.effort");
        refused(json!({"output_config": {"format": {"type": "xml"}}}), "output_config.format");
        refused(json!({"output_format": {"type": "json_schema"}}), "output_format");
    }
}
