//! Replies of upstreams: streams, whole replies, and errors.

use std::time::Duration;

use baton_schemas::tools::ToolCallDelta;
use baton_schemas::{EngineError, FinishReason};
use baton_upstream::{TextDelta, UpstreamDeadlines, UpstreamError, UpstreamKind};
use bytes::Bytes;
use futures::StreamExt as _;
use tokio::runtime::{Builder, Runtime};

/// Nothing here waits for anything.
const DEADLINES: UpstreamDeadlines = UpstreamDeadlines {
    connect: Duration::from_secs(60),
    first: Duration::from_secs(60),
    idle: Duration::from_secs(60),
};

/// Server-sent events: a byte with the kind of upstream and with whether log-probabilities were requested, then the reply.
pub(crate) fn events(input: &[u8]) -> bool {
    let [first, reply @ ..] = input else { return false };
    let kind = [UpstreamKind::OpenAi, UpstreamKind::Vllm, UpstreamKind::LlamaServer][usize::from(first >> 1) % 3];
    read(kind, first & 1 == 1, reply)
}

/// Ollama's lines, after a byte that says whether log-probabilities were requested.
pub(crate) fn lines(input: &[u8]) -> bool {
    let [first, reply @ ..] = input else { return false };
    read(UpstreamKind::Ollama, first & 1 == 1, reply)
}

/// Reads a reply that arrives at once, and the same in pieces.
fn read(kind: UpstreamKind, wants_logprobs: bool, reply: &[u8]) -> bool {
    let at_once = gather(kind, wants_logprobs, vec![Bytes::copy_from_slice(reply)]);
    let size = reply.len() % 61 + 1;
    let pieces = reply.chunks(size).map(Bytes::copy_from_slice).collect();
    assert_eq!(gather(kind, wants_logprobs, pieces), at_once, "where the reply is cut makes a difference");
    at_once.1
}

/// The deltas without the ids of calls, which are drawn, and whether the reply was complete.
fn gather(kind: UpstreamKind, wants_logprobs: bool, pieces: Vec<Bytes>) -> (Vec<TextDelta>, bool) {
    thread_local! {
        static RUNTIME: Runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
    }
    let deltas = RUNTIME.with(|runtime| {
        runtime.block_on(async { kind.read_stream(wants_logprobs, pieces, DEADLINES).collect::<Vec<_>>().await })
    });
    let mut seen = Vec::new();
    let mut n_calls = 0;
    let mut open = false;
    for delta in deltas {
        assert!(!matches!(seen.last(), Some(TextDelta::Finished(_))), "the reply goes on after its end");
        let Ok(mut delta) = delta else { return (seen, false) };
        match &mut delta {
            TextDelta::Call(ToolCallDelta::Begin { index, id, .. }) => {
                assert!(!open && *index == n_calls && !id.is_empty(), "calls are numbered and do not overlap");
                open = true;
                id.clear();
            }
            TextDelta::Call(ToolCallDelta::Arguments { index, .. }) => assert!(open && *index == n_calls),
            TextDelta::Call(ToolCallDelta::End { index }) => {
                assert!(open && *index == n_calls);
                open = false;
                n_calls += 1;
            }
            TextDelta::Finished(end) => {
                let is_cut = matches!(end.reason, FinishReason::Length | FinishReason::ContentFilter);
                assert!(!open || is_cut, "a complete reply has an unfinished call");
            }
            TextDelta::Text { .. } | TextDelta::Reasoning(_) | TextDelta::Refusal(_) | TextDelta::LeftOut(_) => {}
        }
        seen.push(delta);
    }
    let is_complete = matches!(seen.last(), Some(TextDelta::Finished(_)));
    assert!(is_complete, "a reply ends without an end and without an error");
    (seen, true)
}

/// Whole replies: a byte with the kind of upstream and the number of vectors that were requested, then the reply.
pub(crate) fn replies(input: &[u8]) -> bool {
    let [first, reply @ ..] = input else { return false };
    UpstreamKind::ALL[usize::from(first % 4)].read_whole(reply, usize::from(first >> 2) % 4)
}

