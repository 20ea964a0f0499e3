//! A body of `/v1/responses` → one [`GenerateRequest`].
//!
//! Echoed without any other effect: `metadata`, `prompt_cache_key`, `safety_identifier`, `max_tool_calls` and `user`.
//! Accepted and ignored: other words in `include`. Ignored with a warning: `text.verbosity`. What becomes of fields that it
//! does not declare: see `request/foreign.rs`.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::client_tools::ClientTools;
use super::input::ResponsesInput;
use super::response::Echo;
use super::tools::{ResponseTools, ResponseToolsBody};
use crate::constraint::{Constraint, SchemaLabel, SchemaPromise, check_schema};
use crate::generate::{Conversation, GenerateRequest, Input, Sampling, Thinking};
use crate::message_role::MessageRole;
use crate::openai::chat_request::TopLogprobs;
use crate::openai::modalities::ModalitiesBody;
use crate::openai::structured::StructuredBody;
use crate::openai::template_args::{TemplateBody, TemplateChoice};
use crate::request::demand::{Demand, Off};
use crate::request::echoed::Echoed;
use crate::request::field::{Field, Items, Required, join, missing, object};
use crate::request::foreign::{Foreign, ForeignFields, OwnName, RefusedField, VERBOSITY};
use crate::request::images::Images;
use crate::request::read::read;
use crate::request::sampling::SamplingBody;
use crate::request::schema::Variant;
use crate::request::stop::StopBody;
use crate::request::values::{Integer, MAX_U32, ModelName, SchemaObject};
use crate::request::{InvalidRequest, notes};

/// The most entries in `metadata`: OpenAI's limit.
const MAX_METADATA: usize = 16;

/// The most bytes of `metadata` as JSON, and of each text that is only echoed. Several events of a stream repeat them, so
/// a long one would take several times the memory of its body. OpenAI's limits are lower.
const MAX_ECHOED: usize = 16 << 10;

/// The path of this dialect's own form of a reply.
const FORMAT: &str = "text.format";

/// The word in `include` for log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";

object! {
    /// A conversation to continue. Fields that need a store are a 400.
    #[schemars(rename = "ResponsesRequest", example = json!({
        "model": "smollm2", "max_output_tokens": 8, "input": "Say hello."
    }))]
    pub struct ResponsesBody {
        /// A model's name, as `/v1/models` lists it.
        model: Required<ModelName>,
        /// The conversation so far.
        input: Required<ResponsesInput>,
        /// The first system message.
        instructions: Field<String>,
        /// The most tokens in the reply.
        max_output_tokens: Field<Integer<1, MAX_U32>>,
        /// Texts before which the reply ends.
        #[schemars(flatten)]
        stop: StopBody,
        /// How tokens are sampled.
        #[schemars(flatten)]
        sampling: SamplingBody,
        /// How many of the most likely tokens to report at each position.
        top_logprobs: Field<TopLogprobs>,
        /// Extra parts of the reply: only `message.output_text.logprobs` is supported.
        include: Field<Items<Value>>,
        /// The form that the text must have.
        text: Field<TextConfig>,
        /// The same by the names of chats and of other servers.
        #[schemars(flatten)]
        structured: StructuredBody,
        /// How the model should think, and variables for the chat template. `reasoning_effort` is the name in chats of
        /// `reasoning.effort`.
        #[schemars(flatten)]
        template: TemplateBody,
        /// The tools that the model may call.
        #[schemars(flatten)]
        tools: ResponseToolsBody,
        /// Stream the reply as server-sent events.
        stream: Field<bool>,
        /// Only false: nothing is stored.
        #[schemars(extend("enum" = [false, null]))]
        store: Field<bool>,
        /// Only false: nothing runs after its client has left.
        #[schemars(extend("enum" = [false, null]))]
        background: Field<bool>,
        /// `auto` is not supported: conversations are not cut.
        #[schemars(extend("not" = {"const": "auto"}))]
        truncation: Field<String>,
        /// Echoed in the reply.
        #[schemars(extend("maxProperties" = MAX_METADATA))]
        metadata: Field<Map<String, Value>>,
        /// Echoed in the reply.
        max_tool_calls: Field<Integer<1, MAX_U32>>,
        /// Echoed in the reply.
        safety_identifier: Field<String>,
        /// Echoed in the reply.
        prompt_cache_key: Field<String>,
        /// Echoed in the reply.
        user: Field<String>,
        /// Continue after the model has ended its turn.
        ignore_eos: Field<bool>,
        /// The kinds of output.
        #[schemars(flatten)]
        modalities: ModalitiesBody,
        #[schemars(skip)]
        foreign: Foreign<ResponsesFields>,
    }
}

