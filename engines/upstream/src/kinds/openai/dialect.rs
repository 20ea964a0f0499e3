//! Requests in OpenAI's dialect, for every server that speaks it.

use std::collections::VecDeque;
use std::time::Duration;

use baton_schemas::MessageRole;
use baton_schemas::constraint::Constraint;
use baton_schemas::embed::{EmbedInput, EmbedRequest, EmbedTask};
use baton_schemas::generate::{Conversation, Input, Thinking};
use baton_schemas::tools::{Strictness, Tool, ToolChoice};
use serde_json::{Map, Value, json};

use super::strict_mode::strict_of;
use crate::reply::vectors::{ReceivedVectors, filled_inputs, inputs, read_scores, read_vectors};
use crate::request::body::{BodyWriter, calls_of, unsupported};
use crate::request::images::{MarkedImages, MessagePiece};
use crate::{ApiCall, ApiPath, ChoiceRequest, ReplyDelivery, UpstreamError, UpstreamField, UpstreamSettings};

/// Every field that some server of this dialect takes.
pub(crate) const KNOWN_FIELDS: &[UpstreamField] = &[
    UpstreamField::Temperature,
    UpstreamField::TopP,
    UpstreamField::TopK,
    UpstreamField::MinP,
    UpstreamField::FrequencyPenalty,
    UpstreamField::PresencePenalty,
    UpstreamField::RepeatPenalty,
    UpstreamField::RepetitionPenalty,
    UpstreamField::RepeatLastN,
    UpstreamField::Seed,
    UpstreamField::LogitBias,
    UpstreamField::Logprobs,
    UpstreamField::IgnoreEos,
    UpstreamField::Tools,
    UpstreamField::ParallelToolCalls,
    UpstreamField::ResponseFormat,
    UpstreamField::ReasoningEffort,
    UpstreamField::ReasoningContent,
    UpstreamField::ChatTemplateKwargs,
    UpstreamField::MaxCompletionTokens,
    UpstreamField::StreamOptions,
];

/// A reply that comes in one piece has the deadline of a first token. With less time than this it is streamed.
const MIN_WHOLE_TIME: Duration = Duration::from_secs(120);

/// How servers of this dialect differ, beyond the fields that they take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenAiQuirks {
    /// `/completions` takes a `suffix`.
    pub(crate) takes_suffix: bool,
    /// `tool_choice` may name a tool.
    pub(crate) takes_named_tool: bool,
    /// A message's `content` may be `null`.
    pub(crate) takes_null_content: bool,
    /// Arguments of forced calls follow their schema only if the tool is marked as strict.
    pub(crate) forced_needs_strict: bool,
    /// A reply follows its schema only if that is marked as strict.
    pub(crate) schema_needs_strict: bool,
    /// The least number of alternatives that yields log-probabilities.
    pub(crate) min_top_logprobs: u32,
    /// The result of a tool may hold images. Otherwise a message of the user after it has them.
    pub(crate) takes_tool_images: bool,
}

impl Default for OpenAiQuirks {
    fn default() -> Self {
        OpenAiQuirks {
            takes_suffix: false,
            takes_named_tool: true,
            takes_null_content: true,
            forced_needs_strict: false,
            schema_needs_strict: false,
            min_top_logprobs: 0,
            takes_tool_images: true,
        }
    }
}

