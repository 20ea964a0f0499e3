//! `POST /v1/chat/completions`, and `/baton/plan`, which has the same body: a body → one [`GenerateRequest`].
//!
//! What becomes of fields that it does not declare: see `request/foreign.rs`.

use std::sync::Arc;

use serde_json::json;

use crate::generate::{Conversation, GenerateRequest, Input, Sampling, Thinking};
use crate::message_role::MessageRole;
use crate::openai::functions::{ChatTools, FunctionsBody};
use crate::openai::messages::ChatMessage;
use crate::openai::modalities::ModalitiesBody;
use crate::openai::prediction::PredictionBody;
use crate::openai::reply_length::{MaxTokens, ReplyLengthBody};
use crate::openai::structured::StructuredBody;
use crate::openai::template_args::TemplateBody;
use crate::request::InvalidRequest;
use crate::request::demand::Off;
use crate::request::field::{Field, Required, object};
use crate::request::foreign::{Foreign, ForeignFields, RefusedField};
use crate::request::history::MessageList;
use crate::request::images::Images;
use crate::request::read::read;
use crate::request::sampling::SamplingBody;
use crate::request::stop::StopBody;
use crate::request::tool_choice::ChatToolsBody;
use crate::request::values::{Integer, ModelName};

/// `n`. Each choice needs a slot, so more than 16 from one request would block all other requests. OpenAI allows 128,
/// on far larger machines.
pub(crate) type NChoices = Integer<1, 16>;
/// `top_logprobs`, with OpenAI's limit: each alternative costs bytes at every token.
pub(crate) type TopLogprobs = Integer<0, 20>;

object! {
    /// A chat to continue.
    #[schemars(rename = "ChatCompletionRequest", example = json!({
        "model": "smollm2", "max_tokens": 8, "messages": [{"role": "user", "content": "Say hello."}]
    }))]
    pub struct ChatBody {
        /// A model's name, as `/v1/models` lists it.
        model: Required<ModelName>,
        /// The conversation so far, oldest message first.
        messages: Required<MessageList<ChatMessage>>,
        /// How many replies to generate. They differ only in their seeds.
        n: Field<NChoices>,
        /// The most tokens in a reply. Null or -1: until the context ends. 0: only compute the prompt.
        max_completion_tokens: Field<MaxTokens>,
        /// The older name of `max_completion_tokens`, which takes precedence.
        max_tokens: Field<MaxTokens>,
        #[schemars(skip)]
        length: ReplyLengthBody,
        /// Texts before which a reply ends.
        #[schemars(flatten)]
        stop: StopBody,
        /// How tokens are sampled.
        #[schemars(flatten)]
        sampling: SamplingBody,
        /// Report the log-probability of each token.
        logprobs: Field<bool>,
        /// How many of the most likely tokens to report at each position. More than 0 needs `logprobs`.
        top_logprobs: Field<TopLogprobs>,
        /// Stream the reply as server-sent events.
        stream: Field<bool>,
        /// Options of a stream.
        stream_options: Field<StreamOptions>,
        /// The form that the reply must have.
        #[schemars(flatten)]
        structured: StructuredBody,
        /// The tools that the model may call.
        #[schemars(flatten)]
        tools: ChatToolsBody,
        /// The older form of tools.
        #[schemars(flatten)]
        functions: FunctionsBody,
        /// Variables for the chat template.
        #[schemars(flatten)]
        template: TemplateBody,
        /// Continue after the model has ended its turn.
        ignore_eos: Field<bool>,
        /// What the reply is expected to be. It is verified faster than it would be generated.
        prediction: Field<PredictionBody>,
        /// The kinds of output.
        #[schemars(flatten)]
        modalities: ModalitiesBody,
        #[schemars(skip)]
        foreign: Foreign<ChatFields>,
    }
}

/// The inputs of other routes.
#[derive(Debug)]
pub(crate) struct ChatFields;