/// A list of models. Its entries are the models and those without a name, and contexts are positive.
pub(crate) fn models(input: &[u8]) -> bool {
    let Some(list) = UpstreamKind::read_models(input) else { return false };
    assert!(list.models.iter().all(|model| !model.name.is_empty() && model.n_ctx != Some(0)), "{list:?}");
    assert!(list.models.len() + list.n_unnamed <= input.len(), "{list:?}");
    true
}

pub(crate) fn models_seeds() -> Vec<Vec<u8>> {
    let all = [
        r#"{"object":"list","data":[{"id":"m","object":"model","max_model_len":32768},{"id":"n","name":"N"}]}"#,
        r#"{"models":[{"name":"m:latest","model":"m","details":{}},{"model":"b"},"c",{}]}"#,
        r#"["a",{"id":7}]"#,
        "null",
    ];
    all.map(|json| json.as_bytes().to_vec()).to_vec()
}

/// Errors: the status in two bytes, then the body, which is also the value of `retry-after`. What clients are shown is
/// bounded and has no control characters.
pub(crate) fn errors(input: &[u8]) -> bool {
    let [s0, s1, body @ ..] = input else { return false };
    let status = u16::from_le_bytes([*s0, *s1]);
    let header = http::HeaderValue::from_bytes(body).ok().map(|value| (http::header::RETRY_AFTER, value));
    let headers = header.into_iter().collect();
    match UpstreamKind::OpenAi.read_refusal(status, &headers, body) {
        UpstreamError::Refused(
            EngineError::InvalidRequest { message, .. }
            | EngineError::ContextExceeded { message }
            | EngineError::Unsupported { feature: message },
        ) => {
            assert!(message.chars().count() <= 1_000 && !message.contains(char::is_control), "{message:?}");
        }
        UpstreamError::Busy { retry_after } => {
            assert!(retry_after.is_none_or(|after| after <= Duration::from_secs(600)), "{retry_after:?}");
        }
        _ => {}
    }
    true
}

fn seeds(all: &[(u8, &str)]) -> Vec<Vec<u8>> {
    all.iter().map(|(first, reply)| [&[*first], reply.as_bytes()].concat()).collect()
}

pub(crate) fn events_seeds() -> Vec<Vec<u8>> {
    let text = concat!(
        r#"data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"Hi"},"finish_reason":null}]}"#,
        "\n\n: still here\nevent: x\r\n",
        r#"data: {"choices":[{"delta":{"reasoning_content":"hm","content":null},"finish_reason":"stop"}]}"#,
        "\n\n",
        r#"data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":3},"completion_tokens_details":{"reasoning_tokens":1}}}"#,
        "\n\ndata: [DONE]\n\n",
    );
    let calls = concat!(
        r#"data: {"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":""}}]}}]}"#,
        "\n\n",
        r#"data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"a\":"}}]}}]}"#,
        "\n\n",
        r#"data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"1}"}},{"index":1,"id":"b","function":{"name":"g","arguments":"{}"}}]},"finish_reason":"tool_calls"}]}"#,
        "\n\ndata: [DONE]\n\n",
    );
    let logprobs = concat!(
        r#"data: {"choices":[{"delta":{"content":"é"},"logprobs":{"content":[{"token":"é","logprob":-0.5,"bytes":[195,169],"top_logprobs":[{"token":"e","logprob":-1.5,"bytes":null}]}]}}]}"#,
        "\n\n",
        r#"data: {"choices":[{"text":"b","logprobs":{"tokens":["b"],"token_logprobs":[-0.25],"top_logprobs":[{"b":-0.25,"c":-2}]},"finish_reason":"length"}]}"#,
        "\n\ndata: [DONE]\n\n",
    );
    let interleaved = concat!(
        "\u{FEFF}data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"name\":\"f\",\"arguments\":{\"a\":1}}},\r",
        "data: {\"index\":1,\"id\":7,\"function\":{\"name\":\"g\"}}],\"content\":[{\"type\":\"thinking\",\"thinking\":\"hm\"},\"Hi\"]}}]}\r\r",
        r#"data: {"choices":[{"delta":{"refusal":"No.","annotations":[{}]},"finish_reason":"content_filter"}]}"#,
        "\r\n\r\ndata: [DONE]\n\n",
    );
    seeds(&[(0, text), (2, calls), (4, calls), (1, logprobs), (0, interleaved)])
}