/// The request for one choice. Errors: the server does not take a field that the request needs.
pub(crate) fn generate_call(
    asked: &ChoiceRequest<'_>,
    settings: &UpstreamSettings,
    quirks: OpenAiQuirks,
) -> Result<ApiCall, UpstreamError> {
    let mut request = DialectWriter { body: BodyWriter::new(asked, settings), quirks };
    request.body.set("model", asked.model);
    let is_chat = matches!(asked.request.input, Input::Chat(_));
    match &asked.request.input {
        Input::Chat(conversation) => request.chat(conversation)?,
        Input::Text(text) => request.prompt((&**text).into())?,
        Input::Tokens(tokens) => request.prompt(tokens.clone().into())?,
        Input::Infill { names, .. } if !quirks.takes_suffix => {
            return Err(UpstreamError::Unsupported { field: names.suffix });
        }
        Input::Infill { prefix, suffix, .. } => {
            request.body.set("suffix", &**suffix);
            request.prompt((&**prefix).into())?;
        }
    }
    let mut body = request.body;
    body.sampling()?;
    if let Some(n) = body.max_tokens() {
        let is_newer = is_chat && body.takes(UpstreamField::MaxCompletionTokens);
        body.set(if is_newer { "max_completion_tokens" } else { "max_tokens" }, n);
    }
    if asked.request.ignore_eos {
        body.put(UpstreamField::IgnoreEos, true, true)?;
    }
    body.set_stops();
    // Only the first piece of a stream shows early whether the KV of a prefill server has come.
    let has_time = settings.deadlines.first >= MIN_WHOLE_TIME && settings.prefill.is_empty();
    let form = if has_time && asked.may_come_whole() { ReplyDelivery::Whole } else { ReplyDelivery::Streamed };
    body.set("stream", form == ReplyDelivery::Streamed);
    if form == ReplyDelivery::Streamed {
        body.put(UpstreamField::StreamOptions, json!({ "include_usage": true }), false)?;
    }
    let path = ApiPath::Api(if is_chat { "chat/completions" } else { "completions" });
    Ok(ApiCall { path, form, body: body.body })
}

/// The request for a batch of vectors or scores. Errors: it mixes texts and tokens.
pub(crate) fn embed_call(model: &str, request: &EmbedRequest, batch: &[EmbedInput]) -> Result<ApiCall, UpstreamError> {
    if let EmbedTask::Rerank { query } = &request.task {
        let fields = [("model", model.into()), ("query", (&**query).into()), ("documents", inputs(batch))];
        return Ok(ApiCall::new(ApiPath::Api("rerank"), fields));
    }
    let are_texts = batch.iter().all(|input| matches!(input, EmbedInput::Text(_)));
    let are_tokens = batch.iter().all(|input| matches!(input, EmbedInput::Tokens(_)));
    if !are_texts && !are_tokens {
        return Err(UpstreamError::Unsupported { field: "input" });
    }
    let mut call = ApiCall::new(ApiPath::Api("embeddings"), [("model", model.into()), ("input", filled_inputs(batch))]);
    if let Some(n) = request.dimensions {
        call.body.set("dimensions", n);
    }
    call.body.set("encoding_format", "float");
    Ok(call)
}

/// The vectors or scores in the reply to a batch of `n` inputs.
pub(crate) fn read_embed_reply(task: &EmbedTask, reply: &Value, n: usize) -> Result<ReceivedVectors, UpstreamError> {
    let usage = |name: &str| reply.get("usage").and_then(|usage| usage.get(name));
    match task {
        EmbedTask::Embed => read_vectors(reply.get("data"), usage("prompt_tokens"), n),
        // vLLM counts only the sum.
        EmbedTask::Rerank { .. } => {
            read_scores(reply.get("results"), usage("prompt_tokens").or_else(|| usage("total_tokens")), n)
        }
    }
}

struct DialectWriter<'a> {
    body: BodyWriter<'a>,
    quirks: OpenAiQuirks,
}

