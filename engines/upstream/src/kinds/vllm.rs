//! vLLM: OpenAI's dialect with more fields, and prompts computed by other vLLM servers.
//!
//! Where prefill servers are configured, a request goes to one of them first, for a single token that is dropped. Its
//! `kv_transfer_params` ask the server to keep the prompt's KV cache, and those in its reply say where the cache lies.
//! They go with the request to the decode server, which fetches it (vLLM's NixlConnector). Both requests carry the same
//! `X-Request-Id`. Whatever goes wrong with the prefill server or its KV cache, the decode server computes the prompt itself.

use baton_schemas::EngineError;
use baton_schemas::ollama::upstream_model::UpstreamModelInfo;
use serde_json::{Map, Value, json};

use crate::kinds::openai::dialect::OpenAiQuirks;
use crate::kinds::protocol::{CountSteps, PrefillSteps, Protocol};
use crate::kinds::tokens::{chat_prompt, no_pieces};
use crate::reply::foreign::Count;
use crate::reply::model_list;
use crate::{
    ApiCall, ApiPath, ModelInfoCall, PromptCount, ReplyDelivery, TokenQuestion, UpstreamError, UpstreamField,
    UpstreamKind, UpstreamSettings,
};

#[derive(Debug)]
pub(crate) struct Vllm;

impl Protocol for Vllm {
    fn default_fields(&self) -> &'static [UpstreamField] {
        &[
            UpstreamField::Temperature,
            UpstreamField::TopP,
            UpstreamField::TopK,
            UpstreamField::MinP,
            UpstreamField::FrequencyPenalty,
            UpstreamField::PresencePenalty,
            UpstreamField::RepetitionPenalty,
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
            UpstreamField::StreamOptions,
        ]
    }

    fn quirks(&self) -> OpenAiQuirks {
        OpenAiQuirks { forced_needs_strict: true, ..OpenAiQuirks::default() }
    }

    fn prefill_steps(&self) -> Option<PrefillSteps> {
        Some(PrefillSteps { call: prefill_call, add_kv, n_tokens, probe })
    }

    fn count_steps(&self) -> Option<CountSteps> {
        Some(CountSteps { call: count_call, read: read_count })
    }

    fn model_info_call<'a>(&self, _model: &'a str) -> Option<ModelInfoCall<'a>> {
        Some(ModelInfoCall::Get(self.models_path()))
    }

    fn read_model_info(&self, model: &str, reply: &Value) -> UpstreamModelInfo {
        let listed = model_list::read(reply).unwrap_or_default().models;
        let n_ctx = listed.iter().find(|listed| listed.name == model).and_then(|listed| listed.n_ctx);
        UpstreamModelInfo { n_ctx, ..UpstreamModelInfo::default() }
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
                let prompt = ("prompt", (&*request.text).into());
                let special = ("add_special_tokens", request.add_special.into());
                ApiCall::new(ApiPath::Root("tokenize"), [named, prompt, special])
            }
            TokenQuestion::Pieces(_) => return Err(no_pieces(UpstreamKind::Vllm)),
            TokenQuestion::Detokenize(tokens) => {
                ApiCall::new(ApiPath::Root("detokenize"), [named, ("tokens", tokens.into())])
            }
            TokenQuestion::TokenizeChat(chat) => chat_prompt(ApiPath::Root("tokenize"), model, chat),
            TokenQuestion::Render(_) => {
                let feature = "a chat's prompt as text, since an upstream of kind vllm serves this model, whose API has \
                               no route for it (llama-server's has)";
                let feature = feature.to_owned();
                return Err(UpstreamError::Refused(EngineError::Unsupported { feature }));
            }
        })
    }
}

/// The field of requests and replies that names a KV cache.
const PARAMS: &str = "kv_transfer_params";

/// The prefill server's request: the same prompt, one token, in one piece.
fn prefill_call(call: &ApiCall) -> ApiCall {
    let mut body = call.body.clone();
    body.remove("stream_options");
    body.set("stream", false);
    body.set("max_tokens", 1);
    if body.contains("max_completion_tokens") {
        body.set("max_completion_tokens", 1);
    }
    // It returns the KV's place only if the limit has ended the reply, and not a token that ends it or a stop string.
    body.set("ignore_eos", true);
    for field in ["stop", "stop_token_ids", "min_tokens"] {
        body.remove(field);
    }
    let params = json!({
        "do_remote_decode": true,
        "do_remote_prefill": false,
        "remote_engine_id": null,
        "remote_block_ids": null,
        "remote_host": null,
        "remote_port": null,
    });
    body.set(PARAMS, params);
    ApiCall { path: call.path, form: ReplyDelivery::Whole, body }
}

