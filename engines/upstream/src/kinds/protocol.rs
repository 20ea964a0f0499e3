//! [`Protocol`]: how a kind of upstream is spoken to. A file for each kind implements it; the defaults are OpenAI's
//! dialect, which most servers speak.

use std::borrow::Cow;
use std::fmt::Debug;

use baton_schemas::EngineError;
use baton_schemas::embed::{EmbedInput, EmbedRequest, EmbedTask};
use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::ollama::upstream_model::UpstreamModelInfo;
use serde_json::Value;

use crate::kinds::openai::chunks::ChunkReader;
use crate::kinds::openai::dialect::{self, OpenAiQuirks};
use crate::kinds::tokens;
use crate::reply::delta::DeltaReader;
use crate::reply::stream::Framing;
use crate::{
    ApiCall, ApiPath, ChoiceRequest, ModelInfoCall, PromptCount, ReceivedVectors, TokenQuestion, UpstreamError,
    UpstreamField, UpstreamSettings,
};

/// How a kind of server is spoken to.
pub(crate) trait Protocol: Send + Sync + Debug {
    /// Fields that are sent unless the configuration says otherwise.
    fn default_fields(&self) -> &'static [UpstreamField];

    /// Fields that some version of the server takes, so that they can be configured.
    fn known_fields(&self) -> &'static [UpstreamField] {
        dialect::KNOWN_FIELDS
    }

    /// How the server differs from others of OpenAI's dialect.
    fn quirks(&self) -> OpenAiQuirks {
        OpenAiQuirks::default()
    }

    /// The path of the API below an address that has no path of its own.
    fn api_root(&self) -> &'static str {
        "/v1"
    }

    /// The id that is sent for our request id.
    fn request_id<'a>(&self, id: &'a str) -> Cow<'a, str> {
        id.into()
    }

    /// Returns true for a server that may break off a reply when it gets another request, even for its list of models.
    fn may_break_off_replies(&self) -> bool {
        false
    }

    /// Returns true if requests can set the size of the context.
    fn takes_num_ctx(&self) -> bool {
        false
    }

    /// Returns true if it fetches images by their URLs.
    fn fetches_images(&self) -> bool {
        true
    }

    /// How other servers compute prompts for this one, if they can.
    fn prefill_steps(&self) -> Option<PrefillSteps> {
        None
    }

    /// How it counts the tokens of a prompt that it would be sent, if it can.
    fn count_steps(&self) -> Option<CountSteps> {
        None
    }

    /// The path of the list of models.
    fn models_path(&self) -> ApiPath {
        ApiPath::Api("models")
    }

    /// How the description of a model is requested. `None`: the server describes none.
    fn model_info_call<'a>(&self, _model: &'a str) -> Option<ModelInfoCall<'a>> {
        None
    }

    /// Reads the reply to that. `model` is the upstream's own name for the model.
    fn read_model_info(&self, _model: &str, _reply: &Value) -> UpstreamModelInfo {
        UpstreamModelInfo::default()
    }

    /// The request that loads a model, or unloads it if `keep_alive` is zero. `None`: nothing has to be done, because
    /// the server has its model in memory for as long as it runs. Errors: the model cannot be unloaded.
    fn keep_call(
        &self,
        settings: &UpstreamSettings,
        _model: &str,
        keep_alive: Option<KeepAlive>,
    ) -> Result<Option<ApiCall>, UpstreamError> {
        if !keep_alive.is_some_and(KeepAlive::is_nothing) {
            return Ok(None);
        }
        let feature = format!("unloading a model that an upstream of kind {} serves", settings.kind.as_str());
        Err(UpstreamError::Refused(EngineError::Unsupported { feature }))
    }

    /// The request for one choice. Errors: the server does not take a field that the request needs.
    fn generate_call(&self, asked: &ChoiceRequest<'_>, settings: &UpstreamSettings) -> Result<ApiCall, UpstreamError> {
        dialect::generate_call(asked, settings, self.quirks())
    }

    /// How a reply is divided into events.
    fn framing(&self) -> Framing {
        Framing::ServerSentEvents
    }

    /// A reader of one reply to `call`.
    fn delta_reader(&self, call: &ApiCall) -> Box<dyn DeltaReader> {
        Box::new(ChunkReader::new(call.body.contains("logprobs")))
    }

    /// The request for the vectors, or the scores, of one batch. Errors: the server does not take such inputs.
    fn embed_call(
        &self,
        _settings: &UpstreamSettings,
        model: &str,
        request: &EmbedRequest,
        batch: &[EmbedInput],
    ) -> Result<ApiCall, UpstreamError> {
        dialect::embed_call(model, request, batch)
    }

    /// Reads the vectors, or the scores, of a batch of `n` inputs.
    fn read_embed_reply(&self, task: &EmbedTask, reply: &Value, n: usize) -> Result<ReceivedVectors, UpstreamError> {
        dialect::read_embed_reply(task, reply, n)
    }

    /// The request for tokens, or their text. Errors: the server has no route for that.
    fn token_call(
        &self,
        settings: &UpstreamSettings,
        _model: &str,
        _question: TokenQuestion<'_>,
    ) -> Result<ApiCall, UpstreamError> {
        Err(tokens::unsupported(settings.kind))
    }

    /// Returns true if a chat's tokens take two requests: its prompt as text, then that text's tokens.
    fn renders_before_tokenizing(&self) -> bool {
        false
    }
}

/// How another server computes the prompt for this one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefillSteps {
    /// The prefill server's request for the same prompt.
    pub(crate) call: fn(&ApiCall) -> ApiCall,
    /// Adds to a request where the prefill server keeps the KV cache, as its reply says. Returns false if it does not.
    pub(crate) add_kv: fn(&mut ApiCall, &Value) -> bool,
    /// The number of the prompt's tokens in the prefill server's reply.
    pub(crate) n_tokens: fn(&Value) -> Option<u32>,
    /// The prefill server's request for one token of this model, which keeps nothing.
    pub(crate) probe: fn(&str) -> ApiCall,
}

/// How a server counts the tokens of a prompt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CountSteps {
    /// The request that counts the prompt of this one.
    pub(crate) call: fn(&ApiCall) -> ApiCall,
    /// The count in its reply.
    pub(crate) read: fn(&Value) -> Option<PromptCount>,
}
