//! vLLM: OpenAI's dialect with more fields; and prompts computed by other vLLM servers.
//!
//! Where prefill servers are configured, a request goes to one of them first, for a single token that is thrown away and
//! with `kv_transfer_params` that ask it to keep the prompt's KV. Its reply has `kv_transfer_params` that say where that
//! KV lies; they go with the request to the decode server, which fetches it (vLLM's NixlConnector). Both requests carry
//! the same `X-Request-Id`. Whatever goes wrong with the prefill server, the decode server computes the prompt itself.

use serde_json::{Map, Value, json};

use super::Call;

/// What it takes.
pub(super) const FIELDS: [&str; 18] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "logit_bias",
    "logprobs",
    "ignore_eos",
    "tools",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "reasoning_content",
    "chat_template_kwargs",
    "stream_options",
];

/// The field that both servers read.
const PARAMS: &str = "kv_transfer_params";

/// What a prefill server is asked: the same prompt, one token, in one piece.
pub(super) fn prefill_call(call: &Call) -> Call {
    let mut body = call.body.clone();
    body.remove("stream_options");
    body.insert("stream".to_owned(), false.into());
    body.insert("max_tokens".to_owned(), 1.into());
    if body.contains_key("max_completion_tokens") {
        body.insert("max_completion_tokens".to_owned(), 1.into());
    }
    let params = json!({
        "do_remote_decode": true,
        "do_remote_prefill": false,
        "remote_engine_id": null,
        "remote_block_ids": null,
        "remote_host": null,
        "remote_port": null,
    });
    body.insert(PARAMS.to_owned(), params);
    Call { path: call.path, body }
}

/// Tells a decode server where the KV is, in the prefill server's own words. `false`: it has said nothing.
pub(super) fn with_kv_of(call: &mut Call, reply: &Value) -> bool {
    let params: Option<&Map<String, Value>> = reply.get(PARAMS).and_then(Value::as_object);
    let Some(params) = params.filter(|params| !params.is_empty()) else { return false };
    call.body.insert(PARAMS.to_owned(), params.clone().into());
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_handshake_is_vllms() {
        let body = json!({
            "model": "m", "stream": true, "stream_options": {}, "max_tokens": 9, "max_completion_tokens": 9,
        });
        let mut call = Call { path: "chat/completions", body: body.as_object().unwrap().clone() };
        let prefill = Value::Object(prefill_call(&call).body);
        assert_eq!(prefill["kv_transfer_params"]["do_remote_decode"], true);
        assert_eq!((&prefill["max_tokens"], &prefill["max_completion_tokens"]), (&json!(1), &json!(1)));
        assert_eq!((&prefill["stream"], prefill.get("stream_options")), (&json!(false), None));
        for nothing in [json!({}), json!({ "kv_transfer_params": null }), json!({ "kv_transfer_params": {} })] {
            assert!(!with_kv_of(&mut call, &nothing));
        }
        let kept = json!({ "do_remote_prefill": true, "remote_block_ids": [1], "remote_host": "p" });
        assert!(with_kv_of(&mut call, &json!({ "kv_transfer_params": kept })));
        assert_eq!((&call.body["kv_transfer_params"], &call.body["max_tokens"]), (&kept, &json!(9)));
    }
}
