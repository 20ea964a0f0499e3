//! A model that computes NaN: the request fails with that reason, and no node is blamed.

use harness::{BatonNode, BatonServer};
use serde_json::{Value, json};
use tiny_gguf::Architecture;
use tiny_gguf::file::Gguf;

/// Values in a row of the tiny model's embeddings.
const N_EMBD: usize = 64;

/// Writes a model that computes NaN for each prompt with the letter z, and for no other.
fn write_broken(folder: &tempfile::TempDir) -> String {
    let path = folder.path().join("broken.gguf");
    tiny_gguf::write(&path, Architecture::Llama, 1);
    let mut file = Gguf::read(&path);
    let (_, embeddings) = file.tensors.iter_mut().find(|(name, _)| name == "token_embd.weight").unwrap();
    // The tokenizer numbers its bytes in their order.
    let z = usize::from(b'z') * N_EMBD;
    embeddings.values[z..z + N_EMBD].fill(f32::NAN);
    file.write(&path);
    path.to_str().unwrap().to_owned()
}

/// Keeps a reply from drawing the broken token by chance.
fn no_z() -> Value {
    json!({ (b'z' as usize).to_string(): -100 })
}

/// A prefill computes no logits, so that only the KV shows the fault.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_whose_kv_is_not_a_number_blames_no_prefill_node() {
    let folder = tempfile::tempdir().unwrap();
    let model = write_broken(&folder);
    let args = ["--model", &model, "--name", "broken", "--threads", "1", "--ctx-size", "512", "--slots", "2"];
    let node = |role| BatonNode::with(&[&args[..], &["--role", role]].concat());
    let [prefill, decode] = ["prefill", "decode"].map(node);
    let links = ["--prefill", &prefill.url, "--decode", &decode.url];
    let server = BatonServer::with(&[&links[..], &["--no-calibration", "--policy", "always_handoff"]].concat());
    let complete = async |prompt: &str| {
        let body = json!({ "model": "broken", "prompt": prompt.repeat(20), "max_tokens": 4, "logit_bias": no_z() });
        let call = reqwest::Client::new().post(format!("{}/v1/completions", server.base)).json(&body);
        let reply = call.send().await.unwrap();
        let route = reply.headers().get("x-baton-route").map(|value| value.to_str().unwrap().to_owned());
        (reply.status().as_u16(), route.unwrap_or_default(), reply.text().await.unwrap())
    };
    for _ in 0..3 {
        let (status, route, text) = complete("buzz").await;
        assert!(status == 500 && text.contains("not numbers"), "{route} {text}");
    }
    let (status, route, text) = complete("an honest prompt").await;
    assert!(status == 200 && route.starts_with("handoff"), "{route} {text}");
    let model = &server.state().await["models"][0];
    assert_eq!(model["fallbacks"].as_object().map(serde_json::Map::len), Some(1), "{model}");
    assert_eq!(model["fallbacks"]["not_finite"]["count"], 3, "{model}");
    for node in model["nodes"].as_array().unwrap() {
        assert_eq!((&node["life"], &node["breaker"]["failures"]), (&json!("ready"), &json!({})), "{node}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_is_not_a_number_fails_once_with_its_own_reason() {
    let folder = tempfile::tempdir().unwrap();
    let model = write_broken(&folder);
    let args = ["--model", &model, "--name", "broken", "--threads", "1", "--ctx-size", "512", "--slots", "2"];
    let nodes = [BatonNode::with(&args), BatonNode::with(&args)];
    let urls = nodes.each_ref().map(|node| ["--decode", &node.url]).concat();
    let server = BatonServer::with(&[&urls[..], &["--no-calibration", "--policy", "round_robin"]].concat());
    let body = |prompt: &str, stream: bool| {
        json!({
            "model": "broken", "prompt": prompt, "stream": stream, "max_tokens": 4, "logprobs": 1, "logit_bias": no_z(),
        })
    };
    let complete = async |prompt: &str, stream: bool| {
        let call = reqwest::Client::new().post(format!("{}/v1/completions", server.base)).json(&body(prompt, stream));
        let reply = call.send().await.unwrap();
        let retry = reply.headers().get("x-should-retry").map(|value| value.to_str().unwrap().to_owned());
        (reply.status().as_u16(), retry, reply.text().await.unwrap())
    };
    for stream in [false, true, false] {
        let (status, retry, text) = complete("buzz", stream).await;
        assert_eq!((status, retry.as_deref()), (500, Some("false")), "{text}");
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(error["error"]["code"], "internal_error", "{text}");
        assert!(error["error"]["message"].as_str().unwrap().contains("not numbers"), "{text}");
    }
    // The cells that held NaN do not spoil other prompts on either node.
    for _ in 0..2 {
        let (status, _, text) = complete("an honest prompt", false).await;
        assert_eq!(status, 200, "{text}");
    }
    let model = &server.state().await["models"][0];
    assert_eq!(model["fallbacks"], json!({}), "{model}");
    for node in model["nodes"].as_array().unwrap() {
        let breaker = &node["breaker"];
        assert_eq!((&node["life"], &breaker["failures"]), (&json!("ready"), &json!({})), "{node}");
    }
}
