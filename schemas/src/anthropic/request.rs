//! `POST /v1/messages`: a body → one [`GenerateRequest`]. `POST /v1/messages/count_tokens`: a body → one
//! [`ChatPrompt`].
//!
//! The `anthropic-version` and `anthropic-beta` headers have no effect. What becomes of fields that it does not declare: see
//! `request/foreign.rs`.

use std::sync::Arc;

use schemars::json_schema;
use serde_json::json;

use super::context_management::ContextManagement;
use super::messages::{MessagesMessage, SystemText, ToolReferences, check_history};
use super::tools::MessagesToolsBody;
use crate::constraint::Constraint;
use crate::generate::{ChatPrompt, Conversation, GenerateRequest, Input, Sampling, Thinking};
use crate::message_role::MessageRole;
use crate::openai::{StructuredBody, TemplateBody};
use crate::reasoning_effort::ReasoningEffort;
use crate::request::InvalidRequest;
use crate::request::demand::Off;
use crate::request::field::{Field, Required, object};
use crate::request::foreign::{Foreign, ForeignFields, OwnName, RefusedField};
use crate::request::history::MessageList;
use crate::request::images::Images;
use crate::request::read::{Read, Reading, read};
use crate::request::sampling::SamplingBody;
use crate::request::schema::described;
use crate::request::stop::StopStrings;
use crate::request::values::{Integer, MAX_U32, ModelName, SchemaObject};

object! {
    /// A conversation to continue.
    #[schemars(rename = "MessagesRequest", example = json!({
        "model": "smollm2", "max_tokens": 8, "messages": [{"role": "user", "content": "Say hello."}]
    }))]
    pub struct MessagesBody {
        /// The most tokens in the reply.
        max_tokens: Required<Integer<1, MAX_U32>>,
        /// The fields that make up the prompt.
        #[schemars(flatten)]
        prompt: PromptBody,
        /// Texts before which the reply ends.
        stop_sequences: Field<StopStrings>,
        /// How tokens are sampled.
        #[schemars(flatten)]
        sampling: SamplingBody,
        /// Stream the reply as server-sent events.
        stream: Field<bool>,
        #[schemars(skip)]
        foreign: Foreign<MessagesFields>,
    }
}

/// OpenAI's names of fields that this dialect has under other names.
#[derive(Debug)]
pub(crate) struct MessagesFields;

impl ForeignFields for MessagesFields {
    const REFUSED: &'static [RefusedField] = &[RefusedField::new("stop", Off::ZERO, "'stop'", "send 'stop_sequences'")];
    const NAMES: &'static [OwnName] = &[
        OwnName::new("stop", "'stop_sequences'"),
        OwnName::new("reasoning_effort", "'thinking'"),
        OwnName::new("response_format", "'output_config.format'"),
        OwnName::new("ignore_eos", ""),
        OwnName::new("logprobs", ""),
        OwnName::new("top_logprobs", ""),
        OwnName::new("n", ""),
    ];
}

object! {
    /// A conversation whose tokens to count.
    #[schemars(rename = "CountTokensRequest", example = json!({
        "model": "smollm2", "messages": [{"role": "user", "content": "Say hello."}]
    }))]
    pub struct CountBody {
        /// The fields that make up the prompt.
        #[schemars(flatten)]
        prompt: PromptBody,
        #[schemars(skip)]
        foreign: Foreign<CountFields>,
    }
}

/// Fields of `/v1/messages` that do not change the prompt.
#[derive(Debug)]
pub(crate) struct CountFields;

impl ForeignFields for CountFields {
    const GENERATES: bool = false;
    const WITHOUT_EFFECT: &'static [&'static str] =
        &["max_tokens", "stop_sequences", "stop", "stream", "temperature", "top_k", "top_p", "min_p", "seed"];
}

