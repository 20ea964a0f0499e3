//! Ollama, by its own API: its `/v1` ignores `tool_choice`, `n` and the context's size, and forces a temperature.

mod lines;

use baton_schemas::constraint::Constraint;
use baton_schemas::embed::{EmbedInput, EmbedRequest, EmbedTask};
use baton_schemas::generate::{Conversation, Input, Message, Thinking};
use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::ollama::upstream_model::UpstreamModelInfo;
use baton_schemas::tools::Strictness;
use baton_schemas::{EngineError, MessageRole};
use serde_json::{Map, Value, json};

use self::lines::LineReader;
use crate::kinds::protocol::Protocol;
use crate::reply::delta::DeltaReader;
use crate::reply::model_info;
use crate::reply::stream::Framing;
use crate::reply::vectors::{inputs, read_vectors};
use crate::request::body::{self, BodyWriter, calls_of, unsupported};
use crate::request::images::{MarkedImages, MessagePiece};
use crate::{
    ApiCall, ApiPath, ChoiceRequest, ModelInfoCall, ReceivedVectors, ReplyDelivery, UpstreamError, UpstreamField,
    UpstreamSettings,
};

/// The field that says how long a model stays in memory.
const KEEP_ALIVE: &str = "keep_alive";

#[derive(Debug)]
pub(crate) struct Ollama;