impl ForeignFields for ChatFields {
    const REFUSED: &'static [RefusedField] = &[
        RefusedField::new("input", Off::ZERO, "'input'", "send it as a message of the user"),
        RefusedField::new("prompt", Off::ZERO, "'prompt'", "send it as a message of the user"),
    ];
}

object! {
    /// Options of a stream.
    pub(crate) struct StreamOptions {
        /// Send a last event with the usage.
        include_usage: Field<bool>,
    }
}

impl StreamOptions {
    pub(crate) fn includes_usage(options: Option<Self>) -> Result<bool, InvalidRequest> {
        let Some(options) = options else { return Ok(false) };
        Ok(options.include_usage.get("stream_options")?.unwrap_or(false))
    }
}

/// A checked body of `/v1/chat/completions`.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// The request to run.
    pub generate: GenerateRequest,
    /// Send a last event with the usage.
    pub include_usage: bool,
    /// The tools came as `functions`, so calls are reported in that older form.
    pub has_functions: bool,
}

impl ChatRequest {
    /// Parses and checks a body. `drawn_seed` is used if the client sent no seed.
    pub fn parse(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        read::<ChatBody>(body)?.check(drawn_seed)
    }
}

impl ChatBody {
    fn check(self, drawn_seed: u64) -> Result<ChatRequest, InvalidRequest> {
        self.foreign.check()?;
        self.modalities.check()?;
        let conversation = conversation(self.messages, self.template)?;
        let ChatTools { tools, has_functions } = self.functions.check(self.tools)?;
        let (sampling, chosen) = self.sampling.check("", Sampling { seed: drawn_seed, ..Sampling::default() })?;
        let (older, newer) = (self.max_tokens.get("")?, self.max_completion_tokens.get("")?);
        let length = self.length.check(&[("max_completion_tokens", newer), ("max_tokens", older)])?;
        let wants_logprobs = self.logprobs.get("")?.unwrap_or(false);
        let top_logprobs = self.top_logprobs.get("")?.and_then(Integer::count).unwrap_or(0);
        // `top_logprobs: 0` alone has no effect.
        if top_logprobs > 0 && !wants_logprobs {
            return Err(InvalidRequest::at("top_logprobs", "needs 'logprobs' to be true"));
        }
        Ok(ChatRequest {
            generate: GenerateRequest {
                is_streamed: self.stream.get("")?.unwrap_or(false),
                model: self.model.get("")?.0,
                input: Input::Chat(conversation),
                n: self.n.get("")?.and_then(Integer::count).unwrap_or(1),
                max_tokens: length.and_then(Integer::count),
                stop: self.stop.check()?,
                sampling,
                chosen,
                top_logprobs: wants_logprobs.then_some(top_logprobs),
                ignore_eos: self.ignore_eos.get("")?.unwrap_or(false),
                constraint: self.structured.check()?.map(Arc::new),
                tools,
                thinking: Thinking::AsSaid,
                keep_alive: None,
                num_ctx: None,
                context: None,
                prompt_logprobs: None,
                predicted: self.prediction.get("")?.map(PredictionBody::check).transpose()?,
            },
            include_usage: StreamOptions::includes_usage(self.stream_options.get("")?)?,
            has_functions,
        })
    }
}

/// Checks what the chat template gets. llama-server's `/apply-template` has the same fields.
pub(crate) fn conversation(
    messages: Required<MessageList<ChatMessage>>,
    template: TemplateBody,
) -> Result<Conversation, InvalidRequest> {
    let mut images = Images::default();
    let messages = messages.get("")?.check(&mut images)?;
    let after_tool = messages.last().is_some_and(|last| last.role == MessageRole::Tool);
    let template_args = template.check(None, after_tool)?.args;
    let (images, linked_images) = images.into_lists();
    Ok(Conversation { messages, tools: Vec::new(), template_args, images, linked_images })
}

#[cfg(test)]
mod tests;