/// Fields of chats that this dialect has under another name, and those that need a store.
#[derive(Debug)]
pub(crate) struct ResponsesFields;

const STORE: &str = "A stored conversation or prompt";
const HISTORY: &str = "send the whole history as 'input'";
const LENGTH: &str = "send 'max_output_tokens'";

impl ForeignFields for ResponsesFields {
    const REFUSED: &'static [RefusedField] = &[
        RefusedField::new("previous_response_id", Off::ZERO, STORE, HISTORY),
        RefusedField::new("conversation", Off::ZERO, STORE, HISTORY),
        RefusedField::new("prompt", Off::ZERO, STORE, HISTORY),
        RefusedField::new("messages", Off::ZERO, "'messages'", "send them as 'input'"),
        RefusedField::new("max_tokens", Off::NEVER, "'max_tokens'", LENGTH),
        RefusedField::new("max_completion_tokens", Off::NEVER, "'max_completion_tokens'", LENGTH),
        RefusedField::new("n_predict", Off::NEVER, "'n_predict'", LENGTH),
        RefusedField::new("max_new_tokens", Off::NEVER, "'max_new_tokens'", LENGTH),
        RefusedField::new("logprobs", Off::ZERO, "'logprobs'", "send 'message.output_text.logprobs' in 'include'"),
        RefusedField::new("system", Off::ZERO, "'system'", "send it as 'instructions'"),
    ];
    const NAMES: &'static [OwnName] = &[
        OwnName::new("max_tokens", "'max_output_tokens'"),
        OwnName::new("reasoning_effort", "'reasoning.effort'"),
        OwnName::new("response_format", "'text.format'"),
        OwnName::new("logprobs", "'include'"),
        OwnName::new("prompt", "'input'"),
        OwnName::new("n", ""),
    ];
}

object! {
    /// The form that the text must have.
    pub(crate) struct TextConfig {
        /// Any text, any JSON object, or JSON that follows a schema.
        format: Field<Echoed<TextFormat>>,
        #[schemars(skip)]
        verbosity: Field<Demand>,
    }
}

object! {
    /// The form that the text must have: any text, any JSON object, or JSON that follows a schema.
    pub(crate) struct TextFormat {
        /// The kind of form.
        r#type: Field<String>,
        /// The schema.
        schema: Field<SchemaObject>,
        /// Its name. Only upstreams are told it.
        name: Field<String>,
        /// The purpose of the reply. Only upstreams are told it.
        description: Field<String>,
        /// A schema of which a part cannot be enforced is a 400. Otherwise that part is left out, and the header
        /// `x-baton-warning` names it.
        strict: Field<bool>,
        #[schemars(skip)]
        json_schema: Field<Demand>,
    }
    by "type" {
        Variant { words: &["text", "json_object"], is_default: true, ..Variant::NEW },
        Variant { words: &["json_schema"], needs: &["schema"], may_have: &["name", "description", "strict"], ..Variant::NEW },
    }
}

/// A checked body of `/v1/responses`.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponsesRequest {
    /// The request to run.
    pub generate: GenerateRequest,
    /// The fields that the reply repeats.
    pub echo: Echo,
    /// The names by which the client knows its tools.
    pub tools: ClientTools,
}

impl ResponsesRequest {
    /// Parses and checks a body. `drawn_seed` is used if the client sent no seed.
    pub fn parse(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        read::<ResponsesBody>(body)?.check(drawn_seed)
    }
}