object! {
    /// The fields that make up a prompt.
    pub(crate) struct PromptBody {
        /// A model's name, as `/v1/models` lists it.
        model: Required<ModelName>,
        /// The conversation so far. The last message must not be the assistant's: continuing it is not supported.
        messages: Required<MessageList<MessagesMessage>>,
        /// The system message.
        system: Field<SystemText>,
        /// The tools that the model may call.
        #[schemars(flatten)]
        tools: MessagesToolsBody,
        /// Effort and form of the reply.
        output_config: Field<OutputConfig>,
        /// What is left out of the conversation.
        context_management: Field<ContextManagement>,
        /// Turns thinking on or off, and variables for the chat template. Thinking is off by default.
        #[schemars(flatten)]
        template: TemplateBody,
        /// The older name of `output_config.format`, which takes precedence.
        output_format: Field<OutputFormat>,
        /// The same by the names of OpenAI's chats and of other servers.
        #[schemars(flatten)]
        structured: StructuredBody,
    }
}

object! {
    /// Effort and form of a reply.
    pub(crate) struct OutputConfig {
        /// How hard the model should think.
        effort: Field<OutputEffort>,
        /// The form that the text must have.
        format: Field<OutputFormat>,
        #[schemars(skip)]
        foreign: Foreign<OutputConfigFields>,
    }
}

/// Other fields of [`OutputConfig`].
#[derive(Debug)]
pub(crate) struct OutputConfigFields;

impl ForeignFields for OutputConfigFields {
    const AT: &'static str = "output_config";
    const REFUSED: &'static [RefusedField] =
        &[RefusedField::new("task_budget", Off::ZERO, "A budget for a task", "send 'max_tokens'")];
}

/// The part of the scale that Anthropic's dialect has.
#[derive(Debug)]
pub(crate) struct OutputEffort(ReasoningEffort);

const EFFORTS: [ReasoningEffort; 5] = [
    ReasoningEffort::Low,
    ReasoningEffort::Medium,
    ReasoningEffort::High,
    ReasoningEffort::Xhigh,
    ReasoningEffort::Max,
];

impl Read for OutputEffort {
    const EXPECTED: &'static str = String::EXPECTED;

    fn string(word: &str) -> Reading<Self> {
        ReasoningEffort::among(word, &EFFORTS).map(OutputEffort)
    }
}

described!([] OutputEffort: |_generator| {
    json_schema!({ "type": "string", "enum": EFFORTS.map(ReasoningEffort::as_str) })
});

object! {
    /// JSON that follows a schema.
    pub(crate) struct OutputFormat {
        /// The only supported type.
        #[schemars(extend("enum" = ["json_schema"]))]
        r#type: Required<String>,
        /// The schema.
        schema: Required<SchemaObject>,
    }
}

/// A checked body of `/v1/messages`.
#[derive(Debug, Clone, PartialEq)]
pub struct MessagesRequest {
    /// The request to run.
    pub generate: GenerateRequest,
    /// Include the model's reasoning in the reply.
    pub shows_thinking: bool,
}

/// A checked body of `/v1/messages/count_tokens`.
#[derive(Debug, Clone, PartialEq)]
pub struct CountRequest {
    /// The model's public name, as the client wrote it.
    pub model: String,
    /// The prompt whose tokens to count.
    pub chat: ChatPrompt,
}

impl MessagesRequest {
    /// Parses and checks a body. `drawn_seed` is used if the client sent no seed.
    pub fn parse(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        read::<MessagesBody>(body)?.check(drawn_seed)
    }
}

impl MessagesBody {
    fn check(self, drawn_seed: u64) -> Result<MessagesRequest, InvalidRequest> {
        self.foreign.check()?;
        let limit = self.max_tokens;
        let (prompt, max_tokens) = self.prompt.check(|| Ok(limit.get("")?.count()))?;
        let CheckedPrompt { model, chat, thinking, shows_thinking, constraint } = prompt;
        let (sampling, chosen) = self.sampling.check("", Sampling { seed: drawn_seed, ..Sampling::default() })?;
        let generate = GenerateRequest {
            is_streamed: self.stream.get("")?.unwrap_or(false),
            model,
            input: Input::Chat(chat.conversation),
            n: 1,
            max_tokens,
            stop: self.stop_sequences.get("")?.unwrap_or_default().0.into(),
            sampling,
            chosen,
            top_logprobs: None,
            ignore_eos: false,
            constraint: constraint.map(Arc::new),
            tools: chat.tools,
            // Claude's clients ask for thinking whatever the model is, so a model that cannot think is no error.
            thinking,
            keep_alive: None,
            num_ctx: None,
            context: None,
            prompt_logprobs: None,
            predicted: None,
        };
        Ok(MessagesRequest { generate, shows_thinking })
    }
}

