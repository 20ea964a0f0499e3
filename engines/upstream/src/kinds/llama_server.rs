//! llama.cpp's server: OpenAI's dialect with llama.cpp's samplers and template variables, and routes for tokens.

use baton_schemas::ollama::upstream_model::UpstreamModelInfo;
use serde_json::Value;

use crate::kinds::openai::dialect::OpenAiQuirks;
use crate::kinds::protocol::Protocol;
use crate::kinds::tokens::{chat_prompt, no_pieces};
use crate::reply::model_info;
use crate::{
    ApiCall, ApiPath, ModelInfoCall, TokenQuestion, UpstreamError, UpstreamField, UpstreamKind, UpstreamSettings,
};

#[derive(Debug)]
pub(crate) struct LlamaServer;

impl Protocol for LlamaServer {
    fn default_fields(&self) -> &'static [UpstreamField] {
        &[
            UpstreamField::Temperature,
            UpstreamField::TopP,
            UpstreamField::TopK,
            UpstreamField::MinP,
            UpstreamField::FrequencyPenalty,
            UpstreamField::PresencePenalty,
            UpstreamField::RepeatPenalty,
            UpstreamField::RepeatLastN,
            UpstreamField::Seed,
            UpstreamField::LogitBias,
            UpstreamField::Logprobs,
            UpstreamField::IgnoreEos,
            UpstreamField::Tools,
            UpstreamField::ParallelToolCalls,
            UpstreamField::ResponseFormat,
            UpstreamField::ReasoningContent,
            UpstreamField::ChatTemplateKwargs,
            UpstreamField::StreamOptions,
        ]
    }

    fn quirks(&self) -> OpenAiQuirks {
        OpenAiQuirks {
            // It ignores the name and lets the model choose whether to call a tool (server-common.cpp of llama.cpp).
            takes_named_tool: false,
            // It takes 0 alternatives for no log-probabilities at all.
            min_top_logprobs: 1,
            ..OpenAiQuirks::default()
        }
    }

    fn model_info_call<'a>(&self, model: &'a str) -> Option<ModelInfoCall<'a>> {
        Some(ModelInfoCall::GetModel(ApiPath::Root("props"), model))
    }

    fn read_model_info(&self, _model: &str, reply: &Value) -> UpstreamModelInfo {
        model_info::of_props(reply)
    }

    fn token_call(
        &self,
        _settings: &UpstreamSettings,
        model: &str,
        question: TokenQuestion<'_>,
    ) -> Result<ApiCall, UpstreamError> {
        let named = ("model", model.into());
        Ok(match question {
            TokenQuestion::Tokenize(request) => {
                let content = ("content", (&*request.text).into());
                let special = ("add_special", request.add_special.into());
                let parse = ("parse_special", request.parse_special.into());
                ApiCall::new(ApiPath::Root("tokenize"), [named, content, special, parse])
            }
            TokenQuestion::Pieces(_) => return Err(no_pieces(UpstreamKind::LlamaServer)),
            TokenQuestion::Detokenize(tokens) => {
                ApiCall::new(ApiPath::Root("detokenize"), [named, ("tokens", tokens.into())])
            }
            TokenQuestion::Render(chat) | TokenQuestion::TokenizeChat(chat) => {
                chat_prompt(ApiPath::Root("apply-template"), model, chat)
            }
        })
    }

    /// It has no route that tokenizes a chat.
    fn renders_before_tokenizing(&self) -> bool {
        true
    }
}