impl ResponsesBody {
    fn check(mut self, drawn_seed: u64) -> Result<ResponsesRequest, InvalidRequest> {
        self.refuse()?;
        self.foreign.check()?;
        self.modalities.check()?;
        let (sampling, chosen) = self.sampling.check("", Sampling { seed: drawn_seed, ..Sampling::default() })?;
        let max_tokens = self.max_output_tokens.get("")?.and_then(Integer::count);
        let (constraint, format) = TextConfig::check(self.text.get("")?)?;
        let constraint = self.structured.check_beside(constraint.map(|constraint| (FORMAT, constraint)))?;
        let mut images = Images::default();
        let instructions = self.instructions.get("")?;
        let ResponseTools { tools: tool_use, client: mut tools, choice: tool_choice } = self.tools.check()?;
        let messages = self.input.get("")?.check(instructions.as_deref(), &tools, &mut images)?;
        let after_tool = messages.last().is_some_and(|last| last.role == MessageRole::Tool);
        let TemplateChoice { args: template_args, effort, .. } = self.template.check(None, after_tool)?;
        let top = self.top_logprobs.get("")?.and_then(Integer::count);
        let is_included = self.include.get("")?.unwrap_or_default().sound().any(|name| name == LOGPROBS);
        // Log-probabilities are requested by `include`, or by a number of alternatives.
        let top_logprobs = top.filter(|&top| top > 0 || is_included).or(is_included.then_some(0));
        let metadata = self.metadata.get("")?.unwrap_or_default();
        if metadata.len() > MAX_METADATA {
            return Err(InvalidRequest::at("metadata", format_args!("must have at most {MAX_METADATA} entries")));
        }
        if serde_json::to_vec(&metadata).is_ok_and(|json| json.len() > MAX_ECHOED) {
            return Err(too_long("metadata"));
        }
        let echo = Echo {
            instructions,
            max_output_tokens: max_tokens,
            metadata,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            format,
            effort: effort.map(|effort| effort.as_str().to_owned()),
            parallel_tool_calls: tool_use.parallel,
            tool_choice,
            tools: tools.take_shown(&tool_use.tools),
            top_logprobs: top_logprobs.unwrap_or(0),
            max_tool_calls: self.max_tool_calls.get("")?.and_then(Integer::count),
            safety_identifier: echoed(self.safety_identifier, "safety_identifier")?,
            prompt_cache_key: echoed(self.prompt_cache_key, "prompt_cache_key")?,
            user: echoed(self.user, "user")?,
        };
        let (images, linked_images) = images.into_lists();
        Ok(ResponsesRequest {
            generate: GenerateRequest {
                is_streamed: self.stream.get("")?.unwrap_or(false),
                model: self.model.get("")?.0,
                input: Input::Chat(Conversation { messages, tools: Vec::new(), template_args, images, linked_images }),
                n: 1,
                max_tokens,
                stop: self.stop.check()?,
                sampling,
                chosen,
                top_logprobs,
                ignore_eos: self.ignore_eos.get("")?.unwrap_or(false),
                constraint: constraint.map(Arc::new),
                tools: tool_use,
                thinking: Thinking::AsSaid,
                keep_alive: None,
                num_ctx: None,
                context: None,
                prompt_logprobs: None,
                predicted: None,
            },
            echo,
            tools,
        })
    }

    /// Refuses fields that need a store, and unsupported ones. Values that ask for nothing pass.
    fn refuse(&mut self) -> Result<(), InvalidRequest> {
        if self.store.take().get("")?.unwrap_or(false) {
            return Err(InvalidRequest::at("store", "nothing is stored here; send false, or nothing"));
        }
        if self.background.take().get("")?.unwrap_or(false) {
            return Err(InvalidRequest::at("background", "nothing is stored here; stream the response instead"));
        }
        if self.truncation.take().get("")?.as_deref() == Some("auto") {
            return Err(InvalidRequest::unsupported("truncation", "Leaving out the beginning of a conversation"));
        }
        Ok(())
    }
}

