//! The options that llama-server's users bring along, between real processes: nodes with different ones exchange no KV.

use std::process::Command;

use harness::{BATON, BatonServer, CLUSTER_KEY, chat};
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread")]
async fn a_quantized_cache_takes_half_the_memory_and_keeps_conversations() {
    let quantized = ["--cache-type-k", "q8_0", "--cache-type-v", "q8_0", "--mlock", "--no-mmap", "--flash-attn", "on"];
    let server = BatonServer::start(&[&["--ctx-size", "2048", "--kv-cells", "4096"], &quantized[..]].concat());
    let memory =
        async |server: &BatonServer| server.state().await["models"][0]["nodes"][0]["memory_bytes"].as_u64().unwrap();
    let plain = BatonServer::start(&["--ctx-size", "2048", "--kv-cells", "4096"]);
    // 23,040 bytes a token in f16, and 34 bytes for 64 in q8_0.
    assert_eq!(memory(&plain).await - memory(&server).await, 4096 * (23_040 - 12_240));
    let body = chat("What is the capital of France?", json!({ "max_tokens": 8, "logprobs": true }));
    let (_, exact) = plain.post("/v1/chat/completions", &body).await;
    let (_, first) = server.post("/v1/chat/completions", &body).await;
    let token = |reply: &Value| reply["choices"][0]["logprobs"]["content"][0].clone();
    assert_eq!(token(&first)["token"], token(&exact)["token"], "{first}");
    let sureness = |reply: &Value| token(reply)["logprob"].as_f64().unwrap();
    let distance = (sureness(&first) - sureness(&exact)).abs();
    assert!(distance > 0.0 && distance < 0.2, "8 bits a value round a little: {distance}");
    let said = |reply: &Value| reply["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let (_, again) = server.post("/v1/chat/completions", &body).await;
    assert_eq!(said(&again), said(&first));
    assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 10, "{again}");
}

#[test]
fn a_prefill_node_refuses_a_cache_that_cannot_be_handed_over() {
    let mut node = Command::new(&*BATON);
    node.args(["node", "--engine", "sim", "--role", "prefill", "--listen", "127.0.0.1:0", "--cache-type-v", "q8_0"]);
    let output = node.env("BATON_CLUSTER_KEY", CLUSTER_KEY).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("--cache-type-v must be f16, bf16 or f32"), "{error}");
    assert!(error.contains("a quantized cache cannot be handed over"), "{error}");
}
