//! `baton serve --decode`: streams survive the loss of a decode node, and nodes come back or change while they run.

use std::time::Duration;

use harness::{BatonNode, BatonServer, SseReply, chat, eventually_async, long_prompt};
use rustix::process::Signal;
use serde_json::{Value, json};

/// A simulated node, slow enough that a reply can be interrupted.
fn sim_node(args: &[&str]) -> BatonNode {
    BatonNode::with(&[&["--engine", "sim", "--sim-prefill-tps", "20000", "--sim-decode-tps", "50"], args].concat())
}

fn sim_chat(tag: &str, max_tokens: u32) -> Value {
    chat(&long_prompt(tag, 100), json!({ "model": "sim", "max_tokens": max_tokens, "ignore_eos": true }))
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

/// The decode node that a route names.
fn decode_of(route: &str) -> usize {
    let name = route.split("; ").find_map(|part| part.strip_prefix("decode=decode-"));
    name.unwrap_or_else(|| panic!("{route}")).parse::<usize>().unwrap() - 1
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_continues_on_another_node_when_its_own_is_killed_or_freezes() {
    for signal in [Signal::KILL, Signal::STOP] {
        let prefill = sim_node(&["--role", "prefill"]);
        let decode = [sim_node(&["--role", "decode"]), sim_node(&["--role", "both"])];
        let nodes = ["--decode", &decode[0].url, "--decode", &decode[1].url, "--prefill", &prefill.url];
        let server = BatonServer::with(&[&nodes[..], &["--policy", "always_handoff", "--no-calibration"]].concat());
        assert!(server.children().is_empty(), "no engine is started here");

        let body = sim_chat("undisturbed", 100);
        let (status, route, undisturbed) = post(&server, &body).await;
        assert_eq!(status, 200, "{undisturbed}");
        assert!(route.starts_with("handoff; prefill=prefill-1; decode=decode-"), "{route}");
        let handoff = &undisturbed["timings"]["handoff"];
        assert_eq!(handoff["failure"], Value::Null, "{handoff}");
        assert!(handoff["n_tokens"].as_u64().unwrap() > 500, "{handoff}");

        let mut reply = SseReply::open(&server, &body).await;
        reply.read_pieces(50).await;
        let state_now = state(&server).await;
        let busy = |node: &&Value| node["active_slots"].as_u64().unwrap() > 0 && node["task"] == "decode";
        let nodes = state_now["models"][0]["nodes"].as_array().unwrap();
        let node = nodes.iter().find(busy).expect("a node that generates")["name"].as_str().unwrap();
        decode[if node == "decode-1" { 0 } else { 1 }].signal(signal);
        let reply = reply.whole().await;
        assert_eq!((reply.content.as_str(), reply.n_completion), (text(&undisturbed), 100), "{signal:?}");
        let model = &state(&server).await["models"][0];
        assert_eq!(model["fallbacks"]["decode_lost"]["count"], 1, "{model}");
        decode.iter().for_each(|node| node.signal(Signal::CONT));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_comes_back_is_used_again_within_five_seconds() {
    let mut decode = [sim_node(&[]), sim_node(&[])];
    let address = decode[0].url.trim_start_matches("http://").to_owned();
    let nodes = ["--decode", &decode[0].url, "--decode", &decode[1].url].map(str::to_owned);
    let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let server = BatonServer::with(&[&nodes[..], &["--policy", "round_robin", "--no-calibration"]].concat());
    let used = |tag: &'static str| {
        let server = &server;
        async move {
            let (status, route, reply) = post(server, &sim_chat(tag, 2)).await;
            assert_eq!(status, 200, "{reply}");
            decode_of(&route)
        }
    };
    for round in 0..2 {
        match round {
            0 => decode[0].signal(Signal::KILL),
            _ => decode[0].signal(Signal::STOP),
        }
        // Requests that would have gone there do not fail, and go to the other node.
        for _ in 0..4 {
            used("away").await;
        }
        eventually_async("the node to be known as gone", || async {
            state(&server).await["models"][0]["nodes"][0]["life"] == "down"
        })
        .await;
        match round {
            0 => decode[0] = sim_node(&["--listen", &address]),
            _ => decode[0].signal(Signal::CONT),
        }
        let back = tokio::time::Instant::now();
        eventually_async("the node to be used again", || async { used("back").await == 0 }).await;
        assert!(back.elapsed() < Duration::from_secs(5), "round {round}: used again after {:?}", back.elapsed());
        println!("used again after {:?}", back.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_serve_a_model_whose_own_engine_never_starts() {
    let same = sim_node(&["--name", "broken"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("broken.gguf");
    std::fs::write(&file, "no model").unwrap();
    let args = ["--model", file.to_str().unwrap(), "--decode", &same.url, "--no-calibration"];
    let server = BatonServer::with(&args);
    let body = |model: &str| chat("hello", json!({ "model": model, "max_tokens": 4 }));
    let (status, route, reply) = post(&server, &body("broken")).await;
    assert_eq!(status, 200, "{reply}");
    assert!(route.contains("decode=decode-"), "{route}");
    let health = reqwest::get(format!("{}/health", server.base)).await.unwrap();
    assert_eq!(health.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_exchanges_nodes_while_they_stream() {
    let one = sim_node(&["--role", "decode"]);
    let other = sim_node(&["--role", "decode"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("baton.toml");
    let write = |decode: &[&BatonNode], policy: &str| {
        let urls: Vec<&String> = decode.iter().map(|node| &node.url).collect();
        std::fs::write(&file, format!("[model]\ndecode = {urls:?}\npolicy = {policy:?}\n")).unwrap();
    };
    write(&[&one], "fastest");
    let server = BatonServer::with(&["--config", file.to_str().unwrap()]);
    let body = sim_chat("undisturbed", 150);
    let (_, route, undisturbed) = post(&server, &body).await;
    assert_eq!(decode_of(&route), 0);

    let model = async || state(&server).await["models"][0].clone();
    let (reply, ()) = tokio::join!(post(&server, &body), async {
        eventually_async("a running stream", || async { model().await["nodes"][0]["active_slots"] == 1 }).await;
        write(&[&other], "round_robin");
        server.signal(Signal::HUP);
        eventually_async("the other node", || async { model().await["policy"] == "round_robin" }).await;
        assert_eq!(post(&server, &sim_chat("elsewhere", 4)).await.0, 200);
        let now = model().await;
        assert_eq!(now["nodes"].as_array().unwrap().len(), 1, "{now}");
        // The node still reports the other request for a tenth of a second after its end. The stream runs longer.
        eventually_async("a node without the stream", || async { model().await["nodes"][0]["active_slots"] == 0 })
            .await;
    });
    assert_eq!((reply.0, text(&reply.2)), (200, text(&undisturbed)));

    // The node that stays keeps its name, and the new one gets another.
    write(&[&other, &one], "round_robin");
    server.signal(Signal::HUP);
    eventually_async("both nodes", || async { model().await["nodes"].as_array().unwrap().len() == 2 }).await;
    let mut decoded = std::collections::BTreeSet::new();
    for i in 0..4 {
        decoded.insert(decode_of(&post(&server, &sim_chat(&format!("turn {i}"), 2)).await.1));
    }
    assert_eq!(decoded.len(), 2, "they take turns");
}