impl TextConfig {
    /// Returns the constraint of `text.format`, and its echo.
    fn check(config: Option<Self>) -> Result<(Option<Constraint>, Value), InvalidRequest> {
        let plain = || json!({"type": "text"});
        let Some(config) = config else { return Ok((None, plain())) };
        if config.verbosity.peek().is_some_and(|verbosity| verbosity.is_one(&VERBOSITY)) {
            notes::ignored("text.verbosity");
        }
        let Some(Echoed { read, written }) = config.format.get("text")? else { return Ok((None, plain())) };
        if read.json_schema.is_given() {
            let problem = "is the form of chats; send 'name', 'schema' and 'strict' beside 'type'";
            return Err(InvalidRequest::at(join(FORMAT, "json_schema"), problem));
        }
        let has_schema = read.schema.is_given();
        match read.r#type.get(FORMAT)?.as_deref() {
            None if has_schema => Err(missing(FORMAT, "type")),
            None | Some("text") => {
                if has_schema {
                    notes::ignored(&join(FORMAT, "schema"));
                }
                Ok((None, plain()))
            }
            Some("json_object") if has_schema => {
                Err(InvalidRequest::at(FORMAT, "type must be json_schema beside a schema"))
            }
            Some("json_object") => Ok((Some(Constraint::JsonObject), json!({"type": "json_object"}))),
            Some("json_schema") => {
                let schema = read.schema.sound().ok_or_else(|| InvalidRequest::at(FORMAT, "needs a schema"))?.0;
                // The reply repeats all fields next to the schema, too.
                check_schema(&written).map_err(|e| InvalidRequest::at(FORMAT, e))?;
                let (name, description) = (read.name.get(FORMAT)?, read.description.get(FORMAT)?);
                let promise = SchemaPromise::said(read.strict.get(FORMAT)?);
                let label = SchemaLabel { name, description, promise };
                let constraint = Constraint::labelled_schema(schema, FORMAT, label);
                Ok((Some(constraint.map_err(|e| InvalidRequest::at(FORMAT, e))?), written))
            }
            Some(_) => Err(InvalidRequest::at(FORMAT, "type must be text, json_object or json_schema")),
        }
    }
}

/// Returns a text that replies repeat.
fn echoed(text: Field<String>, field: &str) -> Result<Option<String>, InvalidRequest> {
    match text.get("")? {
        Some(text) if text.len() > MAX_ECHOED => Err(too_long(field)),
        text => Ok(text),
    }
}