impl DialectWriter<'_> {
    /// The fields of a plain completion.
    fn prompt(&mut self, prompt: Value) -> Result<(), UpstreamError> {
        let request = self.body.asked.request;
        self.body.set("prompt", prompt);
        if let Some(n_top) = request.top_logprobs {
            self.body.put(UpstreamField::Logprobs, n_top.max(self.quirks.min_top_logprobs), true)?;
        }
        match request.constraint {
            Some(_) => Err(unsupported(UpstreamField::ResponseFormat)),
            None => Ok(()),
        }
    }

    /// The fields of a chat.
    fn chat(&mut self, conversation: &Conversation) -> Result<(), UpstreamError> {
        let request = self.body.asked.request;
        let with_reasoning = self.body.takes(UpstreamField::ReasoningContent);
        let mut messages = messages(conversation, with_reasoning, self.quirks.takes_tool_images);
        if !self.quirks.takes_null_content {
            messages.iter_mut().filter(|message| message["content"].is_null()).for_each(|m| m["content"] = "".into());
        }
        self.body.set("messages", messages);
        if let Some(n_top) = request.top_logprobs {
            self.body.put(UpstreamField::Logprobs, true, true)?;
            // More than the client asked for are dropped where the reply is read.
            self.body.set("top_logprobs", n_top.max(self.quirks.min_top_logprobs));
        }
        let format = match request.constraint.as_deref() {
            None => None,
            Some(Constraint::JsonObject) => Some(json!({ "type": "json_object" })),
            Some(Constraint::JsonSchema { schema, label, .. }) => {
                // The dialect requires a name.
                let mut named = json!({ "name": label.name.as_deref().unwrap_or("reply"), "schema": schema });
                if let Some(description) = &label.description {
                    named["description"] = description.as_str().into();
                }
                if let Some(strict) = strict_of(label, self.body.asked.gap, self.quirks.schema_needs_strict) {
                    named["strict"] = strict.into();
                }
                Some(json!({ "type": "json_schema", "json_schema": named }))
            }
            Some(Constraint::Grammar { .. }) => return Err(UpstreamError::Unsupported { field: "grammar" }),
        };
        if let Some(format) = format {
            self.body.put(UpstreamField::ResponseFormat, format, true)?;
        }
        self.tools()?;
        self.thinking(&conversation.template_args)
    }

    fn tools(&mut self) -> Result<(), UpstreamError> {
        let tools = &self.body.asked.request.tools;
        if tools.offered().is_empty() {
            return Ok(());
        }
        // A server that knows no names here gets only the named tool, and any call is a call of that one.
        let only = match &tools.choice {
            ToolChoice::Named(name) if !self.quirks.takes_named_tool => Some(name),
            _ => None,
        };
        let is_forced = |tool: &Tool| match &tools.choice {
            ToolChoice::Auto | ToolChoice::None => false,
            ToolChoice::Required => true,
            ToolChoice::Named(name) => *name == tool.name,
        };
        let offered = tools.offered().iter().filter(|tool| only.is_none_or(|name| tool.name == *name));
        let definitions = offered.map(|tool| {
            let mut definition = tool.definition();
            // Otherwise `strict` stays out: servers refuse strict schemas that they cannot hold.
            if tool.strict == Strictness::Strict || self.quirks.forced_needs_strict && is_forced(tool) {
                definition["function"]["strict"] = true.into();
            }
            definition
        });
        self.body.put(UpstreamField::Tools, definitions.collect::<Vec<_>>(), true)?;
        match &tools.choice {
            ToolChoice::Auto | ToolChoice::None => {}
            ToolChoice::Required => self.body.set("tool_choice", "required"),
            ToolChoice::Named(_) if only.is_some() => self.body.set("tool_choice", "required"),
            ToolChoice::Named(name) => {
                self.body.set("tool_choice", json!({ "type": "function", "function": { "name": name } }));
            }
        }
        // For a server that does not take it, Baton ends the reply after its first call.
        if tools.parallel { Ok(()) } else { self.body.put(UpstreamField::ParallelToolCalls, false, false) }
    }

    /// How much the model thinks: as variables of its template where the server takes those, otherwise as an effort,
    /// the only switch in OpenAI's own dialect.
    fn thinking(&mut self, args: &Map<String, Value>) -> Result<(), UpstreamError> {
        if args.is_empty() {
            return Ok(());
        }
        if self.body.takes(UpstreamField::ChatTemplateKwargs) {
            return self.body.put(UpstreamField::ChatTemplateKwargs, args.clone(), true);
        }
        if args.keys().any(|name| !matches!(name.as_str(), "enable_thinking" | "reasoning_effort")) {
            return Err(unsupported(UpstreamField::ChatTemplateKwargs));
        }
        // Servers refuse an effort for models that cannot think, so a default is not worth it.
        if self.body.asked.request.thinking == Thinking::OffByDefault {
            return Ok(());
        }
        let effort = match args.get("enable_thinking").and_then(Value::as_bool) {
            // Whatever effort stands beside it.
            Some(false) => "none".into(),
            Some(true) | None => args.get("reasoning_effort").cloned().unwrap_or_else(|| "medium".into()),
        };
        self.body.put(UpstreamField::ReasoningEffort, effort, true)
    }
}

