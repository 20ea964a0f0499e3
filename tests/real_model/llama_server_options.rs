//! The options that llama-server's users bring along, between real processes: nodes with different ones exchange no KV.

use std::process::Command;

use harness::{BATON, BatonNode, BatonServer, chat, eventually_async, long_prompt};
use serde_json::{Value, json};
use tiny_gguf::{Architecture, adapter};

/// Asks for a handoff. Returns the route and the reply.
async fn ask(server: &BatonServer, tag: &str) -> (String, Value) {
    let body = chat(&long_prompt(tag, 60), json!({ "max_tokens": 8, "ignore_eos": true }));
    let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base));
    let response = call.header("x-baton-policy", "always_handoff").json(&body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let route = response.headers()["x-baton-route"].to_str().unwrap().to_owned();
    let reply: Value = response.json().await.unwrap();
    assert_eq!(reply["usage"]["completion_tokens"], 8, "{reply}");
    (route, reply)
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_with_other_options_exchange_no_kv_and_still_reply() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter.gguf");
    adapter::write(&path, "llama", &[("blk.0.attn_k.weight", [576, 192]), ("blk.5.ffn_down.weight", [1536, 576])], 1);
    let path = path.to_str().unwrap();
    let scaled = format!("{path}:0.05");
    let small = ["--ctx-size", "1024", "--kv-cells", "2048"];
    let node = BatonNode::start(&[&small[..], &["--role", "prefill", "--lora-scaled", &scaled]].concat());
    let serve = |options: &[&str]| {
        BatonServer::start(&[&small[..], &["--prefill", &node.url, "--no-calibration"], options].concat())
    };

    let alike = serve(&["--lora-scaled", &scaled]);
    let (route, reply) = ask(&alike, "alike").await;
    assert!(route.starts_with("handoff; ") && !route.contains("failure"), "{route}");
    assert_eq!(reply["timings"]["handoff"]["failure"], Value::Null, "{reply}");
    assert!(reply["timings"]["handoff"]["n_tokens"].as_u64().unwrap() > 60, "{reply}");
    drop(alike);

    let rope = ["--lora-scaled", &scaled, "--rope-scaling", "yarn", "--rope-scale", "2", "--yarn-orig-ctx", "2048"];
    let others: [(&str, &[&str]); 3] = [("none", &[]), ("scale", &["--lora", path]), ("rope", &rope)];
    for (tag, options) in others {
        let other = serve(options);
        let (route, reply) = ask(&other, tag).await;
        assert!(route.starts_with("direct; ") && route.contains("reason=other_weights"), "{tag}: {route}");
        assert_eq!(reply["timings"]["handoff"], Value::Null, "{tag}: {reply}");
    }

    // Beside the weights it sees the types of rows.
    let wide = serve(&["--lora-scaled", &scaled, "--cache-type-k", "f32"]);
    let (route, _) = ask(&wide, "wide").await;
    assert!(route.starts_with("direct; decode=local") && route.contains("reason=other_cache_types"), "{route}");
}

#[tokio::test(flavor = "multi_thread")]
async fn cache_types_that_differ_are_named_everywhere_and_count_for_nothing_where_there_are_no_rows() {
    let folder = tempfile::tempdir().unwrap();
    for architecture in [Architecture::Llama, Architecture::Mamba2] {
        let path = folder.path().join(format!("{architecture:?}.gguf"));
        tiny_gguf::write_with_template(&path, architecture, 1);
        let path = path.to_str().unwrap();
        let model = ["--model", path, "--name", "smollm2", "--ctx-size", "2048", "--threads", "1"];
        let quantized = ["--role", "prefill", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0"];
        let node = BatonNode::with(&[&model[..], &quantized].concat());
        let log = tempfile::NamedTempFile::new().unwrap();
        let own = ["--prefill", &node.url, "--no-calibration"];
        let server = BatonServer::logging_to(log.reopen().unwrap(), &[&model[..], &own].concat());
        let (route, _) = ask(&server, "types").await;
        let status =
            Command::new(&*BATON).args(["status", server.base.trim_start_matches("http://")]).output().unwrap();
        let status = String::from_utf8(status.stdout).unwrap();
        let state = server.state().await;
        let nodes = state["models"][0]["nodes"].as_array().unwrap();
        let unused = |key: &str| nodes.iter().find_map(|node| node[key].as_str()).unwrap_or_default().to_owned();
        if architecture == Architecture::Mamba2 {
            assert!(route.starts_with("handoff; ") && !route.contains("failure"), "{route}");
            assert_eq!((unused("unused"), unused("unused_reason")), Default::default(), "{state}");
            continue;
        }
        assert!(route.starts_with("direct; ") && route.contains("reason=other_cache_types"), "{route}");
        assert_eq!(unused("unused_reason"), "other_cache_types");
        assert_eq!(state["models"][0]["links"][0]["unused_reason"], "other_cache_types", "the link agrees");
        let why = "its KV cache is q8_0, and the other nodes of this model keep theirs in f16. Start all with the same --cache-type-k";
        assert!(unused("unused").contains(why), "{state}");
        assert!(status.lines().any(|line| line.starts_with("WARNING") && line.contains(why)), "{status}");
        assert!(status.contains("not used: its KV cache has other types"), "{status}");
        let logged = || std::fs::read_to_string(log.path()).unwrap().contains(why);
        eventually_async("the warning in the log", || async { logged() }).await;
    }
}

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

#[tokio::test(flavor = "multi_thread")]
async fn a_quantized_cache_is_handed_over() {
    let options = ["--ctx-size", "2048", "--kv-cells", "4096", "--cache-type-k", "q8_0", "--cache-type-v", "q4_0"];
    let node = BatonNode::start(&[&options[..], &["--role", "prefill"]].concat());
    let server = BatonServer::start(&[&options[..], &["--prefill", &node.url, "--no-calibration"]].concat());
    let alone = BatonServer::start(&options);
    let (route, reply) = ask(&server, "quantized").await;
    assert!(route.starts_with("handoff; ") && !route.contains("failure"), "{route}");
    let handoff = &reply["timings"]["handoff"];
    let [n_tokens, n_bytes] = ["n_tokens", "n_bytes"].map(|key| handoff[key].as_u64().unwrap());
    // 192 values of K in blocks of 34 bytes, and as many of V in blocks of 18, in 30 layers.
    let of_rows = n_tokens * 30 * 6 * (34 + 18);
    assert!(n_tokens > 60 && n_bytes > of_rows && n_bytes < of_rows * 11 / 10, "{handoff}");
    let (route, expected) = ask(&alone, "quantized").await;
    assert!(route.starts_with("direct; "), "{route}");
    assert_eq!(reply["choices"][0]["message"], expected["choices"][0]["message"]);
}