pub(crate) fn lines_seeds() -> Vec<Vec<u8>> {
    let chat = concat!(
        r#"{"model":"m","message":{"role":"assistant","content":"Hi","thinking":"hm"},"done":false}"#,
        "\n",
        r#"{"message":{"tool_calls":[{"id":"x","function":{"name":"f","arguments":{"a":1}}},{"function":{"name":"g"}}]}}"#,
        "\n",
        r#"{"done":true,"done_reason":"stop","prompt_eval_count":5,"eval_count":2}"#,
        "\n",
    );
    let generate = concat!(
        r#"{"response":"Hi","thinking":null,"logprobs":[{"token":"<think>","logprob":-1},{"token":"H","logprob":-0.5,"top_logprobs":[{"token":"h","logprob":-2}]},{"token":"i","logprob":-0.1}]}"#,
        "\r\n\n",
        r#"{"response":"","done":true,"done_reason":"length"}"#,
        "\n",
    );
    seeds(&[(0, chat), (0, generate), (1, generate)])
}

pub(crate) fn replies_seeds() -> Vec<Vec<u8>> {
    seeds(&[
        (0, r#"{"models":[{"name":"m"}]}"#),
        (
            0,
            r#"{"details":{"format":"gguf","family":"qwen3","families":["qwen3"],"parameter_size":"8.2B"},"model_info":{"general.architecture":"qwen3","general.parameter_count":8190735360,"qwen3.context_length":40960,"qwen3.embedding_length":4096},"capabilities":["completion","tools"]}"#,
        ),
        (4, r#"{"embeddings":[[0.5,-1e3]],"prompt_eval_count":3}"#),
        (1, r#"{"object":"list","data":[{"id":"m"}]}"#),
        (
            9,
            r#"{"results":[{"index":1,"relevance_score":3.0},{"index":0,"relevance_score":-1}],"usage":{"total_tokens":7}}"#,
        ),
        (9, r#"{"data":[{"index":1,"embedding":[3.0,0]},{"index":0,"embedding":[1,2]}],"usage":{"prompt_tokens":7}}"#),
        (2, r#"{"default_generation_settings":{"n_ctx":8192}}"#),
        (2, r#"{"tokens":[1,2,3]}"#),
        (3, r#"{"data":[{"id":"m","max_model_len":32768}],"prompt":"x"}"#),
        (3, r#"{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[1]}}"#),
    ])
}

pub(crate) fn errors_seeds() -> Vec<Vec<u8>> {
    let all: [(u16, &str); 7] = [
        (400, r#"{"error":{"message":"no file /srv/models/x.gguf, at 10.1.2.3:8000","code":400,"type":"x"}}"#),
        (400, r#"{"error":"long","code":"context_length_exceeded","n_prompt_tokens":9,"n_ctx":8}"#),
        (422, r#"{"detail":[{"loc":["body","messages",0],"msg":"Field required","input":"secret"}]}"#),
        (500, r#"{"object":"error","message":"This model's maximum context length is 8 tokens.","code":400}"#),
        (501, r#"{"error":{"code":501,"message":"no vectors, see http://h/p or [::1]:80 (sk-secret)"}}"#),
        (429, "12.5"),
        (503, "Wed, 21 Oct 2015 07:28:00 GMT"),
    ];
    all.iter().map(|(status, body)| [&status.to_le_bytes()[..], body.as_bytes()].concat()).collect()
}