/// The conversation's messages in OpenAI's form. Its system messages come first: the upstream's template, which may accept
/// them only there, cannot be tried out.
pub(crate) fn messages(conversation: &Conversation, with_reasoning: bool, takes_tool_images: bool) -> Vec<Value> {
    let images = MarkedImages::of(conversation);
    let mut ids = CallIds::default();
    let mut written = Vec::with_capacity(conversation.messages.len());
    let mut moved = MovedImages::default();
    for of in conversation.with_system_first().iter() {
        if of.role != MessageRole::Tool {
            written.extend(moved.take());
        }
        let mut message = message(of, with_reasoning);
        if let Some(pieces) = images.pieces(&of.content) {
            message["content"] = match of.role {
                MessageRole::Tool if !takes_tool_images => moved.text_without(&pieces).into(),
                _ => pieces.iter().map(MessagePiece::part).collect(),
            };
        }
        written.push(ids.complete(of.role, message));
    }
    written.extend(moved.take());
    written
}

/// Images of tools' results, for a server that takes images only from the user. They follow the results in a message of the user,
/// with the numbers by which the results name them.
#[derive(Default)]
struct MovedImages {
    parts: Vec<Value>,
    n: usize,
}

impl MovedImages {
    /// The text of a result with a number in place of each image.
    fn text_without(&mut self, pieces: &[MessagePiece<'_>]) -> String {
        let mut text = String::new();
        for piece in pieces {
            match piece {
                MessagePiece::Text(piece) => text.push_str(piece),
                MessagePiece::File(_) | MessagePiece::Link(_) => {
                    self.n += 1;
                    let name = format!("[image {}]", self.n);
                    text.push_str(&name);
                    self.parts.extend([MessagePiece::Text(&name).part(), piece.part()]);
                }
            }
        }
        text
    }

    /// The user's message with the images since the last one, if there are any.
    fn take(&mut self) -> Option<Value> {
        let parts = std::mem::take(&mut self.parts);
        (!parts.is_empty()).then(|| json!({ "role": MessageRole::User.as_str(), "content": parts }))
    }
}

fn message(message: &baton_schemas::generate::Message, with_reasoning: bool) -> Value {
    let mut written = Map::with_capacity(2);
    written.insert("role".to_owned(), message.role.as_str().into());
    let has_calls = !message.tool_calls.is_empty();
    let content = if has_calls && message.content.is_empty() { Value::Null } else { message.content.as_str().into() };
    written.insert("content".to_owned(), content);
    if has_calls {
        written.insert("tool_calls".to_owned(), calls_of(message, true).into());
    }
    // Most servers have no field for earlier reasoning, and templates leave it out.
    let reasoning = message.reasoning_content.as_ref().filter(|_| with_reasoning);
    for (name, value) in [
        ("tool_call_id", message.tool_call_id.as_ref()),
        ("name", message.name.as_ref()),
        ("reasoning_content", reasoning),
    ] {
        if let Some(value) = value {
            written.insert(name.to_owned(), value.as_str().into());
        }
    }
    Value::Object(written)
}

/// Completes ids of calls and of their results: this dialect requires them, while clients of other dialects send none.
#[derive(Default)]
struct CallIds {
    n_made: u32,
    unanswered: VecDeque<Value>,
}

impl CallIds {
    fn complete(&mut self, role: MessageRole, mut message: Value) -> Value {
        if let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) {
            self.unanswered.clear();
            for call in calls.iter_mut().filter_map(Value::as_object_mut) {
                let id = call.entry("id").or_insert_with(|| {
                    self.n_made += 1;
                    format!("call_{}", self.n_made).into()
                });
                self.unanswered.push_back(id.clone());
            }
        }
        if role == MessageRole::Tool {
            match message.get("tool_call_id").cloned() {
                Some(id) => self.unanswered.retain(|unanswered| *unanswered != id),
                None => message["tool_call_id"] = self.unanswered.pop_front().unwrap_or_else(|| "call_0".into()),
            }
        }
        message
    }
}
