//! The KV of a removed API key stays nowhere, also that of its requests which come to an engine only afterwards.

use std::time::Duration;

use harness::{BatonServer, TempConfigFile, chat, eventually_async, long_prompt};
use reqwest::RequestBuilder;
use serde_json::{Value, json};

use crate::admission::{begun, n_waiting};

fn config(keys: &[&str]) -> String {
    format!(
        "api_keys = {keys:?}\n[model]\nname = \"sim\"\n[model.engine]\nengine = \"sim\"\nslots = 1\nsim_decode_tps = 50.0\n"
    )
}

fn ask(server: &BatonServer, key: &str, n_tokens: u32, stream: bool) -> RequestBuilder {
    let more = json!({ "model": "sim", "max_tokens": n_tokens, "ignore_eos": true, "stream": stream });
    let url = format!("{}/v1/chat/completions", server.base);
    reqwest::Client::new().post(url).bearer_auth(key).json(&chat(&long_prompt("mine", 300), more))
}

async fn may_ask(server: &BatonServer, key: &str) -> bool {
    let request = reqwest::Client::new().get(format!("{}/v1/models", server.base)).bearer_auth(key);
    request.send().await.unwrap().status().is_success()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_waits_for_a_slot_while_its_key_is_removed_leaves_nothing() {
    let file = TempConfigFile::new(&config(&["alice", "bob"]));
    let server = file.serve();
    let running = begun(ask(&server, "bob", 150, true)).await;
    let waits = tokio::spawn(ask(&server, "alice", 4, false).send());
    eventually_async("alice's request in the queue", async || n_waiting(&server, "bob").await == 1).await;
    file.reload(&server, &config(&["bob"]));
    eventually_async("the removal", async || !may_ask(&server, "alice").await).await;
    assert_eq!(n_waiting(&server, "bob").await, 1, "it has not begun yet");
    running.await;
    let reply: Value = waits.await.unwrap().unwrap().json().await.unwrap();
    assert_eq!(reply["usage"]["completion_tokens"], 4, "what was accepted is answered: {reply}");
    file.reload(&server, &config(&["alice", "bob"]));
    eventually_async("the key", async || may_ask(&server, "alice").await).await;
    let cached = async |key| -> Value {
        let request = ask(&server, key, 4, false).timeout(Duration::from_secs(60));
        let reply: Value = request.send().await.unwrap().json().await.unwrap();
        reply["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    assert_eq!(cached("alice").await, 0);
    assert!(cached("alice").await.as_u64() > Some(0), "the key that is back keeps its KV");
}