impl CountRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        // A constraint adds no tokens, but a wrong one is refused here as in `/v1/messages`.
        let CountBody { prompt, foreign } = read(body)?;
        foreign.check()?;
        let CheckedPrompt { model, chat, .. } = prompt.check(|| Ok(()))?.0;
        Ok(CountRequest { model, chat })
    }
}

/// A checked [`PromptBody`].
struct CheckedPrompt {
    model: String,
    chat: ChatPrompt,
    thinking: Thinking,
    shows_thinking: bool,
    constraint: Option<Constraint>,
}

impl PromptBody {
    /// Checks the fields in the order in which errors name them: the model, then `next`, then the others.
    fn check<T>(self, next: impl FnOnce() -> Result<T, InvalidRequest>) -> Result<(CheckedPrompt, T), InvalidRequest> {
        let model = self.model.get("")?.0;
        let next = next()?;
        let (effort, format) = match self.output_config.get("")? {
            Some(config) => {
                config.foreign.check()?;
                (config.effort.get("output_config")?, config.format.get("output_config")?)
            }
            None => (None, None),
        };
        let format = match format {
            Some(newer) => Some(("output_config.format", newer)),
            None => self.output_format.get("")?.map(|older| ("output_format", older)),
        };
        let own = format.map(|(at, format)| format.check(at).map(|constraint| (at, constraint))).transpose()?;
        let constraint = self.structured.check_beside(own)?;
        let mut images = Images::default();
        let mut references = ToolReferences::new(self.tools.check()?);
        let mut messages = check_history(self.system.get("")?, self.messages.get("")?, &mut images, &mut references)?;
        if let Some(management) = self.context_management.get("")? {
            management.apply(&mut messages)?;
        }
        let after_tool = messages.last().is_some_and(|last| last.role == MessageRole::Tool);
        let mut template = self.template.check(effort.map(|effort| effort.0), after_tool)?;
        let thinking = template.off_by_default();
        let shows_thinking = template.shows();
        let template_args = template.args;
        let (images, linked_images) = images.into_lists();
        let conversation = Conversation { messages, template_args, images, linked_images, ..Conversation::default() };
        let chat = ChatPrompt { conversation, tools: references.into_tools() };
        Ok((CheckedPrompt { model, chat, thinking, shows_thinking, constraint }, next))
    }
}

