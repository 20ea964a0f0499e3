//! `POST /v1/chat/completions`, and `/baton/plan`, which takes the same: a body → one [`GenerateRequest`].
//!
//! Accepted and ignored: `store`, `metadata`, `service_tier`, `prompt_cache_*`, `prediction`, `safety_identifier`,
//! `verbosity`, `user`, and any unknown field. What would change the answer and cannot be honoured
//! yet is refused in `not_yet.rs`.

use serde_json::json;

use crate::generate::{Conversation, GenerateRequest, Input, Sampling};
use crate::openai::functions::FunctionsBody;
use crate::openai::messages::ChatMessage;
use crate::openai::not_yet::{MediaBody, NotYetBody};
use crate::openai::response_format::ResponseFormat;
use crate::openai::template_args::TemplateBody;
use crate::request::InvalidRequest;
use crate::request::field::{Field, Required, object};
use crate::request::history::MessageList;
use crate::request::images::Images;
use crate::request::read::read;
use crate::request::sampling::SamplingBody;
use crate::request::stop::StopStrings;
use crate::request::tools::ChatToolsBody;
use crate::request::values::{Integer, MAX_U32, ModelName};

/// Each choice takes a slot of its own, or waits for one: more than 16 from one request would keep everybody else
/// out of the engine. OpenAI allows 128 on far larger machines.
pub(crate) type NChoices = Integer<1, 16>;
/// OpenAI's limit; each alternative costs bytes on every token.
pub(crate) type TopLogprobs = Integer<0, 20>;
/// -1 is llama.cpp's 'until the context ends'.
pub(crate) type MaxTokens = Integer<-1, MAX_U32>;

object! {
    /// A chat to be continued.
    #[schemars(rename = "ChatCompletionRequest", example = json!({
        "model": "smollm2", "max_tokens": 8, "messages": [{"role": "user", "content": "Say hello."}]
    }))]
    pub struct ChatBody {
        /// One of the names in `/v1/models`.
        model: Required<ModelName>,
        /// The history.
        messages: Required<MessageList<ChatMessage>>,
        /// Choices: replies that differ in their seeds.
        n: Field<NChoices>,
        /// Tokens of a reply at most. Null and -1: until the context ends. 0: none, the prompt is computed.
        max_completion_tokens: Field<MaxTokens>,
        /// The older name, which the other wins over.
        max_tokens: Field<MaxTokens>,
        /// Where a reply ends.
        stop: Field<StopStrings>,
        /// How tokens are drawn.
        #[schemars(flatten)]
        sampling: SamplingBody,
        /// Report the log-probabilities of tokens.
        logprobs: Field<bool>,
        /// With so many of the most likely tokens at each place. More than 0 needs `logprobs`.
        top_logprobs: Field<TopLogprobs>,
        /// As server-sent events.
        stream: Field<bool>,
        /// How the stream ends.
        stream_options: Field<StreamOptions>,
        /// What the reply has to be.
        response_format: Field<ResponseFormat>,
        /// What the model may call.
        #[schemars(flatten)]
        tools: ChatToolsBody,
        /// The older form of that.
        #[schemars(flatten)]
        functions: FunctionsBody,
        /// Variables of the chat template.
        #[schemars(flatten)]
        template: TemplateBody,
        /// Go on past the model's own end.
        ignore_eos: Field<bool>,
        /// Media of the reply.
        #[schemars(flatten)]
        media: MediaBody,
        #[schemars(skip)]
        not_yet: NotYetBody,
    }
}

object! {
    /// How a stream ends.
    pub(crate) struct StreamOptions {
        /// With a last event that carries the usage.
        include_usage: Field<bool>,
    }
}

impl StreamOptions {
    pub(crate) fn includes_usage(options: Option<Self>) -> Result<bool, InvalidRequest> {
        let Some(options) = options else { return Ok(false) };
        Ok(options.include_usage.get("stream_options")?.unwrap_or(false))
    }
}

/// A chat completion as the client asked for it.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// What to generate.
    pub generate: GenerateRequest,
    /// As server-sent events.
    pub stream: bool,
    /// With a last event that carries the usage.
    pub include_usage: bool,
    /// Tools came as `functions`, and a call is to be answered in that form.
    pub has_functions: bool,
}

impl ChatRequest {
    /// Reads a body. `drawn_seed` is used where the client sent none.
    pub fn parse(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        read::<ChatBody>(body)?.check(drawn_seed)
    }
}

impl ChatBody {
    fn check(mut self, drawn_seed: u64) -> Result<ChatRequest, InvalidRequest> {
        self.not_yet.check()?;
        self.media.check()?;
        let conversation = conversation(self.messages, self.template)?;
        let functions = self.functions.check(&mut self.tools)?;
        let has_functions = functions.is_some();
        let (sampling, chosen) = self.sampling.check("", Sampling { seed: drawn_seed, ..Sampling::default() })?;
        // Both are checked.
        let older = self.max_tokens.get("")?;
        let newer = self.max_completion_tokens.get("")?;
        let wants_logprobs = self.logprobs.get("")?.unwrap_or(false);
        let top_logprobs = self.top_logprobs.get("")?.and_then(Integer::count).unwrap_or(0);
        // A bare `top_logprobs: 0` asks for nothing.
        if top_logprobs > 0 && !wants_logprobs {
            return Err(InvalidRequest::at("top_logprobs", "needs 'logprobs' to be true"));
        }
        Ok(ChatRequest {
            generate: GenerateRequest {
                model: self.model.get("")?.0,
                input: Input::Chat(conversation),
                n: self.n.get("")?.and_then(Integer::count).unwrap_or(1),
                max_tokens: newer.or(older).and_then(Integer::count),
                stop: self.stop.get("")?.unwrap_or_default().0,
                sampling,
                chosen,
                top_logprobs: wants_logprobs.then_some(top_logprobs),
                ignore_eos: self.ignore_eos.get("")?.unwrap_or(false),
                constraint: self.response_format.get("")?.map_or(Ok(None), ResponseFormat::check)?,
                tools: functions.map_or_else(|| self.tools.check(), Ok)?,
                wants_thinking: false,
                keep_alive: None,
                num_ctx: None,
                context: None,
            },
            stream: self.stream.get("")?.unwrap_or(false),
            include_usage: StreamOptions::includes_usage(self.stream_options.get("")?)?,
            has_functions,
        })
    }
}

/// What the chat template gets. llama-server's `/apply-template` has the same fields.
pub(crate) fn conversation(
    messages: Required<MessageList<ChatMessage>>,
    template: TemplateBody,
) -> Result<Conversation, InvalidRequest> {
    let mut images = Images::default();
    Ok(Conversation {
        messages: messages.get("")?.check(&mut images)?,
        tools: Vec::new(),
        template_args: template.check()?,
        images: images.into_vec(),
    })
}

#[cfg(test)]
mod tests;