fn too_long(field: &str) -> InvalidRequest {
    InvalidRequest::at(field, format_args!("must not be longer than {MAX_ECHOED} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(extra: Value) -> Result<ResponsesRequest, InvalidRequest> {
        let mut body = json!({"model": "m", "input": "hi"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ResponsesRequest::parse(body.to_string().as_bytes(), 7)
    }

    fn refused(extra: Value, param: &str) {
        assert_eq!(parsed(extra.clone()).unwrap_err().param.as_deref(), Some(param), "{extra}");
    }

    #[test]
    fn fields_reach_the_request_and_its_echo() {
        let request = parsed(json!({})).unwrap();
        assert_eq!((request.generate.is_streamed, request.generate.max_tokens, request.generate.n), (false, None, 1));
        assert_eq!((request.generate.sampling.seed, request.generate.top_logprobs), (7, None));
        assert_eq!((request.echo.format, request.echo.parallel_tool_calls), (json!({"type": "text"}), true));
        let schema = json!({"type": "object"});
        let format = json!({"type": "json_schema", "name": "n", "strict": true, "schema": schema});
        let label = SchemaLabel { name: Some("n".into()), description: None, promise: SchemaPromise::Strict(true) };
        let request = parsed(json!({"stream": true, "max_output_tokens": 5, "temperature": 0, "top_p": 0.5,
            "instructions": "be brief", "text": {"format": format, "verbosity": "low"}, "metadata": {"a": "b"},
            "reasoning": {"effort": "low", "summary": "auto"}, "store": false, "include": [LOGPROBS],
            "tools": [{"type": "web_search"}], "tool_choice": "auto", "previous_response_id": null}))
        .unwrap();
        assert!(request.generate.is_streamed && request.generate.sampling.temperature == 0.0);
        assert_eq!((request.generate.max_tokens, request.generate.top_logprobs), (Some(5), Some(0)));
        assert_eq!(
            request.generate.constraint,
            Some(Constraint::labelled_schema(schema, "text.format", label).unwrap().into())
        );
        assert_eq!((request.echo.format, request.echo.metadata["a"].as_str()), (format, Some("b")));
        let Input::Chat(conversation) = request.generate.input else { panic!("not a chat") };
        assert_eq!(conversation.messages.len(), 2);
        assert_eq!(conversation.template_args["reasoning_effort"], "low");
    }

    #[test]
    fn what_has_no_effect_is_echoed_and_what_has_is_as_it_takes_effect() {
        let echo = parsed(json!({})).unwrap().echo;
        assert_eq!((echo.presence_penalty, echo.frequency_penalty, echo.max_tool_calls), (0.0, 0.0, None));
        assert_eq!((echo.safety_identifier, echo.prompt_cache_key, echo.user), (None, None, None));
        let echo = parsed(json!({"presence_penalty": 0.5, "frequency_penalty": -1, "max_tool_calls": 3,
            "safety_identifier": "s", "prompt_cache_key": "k", "user": "u"}))
        .unwrap()
        .echo;
        assert_eq!((echo.presence_penalty, echo.frequency_penalty, echo.max_tool_calls), (0.5, -1.0, Some(3)));
        let said = [echo.safety_identifier, echo.prompt_cache_key, echo.user];
        assert_eq!(said, ["s", "k", "u"].map(|said| Some(said.to_owned())));
    }

    #[test]
    fn an_echoed_format_is_bounded() {
        let long = "x".repeat(1 << 20);
        let object = parsed(json!({"text": {"format": {"type": "json_object", "name": long}}})).unwrap();
        assert_eq!(object.echo.format, json!({"type": "json_object"}));
        let format = json!({"type": "json_schema", "name": long, "schema": {"type": "object"}});
        refused(json!({"text": {"format": format}}), "text.format");
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        refused(json!({"previous_response_id": "resp_1"}), "previous_response_id");
        refused(json!({"conversation": {"id": "x"}}), "conversation");
        refused(json!({"prompt": {"id": "x"}}), "prompt");
        refused(json!({"store": true}), "store");
        refused(json!({"background": true}), "background");
        refused(json!({"truncation": "auto"}), "truncation");
        refused(json!({"tools": [{"type": "function", "name": ""}]}), "tools[0].name");
        refused(json!({"tool_choice": "required"}), "tool_choice");
        refused(json!({"text": {"format": {"type": "xml"}}}), "text.format");
        refused(json!({"text": {"format": {"name": "r", "schema": {}}}}), "text.format.type");
        refused(json!({"text": {"format": {"type": "json_object", "schema": {}}}}), "text.format");
        let of_chats = json!({"type": "json_schema", "json_schema": {"schema": {}}});
        refused(json!({"text": {"format": of_chats}}), "text.format.json_schema");
        refused(json!({"text": {"format": {"type": "json_schema", "name": "n"}}}), "text.format");
        refused(json!({"reasoning": {"effort": "huge"}}), "reasoning.effort");
        refused(json!({"max_output_tokens": 0}), "max_output_tokens");
        refused(json!({"temperature": 3}), "temperature");
        refused(json!({"top_logprobs": 21}), "top_logprobs");
        refused(json!({"max_tool_calls": 0}), "max_tool_calls");
        refused(json!({"prompt_cache_key": 7}), "prompt_cache_key");
        refused(json!({"safety_identifier": []}), "safety_identifier");
        refused(json!({"user": "u".repeat(MAX_ECHOED + 1)}), "user");
        refused(json!({"metadata": {"a": "b".repeat(MAX_ECHOED)}}), "metadata");
        refused(json!({"model": null}), "model");
        refused(json!({"input": null}), "input");
    }
}