impl Protocol for Ollama {
    fn default_fields(&self) -> &'static [UpstreamField] {
        FIELDS
    }

    fn known_fields(&self) -> &'static [UpstreamField] {
        &KNOWN_FIELDS
    }

    fn api_root(&self) -> &'static str {
        ""
    }

    fn takes_num_ctx(&self) -> bool {
        true
    }

    fn fetches_images(&self) -> bool {
        false
    }

    fn models_path(&self) -> ApiPath {
        ApiPath::Api("api/tags")
    }

    fn model_info_call<'a>(&self, model: &'a str) -> Option<ModelInfoCall<'a>> {
        Some(ModelInfoCall::Post(ApiCall::new(ApiPath::Api("api/show"), [("model", model.into())])))
    }

    fn read_model_info(&self, _model: &str, reply: &Value) -> UpstreamModelInfo {
        model_info::of_show(reply)
    }

    fn keep_call(
        &self,
        _settings: &UpstreamSettings,
        model: &str,
        keep_alive: Option<KeepAlive>,
    ) -> Result<Option<ApiCall>, UpstreamError> {
        // Without a prompt nothing is generated.
        let fields = [("model", model.into()), ("stream", false.into())];
        let mut call = ApiCall::new(ApiPath::Api("api/generate"), fields);
        if let Some(keep_alive) = keep_alive {
            call.body.set(KEEP_ALIVE, body::keep_alive(keep_alive));
        }
        Ok(Some(call))
    }

    fn generate_call(&self, asked: &ChoiceRequest<'_>, settings: &UpstreamSettings) -> Result<ApiCall, UpstreamError> {
        let request = asked.request;
        let mut fields = BodyWriter::new(asked, settings);
        fields.sampling()?;
        if let Some(n) = fields.max_tokens() {
            fields.set("num_predict", n);
        }
        // Ollama reloads a model for another size, which disturbs its other users: a configured size wins.
        if let Some(num_ctx) = settings.num_ctx.or(request.num_ctx) {
            fields.set("num_ctx", num_ctx);
        }
        fields.set_stops();
        if request.ignore_eos {
            return Err(unsupported(UpstreamField::IgnoreEos));
        }
        let options = std::mem::take(&mut fields.body);
        fields.set("options", options);
        fields.set("model", asked.model);
        if let Some(n_top) = request.top_logprobs {
            fields.put(UpstreamField::Logprobs, true, true)?;
            fields.set("top_logprobs", n_top);
        }
        fields.set("stream", true);
        // Otherwise it drops the beginning of a prompt that does not fit, and later that of the reply, in silence.
        fields.set("truncate", false);
        fields.set("shift", false);
        if let Some(keep_alive) = request.keep_alive {
            fields.set(KEEP_ALIVE, body::keep_alive(keep_alive));
        }
        match request.constraint.as_deref() {
            None => {}
            Some(Constraint::JsonObject) => format(&mut fields, "json".into())?,
            Some(Constraint::JsonSchema { schema, .. }) => format(&mut fields, schema.clone())?,
            Some(Constraint::Grammar { .. }) => return Err(UpstreamError::Unsupported { field: "grammar" }),
        }
        let path = match &request.input {
            Input::Chat(conversation) => {
                chat(&mut fields, conversation)?;
                "api/chat"
            }
            Input::Text(text) => {
                fields.set("prompt", &**text);
                // Ollama puts no template around it.
                fields.set("raw", true);
                "api/generate"
            }
            Input::Infill { prefix, suffix, .. } => {
                fields.set("prompt", &**prefix);
                fields.set("suffix", &**suffix);
                "api/generate"
            }
            Input::Tokens(_) => return Err(UpstreamError::Unsupported { field: "prompt" }),
        };
        Ok(ApiCall { path: ApiPath::Api(path), form: ReplyDelivery::Streamed, body: fields.body })
    }

    fn framing(&self) -> Framing {
        Framing::JsonLines
    }

    fn delta_reader(&self, call: &ApiCall) -> Box<dyn DeltaReader> {
        Box::new(LineReader::new(call.body.contains("logprobs")))
    }

    fn embed_call(
        &self,
        settings: &UpstreamSettings,
        model: &str,
        request: &EmbedRequest,
        batch: &[EmbedInput],
    ) -> Result<ApiCall, UpstreamError> {
        if let EmbedTask::Rerank { .. } = request.task {
            let feature = "reranking by an upstream of kind ollama".to_owned();
            return Err(UpstreamError::Refused(EngineError::Unsupported { feature }));
        }
        if batch.iter().any(|input| matches!(input, EmbedInput::Tokens(_))) {
            return Err(UpstreamError::Unsupported { field: "input" });
        }
        let fields = [("model", model.into()), ("input", inputs(batch)), ("truncate", request.truncate.into())];
        let mut call = ApiCall::new(ApiPath::Api("api/embed"), fields);
        let optional = [
            ("dimensions", request.dimensions.map(Value::from)),
            ("options", settings.num_ctx.map(|num_ctx| json!({ "num_ctx": num_ctx }))),
            (KEEP_ALIVE, request.keep_alive.map(body::keep_alive)),
        ];
        for (name, value) in optional {
            if let Some(value) = value {
                call.body.set(name, value);
            }
        }
        Ok(call)
    }

    fn read_embed_reply(&self, _: &EmbedTask, reply: &Value, n: usize) -> Result<ReceivedVectors, UpstreamError> {
        read_vectors(reply.get("embeddings"), reply.get("prompt_eval_count"), n)
    }
}

/// Fields that every version takes.
const FIELDS: &[UpstreamField] = KNOWN_FIELDS.split_at(KNOWN_FIELDS.len() - 1).0;

/// Fields that some version takes. One before 0.12.11 ignores the last, `logprobs`, in silence.
const KNOWN_FIELDS: [UpstreamField; 13] = [
    UpstreamField::Temperature,
    UpstreamField::TopP,
    UpstreamField::TopK,
    UpstreamField::MinP,
    UpstreamField::FrequencyPenalty,
    UpstreamField::PresencePenalty,
    UpstreamField::RepeatPenalty,
    UpstreamField::RepeatLastN,
    UpstreamField::Seed,
    UpstreamField::Tools,
    UpstreamField::ResponseFormat,
    UpstreamField::ReasoningEffort,
    UpstreamField::Logprobs,
];

fn format(fields: &mut BodyWriter<'_>, format: Value) -> Result<(), UpstreamError> {
    if !fields.takes(UpstreamField::ResponseFormat) {
        return Err(unsupported(UpstreamField::ResponseFormat));
    }
    fields.set("format", format);
    Ok(())
}

