//! `POST /api/chat`: a body → one [`GenerateRequest`], or a request to only load the model.

use serde_json::json;

use super::common::{Common, CommonBody, LoadOnly};
use super::messages::{self, OllamaMessage};
use crate::generate::{Conversation, GenerateRequest, Input};
use crate::message_role::MessageRole;
use crate::request::InvalidRequest;
use crate::request::demand::Off;
use crate::request::field::{Field, Items, object};
use crate::request::foreign::{Foreign, ForeignFields, OwnName, RefusedField};
use crate::request::images::Images;
use crate::request::read::read;

object! {
    /// A chat to continue. Without messages, the model is only loaded, or unloaded if `keep_alive` is 0.
    #[schemars(rename = "OllamaChatRequest", example = json!({
        "model": "smollm2", "options": {"num_predict": 8}, "messages": [{"role": "user", "content": "Say hello."}]
    }))]
    pub struct OllamaChatBody {
        /// The conversation so far, oldest message first.
        messages: Field<Items<OllamaMessage>>,
        /// The fields that `/api/chat` and `/api/generate` share.
        #[schemars(flatten)]
        common: CommonBody,
        #[schemars(skip)]
        foreign: Foreign<OllamaFields>,
    }
}

/// Fields of other dialects that stand in `options` here.
#[derive(Debug)]
pub(crate) struct OllamaFields;

const LENGTH: &str = "send 'options.num_predict'";

impl ForeignFields for OllamaFields {
    // A prompt that does not fit is refused, whatever they say.
    const WITHOUT_EFFECT: &'static [&'static str] = &["truncate", "shift"];
    const REFUSED: &'static [RefusedField] = &[
        RefusedField::new("max_output_tokens", Off::NEVER, "'max_output_tokens'", LENGTH),
        RefusedField::new("num_predict", Off::NEVER, "'num_predict'", LENGTH),
    ];
    const NAMES: &'static [OwnName] = &[
        OwnName::new("max_tokens", "'options.num_predict'"),
        OwnName::new("stop", "'options.stop'"),
        OwnName::new("temperature", "'options.temperature'"),
        OwnName::new("top_p", "'options.top_p'"),
        OwnName::new("top_k", "'options.top_k'"),
        OwnName::new("min_p", "'options.min_p'"),
        OwnName::new("logit_bias", "'options.logit_bias'"),
        OwnName::new("reasoning_effort", "'think'"),
        OwnName::new("response_format", "'format'"),
        OwnName::new("ignore_eos", ""),
        OwnName::new("tool_choice", ""),
        OwnName::new("n", ""),
    ];
}

/// A checked body of `/api/chat`.
#[derive(Debug, Clone, PartialEq)]
pub struct OllamaChatRequest {
    /// The request to run.
    pub generate: GenerateRequest,
    /// Set if there are no messages. Nothing is generated then.
    pub load_only: Option<LoadOnly>,
}

