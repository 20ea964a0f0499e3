//! With `max_tokens: 0` the prompt is computed and the client gets no token.

use harness::mock::{Mock, MockRequest, Step, says};
use harness::{ReloadableServer, upstream};
use serde_json::{Value, json};

/// A server that obeys a limit of one token and treats 0 as no limit or refuses it.
fn one_token(asked: &MockRequest) -> Vec<Step> {
    if asked.path.starts_with("/v1/") {
        return says("well");
    }
    let said = json!({ "role": "assistant", "content": "well", "thinking": "hm" });
    let end = json!({
        "model": "theirs", "message": said, "done": true, "done_reason": "length",
        "prompt_eval_count": 5, "eval_count": 1,
    });
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\nconnection: close\r\n\r\n";
    vec![Step::Send(format!("{head}{end}\n"))]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_for_zero_tokens_gets_none_from_any_kind() {
    for (kind, limit) in [
        ("openai", "/max_tokens"),
        ("llama-server", "/max_tokens"),
        ("vllm", "/max_tokens"),
        ("ollama", "/options/num_predict"),
    ] {
        let mock = Mock::start(|_, asked| one_token(asked)).await;
        let front = ReloadableServer::start(&upstream("one", kind, &mock.url, ""));
        let whole = front.chat(json!({ "max_tokens": 0 })).await;
        assert_eq!(whole.status, 200, "{kind}: {whole:?}");
        let reply = whole.json();
        let choice = &reply["choices"][0];
        let usage = &reply["usage"];
        assert_eq!(choice["message"]["content"].as_str().unwrap_or_default(), "", "{kind}: {reply}");
        assert_eq!(choice["finish_reason"], "length", "{kind}: {reply}");
        assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(5), &json!(0)), "{kind}: {reply}");
        assert_eq!(mock.asked(0).body.pointer(limit), Some(&Value::from(1)), "{kind}: {:?}", mock.asked(0));

        let streamed = front.chat(json!({ "max_tokens": 0, "stream": true })).await;
        assert!(streamed.text.contains("\"finish_reason\":\"length\""), "{kind}: {streamed:?}");
        assert!(!streamed.text.contains("well") && !streamed.text.contains("hm\""), "{kind}: {streamed:?}");
    }
}