/// Copies the KV cache's place from a prefill server's reply into the decode server's request. Returns false if the
/// reply names none.
fn add_kv(call: &mut ApiCall, reply: &Value) -> bool {
    let params: Option<&Map<String, Value>> = reply.get(PARAMS).and_then(Value::as_object);
    let Some(params) = params.filter(|params| !params.is_empty()) else { return false };
    call.body.set(PARAMS, params.clone());
    true
}

fn n_tokens(reply: &Value) -> Option<u32> {
    number(reply.get("usage")?, "prompt_tokens")
}

fn number(object: &Value, name: &str) -> Option<u32> {
    Count::of(object.get(name))
}

/// The fields of a request that make its prompt. `/tokenize` reads them as the request's own route does.
const PROMPT_FIELDS: [&str; 5] = ["model", "messages", "prompt", "tools", "chat_template_kwargs"];

fn count_call(call: &ApiCall) -> ApiCall {
    let mut count = ApiCall::new(ApiPath::Root("tokenize"), []);
    for field in PROMPT_FIELDS {
        if let Some(value) = call.body.get(field) {
            count.body.set(field, value.clone());
        }
    }
    count
}

fn read_count(reply: &Value) -> Option<PromptCount> {
    Some(PromptCount { n_tokens: number(reply, "count")?, n_ctx: number(reply, "max_model_len") })
}

fn probe(model: &str) -> ApiCall {
    let fields = [("model", model.into()), ("prompt", "1".into()), ("max_tokens", 1.into()), ("stream", false.into())];
    ApiCall::new(ApiPath::Api("completions"), fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefill_servers_kv_parameters_reach_the_decode_server() {
        let fields = [
            ("model", "m".into()),
            ("stream", true.into()),
            ("stream_options", json!({})),
            ("max_tokens", 9.into()),
            ("max_completion_tokens", 9.into()),
            ("stop", json!(["\n"])),
        ];
        let mut call =
            ApiCall { form: ReplyDelivery::Streamed, ..ApiCall::new(ApiPath::Api("chat/completions"), fields) };
        let prefill = Value::from(prefill_call(&call).body);
        assert_eq!(prefill["kv_transfer_params"]["do_remote_decode"], true);
        assert_eq!((&prefill["max_tokens"], &prefill["max_completion_tokens"]), (&json!(1), &json!(1)));
        assert_eq!((&prefill["stream"], prefill.get("stream_options")), (&json!(false), None));
        assert_eq!((&prefill["ignore_eos"], prefill.get("stop")), (&json!(true), None));
        for nothing in [json!({}), json!({ "kv_transfer_params": null }), json!({ "kv_transfer_params": {} })] {
            assert!(!add_kv(&mut call, &nothing));
        }
        let kept = json!({ "do_remote_prefill": true, "remote_block_ids": [1], "remote_host": "p" });
        assert!(add_kv(&mut call, &json!({ "kv_transfer_params": kept })));
        assert_eq!((call.body.get("kv_transfer_params"), call.body.get("max_tokens")), (Some(&kept), Some(&json!(9))));
        let counted = |usage: Value| n_tokens(&json!({ "usage": usage }));
        assert_eq!(counted(json!({ "prompt_tokens": 1_049 })), Some(1_049));
        assert_eq!((counted(json!({ "prompt_tokens": -1 })), n_tokens(&json!({}))), (None, None));
    }

    #[test]
    fn a_prompt_is_counted_with_every_field_that_makes_it() {
        let fields = [
            ("model", "m".into()),
            ("messages", json!([1])),
            ("tools", json!([2])),
            ("chat_template_kwargs", json!({ "enable_thinking": false })),
            ("max_tokens", 9.into()),
        ];
        let call = ApiCall::new(ApiPath::Api("chat/completions"), fields);
        let count = count_call(&call);
        let mut body = call.body;
        body.remove("max_tokens");
        assert_eq!((count.path, count.body), (ApiPath::Root("tokenize"), body));
        let counted = PromptCount { n_tokens: 3, n_ctx: Some(9) };
        assert_eq!(read_count(&json!({ "count": 3, "max_model_len": 9, "tokens": [1, 2, 3] })), Some(counted));
        assert_eq!(read_count(&json!({ "count": -1 })), None);
    }
}