impl OllamaChatRequest {
    /// Parses and checks a body. `drawn_seed` is used if the client sent no seed.
    pub fn parse(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        let body: OllamaChatBody = read(body)?;
        body.foreign.check()?;
        let mut images = Images::default();
        let messages = messages::check(body.messages, &mut images)?;
        let after_tool = messages.last().is_some_and(|last| last.role == MessageRole::Tool);
        let Common { generate, template_args } = body.common.check(drawn_seed, after_tool)?;
        let load_only = messages.is_empty().then(|| LoadOnly::of(generate.keep_alive));
        let (images, linked_images) = images.into_lists();
        let input = Input::Chat(Conversation { messages, tools: Vec::new(), template_args, images, linked_images });
        Ok(OllamaChatRequest { generate: GenerateRequest { input, ..generate }, load_only })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::generate::Thinking;

    fn parsed(body: &Value) -> Result<OllamaChatRequest, InvalidRequest> {
        OllamaChatRequest::parse(body.to_string().as_bytes(), 7)
    }

    fn check(messages: Value, expected: Value) {
        let request = parsed(&json!({"model": "m", "messages": messages})).unwrap();
        let Input::Chat(conversation) = request.generate.input else { panic!("not a chat") };
        assert_eq!(serde_json::to_value(conversation.messages).unwrap(), expected);
    }

    fn refused(body: Value, param: &str) {
        assert_eq!(parsed(&body).unwrap_err().param.as_deref(), Some(param), "{body}");
    }

    #[test]
    fn messages_become_what_templates_read() {
        check(
            json!([{"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}]),
            json!([{"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}]),
        );
        check(
            json!([
                {"role": "assistant", "thinking": "hm", "tool_calls": [
                    {"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g"}}]},
                {"role": "tool", "content": "4", "tool_name": "f", "tool_call_id": "c", "images": null}]),
            json!([
                {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                    {"type": "function", "function": {"name": "g", "arguments": {}}}]},
                {"role": "tool", "content": "4", "tool_call_id": "c", "name": "f"}]),
        );
    }

    #[test]
    fn a_chat_streams_unless_it_is_told_not_to() {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        let request = parsed(&body).unwrap();
        assert!(request.generate.is_streamed && request.load_only.is_none());
        assert_eq!((request.generate.model.as_str(), request.generate.sampling.seed), ("m", 7));
        assert_eq!((request.generate.max_tokens, request.generate.top_logprobs), (None, None));
        let whole = parsed(&json!({"model": "m", "messages": [{"role": "user"}], "stream": false, "think": false,
            "logprobs": true, "top_logprobs": 3, "options": {"num_predict": 3}}))
        .unwrap();
        assert!(!whole.generate.is_streamed);
        assert_eq!((whole.generate.max_tokens, whole.generate.top_logprobs), (Some(3), Some(3)));
        let Input::Chat(conversation) = whole.generate.input else { panic!("not a chat") };
        assert_eq!(conversation.template_args["enable_thinking"], false);
    }

    #[test]
    fn tools_and_thinking_reach_the_request() {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
        let body = json!({"model": "m", "messages": [{"role": "user"}], "tools": [tool], "think": "high"});
        let generate = parsed(&body).unwrap().generate;
        assert_eq!(generate.tools.tools[0].name, "f");
        assert_eq!(generate.thinking, Thinking::Required);
        let Input::Chat(conversation) = generate.input else { panic!("not a chat") };
        assert!(conversation.tools.is_empty(), "the form in which the model is told of them is its format's affair");
        let args = Value::Object(conversation.template_args);
        assert_eq!(args, json!({"enable_thinking": true, "reasoning_effort": "high"}));
        refused(json!({"model": "m", "messages": [{"role": "user"}], "tools": [{}]}), "tools[0].function");
        refused(json!({"model": "m", "messages": [{"role": "user"}], "think": "hard"}), "think");
    }

    #[test]
    fn names_of_tools_are_not_limited_to_openais() {
        let tools =
            |name: &str| json!({"model": "m", "messages": [{"role": "user"}], "tools": [{"function": {"name": name}}]});
        for name in ["fs/read file", "server:tool", "a.b-c_d"] {
            assert_eq!(parsed(&tools(name)).unwrap().generate.tools.tools[0].name, name);
        }
        // No format of calls could tell where these end.
        for name in ["", " a", "a  b", "a\"b", "a<b", "a\nb", "a|b"] {
            refused(tools(name), "tools[0].function.name");
        }
        let message = parsed(&tools("a|b")).unwrap_err().message;
        assert!(message.contains("_-./:@+#") && message.contains("spaces"), "{message}");
    }

    #[test]
    fn without_messages_the_model_is_loaded_or_unloaded() {
        let load = |body: Value| parsed(&body).unwrap().load_only;
        assert_eq!(load(json!({"model": "m"})), Some(LoadOnly::Load));
        assert_eq!(load(json!({"model": "m", "messages": [], "keep_alive": 0})), Some(LoadOnly::Unload));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let user = |extra: Value| {
            let mut message = json!({"role": "user", "content": "hi"});
            message.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            json!({"model": "m", "messages": [message]})
        };
        refused(json!({"messages": []}), "model");
        refused(json!({"model": "m", "messages": "hi"}), "messages");
        refused(json!({"model": "m", "messages": ["hi"]}), "messages[0]");
        refused(json!({"model": "m", "messages": [{"content": "hi"}]}), "messages[0].role");
        refused(user(json!({"role": "robot"})), "messages[0].role");
        refused(user(json!({"content": ["hi"]})), "messages[0].content");
        refused(user(json!({"images": ["aGk="]})), "messages[0].images[0]");
        refused(user(json!({"tool_calls": [{}]})), "messages[0].tool_calls[0].function");
        let call = json!([{"function": {"name": "f", "arguments": "{}"}}]);
        refused(user(json!({ "tool_calls": call })), "messages[0].tool_calls[0].function.arguments");
        refused(json!({"model": "m", "stream": "yes"}), "stream");
        refused(json!({"model": "m", "top_logprobs": 21}), "top_logprobs");
    }
}