impl OutputFormat {
    fn check(self, at: &str) -> Result<Constraint, InvalidRequest> {
        if self.r#type.optional(at)?.as_deref() != Some("json_schema") {
            return Err(InvalidRequest::at(at, "type must be json_schema"));
        }
        let schema = self.schema.optional(at)?.ok_or_else(|| InvalidRequest::at(at, "needs a schema"))?.0;
        Constraint::json_schema(schema, at, false).map_err(|e| InvalidRequest::at(at, e))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::tools::Tool;

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
        assert_eq!((request.generate.max_tokens, request.generate.sampling.seed), (Some(9), 7));
        assert!(!request.generate.is_streamed);
        let schema = json!({"type": "object"});
        let request = parsed(json!({"stream": true, "temperature": 0, "top_k": 3, "stop_sequences": ["a", "b"],
            "thinking": {"type": "adaptive"}, "metadata": {"user_id": "x"}, "tools": [],
            "output_config": {"format": {"type": "json_schema", "schema": schema}}}))
        .unwrap();
        assert!(request.generate.is_streamed);
        assert_eq!((request.generate.sampling.top_k, &*request.generate.stop), (3, &["a".into(), "b".into()][..]));
        assert_eq!(
            request.generate.constraint,
            Some(Constraint::json_schema(schema, "output_config.format", false).unwrap().into())
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
        let off = || json!({"enable_thinking": false});
        assert_eq!(args(json!({})), (false, off()), "Anthropic's default");
        assert!(!args(json!({"reasoning_effort": "none"})).0);
        assert_eq!(args(json!({"reasoning_effort": "high"})), (true, json!({"reasoning_effort": "high"})));
        assert_eq!(args(json!({"reasoning": {"effort": "low"}})), (true, json!({"reasoning_effort": "low"})));
        assert_eq!(args(json!({"think": true})), (true, json!({"enable_thinking": true})));
        let omitted = json!({"thinking": {"type": "adaptive", "display": "omitted"}});
        assert_eq!(args(omitted), (false, json!({})));
        assert_eq!(args(json!({"thinking": {"type": "adaptive"}})), (true, json!({})));
        let enabled =
            json!({"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}});
        assert_eq!(args(enabled), (true, json!({"enable_thinking": true, "reasoning_effort": "low"})));
        assert_eq!(args(json!({"thinking": {"type": "disabled"}})), (false, off()));
        let effort = json!({"output_config": {"effort": "high"}});
        assert_eq!(args(effort), (false, json!({"enable_thinking": false, "reasoning_effort": "high"})));
    }

    #[test]
    fn a_reference_loads_a_deferred_tool() {
        let later = |name: &str| json!({"name": name, "input_schema": {"type": "object"}, "defer_loading": true});
        let search = json!({"name": "search", "input_schema": {"type": "object"}});
        let refer = |names: &[&str]| {
            let blocks: Vec<Value> =
                names.iter().map(|name| json!({"type": "tool_reference", "tool_name": name})).collect();
            json!([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": blocks}]}])
        };
        let of = |body: Value| {
            let request = parsed(body).unwrap().generate;
            let Input::Chat(conversation) = request.input else { panic!("not a chat") };
            let names = |tools: Vec<&Tool>| tools.iter().map(|tool| tool.name.clone()).collect::<Vec<_>>().join(" ");
            let listed = names(request.tools.listed().collect());
            (conversation.messages[0].content.clone(), names(request.tools.callable()), listed)
        };
        let tools = json!([search, later("f"), later("g")]);
        let (text, callable, listed) = of(json!({"tools": tools, "messages": refer(&["g", "g", "h"])}));
        let definition = r#"{"name":"g","parameters":{"type":"object"}}"#;
        assert_eq!(text, format!("<function>{definition}</function>\ng is loaded already.\nThere is no tool h."));
        assert_eq!((&*callable, &*listed), ("search g", "search"));
        let named = of(json!({"tools": tools, "tool_choice": {"type": "tool", "name": "f"}}));
        assert_eq!((&*named.1, &*named.2), ("f", "search f"));
        // Without a search of the client, all tools are listed.
        for search in [Value::Null, json!({"type": "tool_search_tool_regex_20251119", "name": "search"})] {
            let tools: Vec<Value> = [search, later("f")].into_iter().filter(|tool| !tool.is_null()).collect();
            assert_eq!(of(json!({"tools": tools})), ("hi".to_owned(), "f".to_owned(), "f".to_owned()));
        }
        refused(
            json!({"tools": [later("f")], "messages": [{"role": "user", "content": [{"type": "tool_result",
            "tool_use_id": "t", "content": [{"type": "tool_reference"}]}]}]}),
            "messages[0].content[0].content[0].tool_name",
        );
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
        refused(json!({"model": null, "max_tokens": null}), "model");
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
        refused(json!({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}), "output_config.task_budget");
        refused(json!({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}), "mcp_servers");
        refused(json!({"container": "c"}), "container");
        refused(
            json!({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
            "context_management.edits[0].type",
        );
        refused(json!({"stop": ["x"]}), "stop");
        refused(json!({"n": 2}), "n");
        assert!(parsed(json!({"mcp_servers": [], "container": null, "service_tier": "auto", "n": 1})).is_ok());
    }
}