fn chat(fields: &mut BodyWriter<'_>, conversation: &Conversation) -> Result<(), UpstreamError> {
    let request = fields.asked.request;
    fields.set("messages", messages(conversation));
    let tools = &request.tools;
    // Ollama cannot force a tool call.
    if tools.is_forced() {
        return Err(UpstreamError::Unsupported { field: "tool_choice" });
    }
    if !tools.offered().is_empty() {
        if tools.offered().iter().any(|tool| tool.strict == Strictness::Strict) {
            return Err(UpstreamError::Unsupported { field: "tools.strict" });
        }
        fields.put(
            UpstreamField::Tools,
            tools.offered().iter().map(|tool| tool.definition()).collect::<Vec<_>>(),
            true,
        )?;
    }
    let args = &conversation.template_args;
    if args.keys().any(|name| !matches!(name.as_str(), "enable_thinking" | "reasoning_effort")) {
        return Err(unsupported(UpstreamField::ChatTemplateKwargs));
    }
    let switch = args.get("enable_thinking").and_then(Value::as_bool);
    let think: Value = match (switch, args.get("reasoning_effort").and_then(Value::as_str)) {
        (None, None) => return Ok(()),
        (Some(false), _) | (_, Some("none")) => false.into(),
        (_, Some("minimal" | "low")) => "low".into(),
        (_, Some("medium")) => "medium".into(),
        (_, Some(_)) => "high".into(),
        (Some(true), None) => true.into(),
    };
    match fields.takes(UpstreamField::ReasoningEffort) {
        true => fields.set("think", think),
        false if request.thinking == Thinking::OffByDefault => {}
        false => return Err(unsupported(UpstreamField::ReasoningEffort)),
    }
    Ok(())
}

/// The conversation's messages. Ollama puts a message's images before its text, so a user's message with a text before an
/// image and one after it becomes several.
fn messages(conversation: &Conversation) -> Vec<Value> {
    let images = MarkedImages::of(conversation);
    let mut written = Vec::with_capacity(conversation.messages.len());
    for of in conversation.with_system_first().iter() {
        let Some(pieces) = images.pieces(&of.content) else {
            written.push(message(of));
            continue;
        };
        let n_texts = pieces.iter().filter(|piece| !piece.is_image()).count();
        let is_divided = of.role == MessageRole::User && n_texts > 1;
        let ends_with_text = |pieces: &[MessagePiece<'_>]| pieces.last().is_some_and(|piece| !piece.is_image());
        let mut part: Vec<MessagePiece<'_>> = Vec::new();
        for piece in pieces {
            if is_divided && piece.is_image() && ends_with_text(&part) {
                written.push(seen(of, &part));
                part.clear();
            }
            part.push(piece);
        }
        written.push(seen(of, &part));
    }
    written
}

/// A message, or a part of it, with its images in a list. No link comes here: Ollama fetches none.
fn seen(of: &Message, pieces: &[MessagePiece<'_>]) -> Value {
    let mut content = String::new();
    let mut images: Vec<Value> = Vec::new();
    for piece in pieces {
        match piece {
            MessagePiece::Text(text) => content.push_str(text),
            MessagePiece::File(image) => images.push(image.in_base64().into()),
            MessagePiece::Link(_) => {}
        }
    }
    let mut written = message(of);
    written["content"] = content.into();
    if !images.is_empty() {
        written["images"] = images.into();
    }
    written
}

fn message(message: &Message) -> Value {
    let mut written = Map::new();
    written.insert("role".to_owned(), message.role.as_str().into());
    written.insert("content".to_owned(), message.content.as_str().into());
    if !message.tool_calls.is_empty() {
        written.insert("tool_calls".to_owned(), calls_of(message, false).into());
    }
    let tool = message.name.as_ref().filter(|_| message.role == MessageRole::Tool);
    for (name, value) in [
        ("thinking", message.reasoning_content.as_ref()),
        ("tool_call_id", message.tool_call_id.as_ref()),
        ("tool_name", tool),
    ] {
        if let Some(value) = value {
            written.insert(name.to_owned(), value.as_str().into());
        }
    }
    Value::Object(written)
}

#[cfg(test)]
mod tests;
