//! Decode nodes with the real model, next to an engine of the endpoint and to nodes of other models.

use harness::{BatonNode, BatonServer, SseReply, chat, eventually_async};
use rustix::process::Signal;
use serde_json::{Value, json};

/// A simulated node, slow enough that a reply can be interrupted.
fn sim_node(args: &[&str]) -> BatonNode {
    BatonNode::with(&[&["--engine", "sim", "--sim-prefill-tps", "20000", "--sim-decode-tps", "50"], args].concat())
}

async fn post(server: &BatonServer, body: &Value) -> (u16, String, Value) {
    let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(body);
    let response = call.send().await.unwrap();
    let route = response.headers().get("x-baton-route").map(|v| v.to_str().unwrap().to_owned()).unwrap_or_default();
    (response.status().as_u16(), route, response.json().await.unwrap())
}

async fn state(server: &BatonServer) -> Value {
    reqwest::get(format!("{}/baton/state", server.base)).await.unwrap().json().await.unwrap()
}

fn text(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{reply}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn models_of_nodes_are_listed_and_requests_go_to_the_engines_of_theirs() {
    let real = BatonNode::start(&["--role", "decode", "--name", "smollm2"]);
    let sims = [sim_node(&[]), sim_node(&["--name", "other"])];
    // A second node with the same name has other weights.
    let namesake = sim_node(&["--name", "smollm2"]);
    namesake.signal(Signal::STOP);
    let nodes = [&real, &sims[0], &sims[1], &namesake].map(|node| ["--decode", &node.url]).concat();
    let server = BatonServer::with(&[&nodes[..], &["--no-calibration"]].concat());
    let models: Value = reqwest::get(format!("{}/v1/models", server.base)).await.unwrap().json().await.unwrap();
    let mut ids: Vec<_> = models["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    ids.sort_unstable();
    assert!(ids == ["other", "sim", "smollm2"], "{models}");
    namesake.signal(Signal::CONT);
    eventually_async("the namesake to answer", || async {
        let state = state(&server).await;
        let nodes = state["models"][0]["nodes"].as_array().unwrap();
        nodes.iter().any(|node| node["name"] == "decode-4" && node["life"] == "ready")
    })
    .await;
    for (model, expected) in [("smollm2", "decode=decode-1"), ("sim", "decode=decode-2"), ("other", "decode=decode-3")]
    {
        for _ in 0..3 {
            let (status, route, reply) = post(&server, &chat("hello", json!({ "model": model }))).await;
            assert_eq!((status, &reply["model"]), (200, &json!(model)), "{reply}");
            assert!(route.contains(expected), "{model}: {route}");
        }
    }
    let (status, _, reply) = post(&server, &chat("hello", json!({ "model": "third" }))).await;
    assert_eq!((status, &reply["error"]["code"]), (404, &json!("model_not_found")), "{reply}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoints_own_engine_and_a_node_serve_one_model_together() {
    let node = BatonNode::start(&["--role", "decode"]);
    let server = BatonServer::start(&["--decode", &node.url, "--policy", "round_robin", "--no-calibration"]);
    let mut seen = Vec::new();
    for _ in 0..4 {
        let (status, route, reply) = post(&server, &chat("What is the capital of France?", json!({}))).await;
        assert_eq!(status, 200, "{reply}");
        seen.push((route.contains("decode=local"), text(&reply).to_owned()));
    }
    assert!(seen.iter().any(|(local, _)| *local) && seen.iter().any(|(local, _)| !local), "{seen:?}");
    assert!(seen.iter().all(|(_, text)| *text == seen[0].1), "{seen:?}");
    // The node's own name for the model is not listed as a second model.
    let models: Value = reqwest::get(format!("{}/v1/models", server.base)).await.unwrap().json().await.unwrap();
    assert!(models["data"].as_array().unwrap().iter().all(|m| !m["id"].as_str().unwrap().contains(' ')), "{models}");
    // They take turns, so one of two replies is the lost engine's, and the node continues it.
    let body = chat("Count from one to one hundred in words.", json!({ "max_tokens": 64, "ignore_eos": true }));
    let (_, _, undisturbed) = post(&server, &body).await;
    for _ in 0..2 {
        let mut reply = SseReply::open(&server, &body).await;
        reply.read_pieces(10).await;
        rustix::process::kill_process(server.engine(), Signal::KILL).unwrap();
        assert_eq!(reply.whole().await.content, text(&undisturbed));
    }
}
