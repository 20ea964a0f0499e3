//! vLLM's prefill and decode servers are joined by the handshake of its NixlConnector.

use harness::mock::{Mock, MockRequest, says, whole};
use harness::{ReloadableServer, upstream};
use serde_json::{Value, json};

/// The KV parameters that a prefill server with a NixlConnector returns.
fn kept() -> Value {
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "engine-1", "remote_host": "10.0.0.5", "remote_port": 5600, "tp_size": 1,
        "remote_request_id": "chatcmpl-1",
    })
}

/// A prefill server, which keeps KV only for requests in vLLM's form.
fn prefill(asked: &MockRequest) -> Vec<harness::mock::Step> {
    let body = &asked.body;
    let params = &body["kv_transfer_params"];
    let is_right = params["do_remote_decode"] == true
        && params["do_remote_prefill"] == false
        && ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"]
            .iter()
            .all(|name| params[name].is_null())
        && body["max_tokens"] == 1
        && body["stream"] == false
        && body.get("stream_options").is_none();
    if !is_right {
        return whole(400, "", &json!({ "object": "error", "message": "not a prefill request", "code": 400 }));
    }
    whole(200, "", &json!({ "object": "chat.completion", "choices": [], "kv_transfer_params": kept() }))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_decode_server_learns_where_the_kv_is() {
    let prefiller = Mock::start(|_, asked| prefill(asked)).await;
    let decoder = Mock::start(|_, _| says("well")).await;
    let front =
        ReloadableServer::start(&upstream("pd", "vllm", &decoder.url, &format!("prefill = [\"{}\"]", prefiller.url)));
    for stream in [false, true] {
        let answer = front.chat(json!({ "stream": stream, "max_completion_tokens": 7 })).await;
        assert!(answer.status == 200 && answer.text.contains("well"), "{answer:?}");
    }
    let first = prefiller.asked(0);
    let second = decoder.asked(0);
    assert_eq!(second.body["kv_transfer_params"], kept());
    assert_eq!((&second.body["max_tokens"], &second.body["stream"]), (&json!(7), &json!(false)));
    assert_eq!(first.body["messages"], second.body["messages"]);
    let id =
        |asked: &MockRequest| asked.head.lines().find(|line| line.starts_with("x-request-id: ")).unwrap().to_owned();
    assert_eq!(id(&first), id(&second));
    let answer = front.post("/v1/completions", &json!({ "model": "m", "prompt": "hi" })).await;
    assert_eq!((answer.status, prefiller.asked(2).path.as_str()), (200, "/v1/completions"), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_prefill_server_the_decode_server_computes_the_prompt() {
    let nothing = Mock::start(|_, _| whole(200, "", &json!({ "choices": [] }))).await;
    let broken = Mock::start(|_, _| whole(500, "", &json!({}))).await;
    for (server, reason) in [(&nothing, "no_kv_transfer_params"), (&broken, "prefill_failed")] {
        let decoder = Mock::start(|_, _| says("well")).await;
        let front =
            ReloadableServer::start(&upstream("pd", "vllm", &decoder.url, &format!("prefill = [\"{}\"]", server.url)));
        assert_eq!(front.chat(json!({})).await.content(), "well");
        assert_eq!(decoder.asked(0).body.get("kv_transfer_params"), None);
        let state = front.get("/baton/state").await;
        assert_eq!(state["upstreams"][0]["fallbacks"][reason]["count"], 1, "{state}");
    }
}
