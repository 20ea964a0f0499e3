//! An endpoint and nodes that are stopped for a while and run again, as on a laptop that sleeps. `make suspend` stops them
//! for two minutes.

use std::time::Duration;

use futures::future::join_all;
use harness::{BatonNode, BatonServer, SseReply, chat, eventually_async, long_prompt};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

/// Longer than any silence that Baton allows a node.
const SHORT_STOP: u64 = 8;

/// Tokens of one stream in a second.
const TPS: u64 = 50;

const ENGINE: [&str; 8] = ["--engine", "sim", "--sim-prefill-tps", "20000", "--sim-decode-tps", "50", "--slots", "16"];

fn stop_time() -> Duration {
    let seconds = std::env::var("SUSPEND_SECONDS").ok().and_then(|value| value.parse().ok());
    Duration::from_secs(seconds.unwrap_or(SHORT_STOP))
}

/// A reply that lasts longer than the stop.
fn long_reply(i: usize) -> Value {
    let n_tokens = TPS * (stop_time().as_secs() + 6);
    chat(
        &long_prompt(&format!("stream {i}"), 10),
        json!({ "model": "sim", "max_tokens": n_tokens, "ignore_eos": true }),
    )
}

fn short_reply(i: usize) -> Value {
    chat(&format!("turn {i}"), json!({ "model": "sim", "max_tokens": 4, "ignore_eos": true }))
}

/// The stops that the endpoint has counted, and the states of its nodes.
async fn seen(server: &BatonServer) -> (Value, Vec<Value>) {
    let model = server.state().await["models"][0].take();
    let lives = model["nodes"].as_array().unwrap().iter().map(|node| node["life"].clone()).collect();
    (model["fallbacks"].clone(), lives)
}

/// Streams that run while `stop` stops something and lets it run again. They must be the same with and without.
async fn check_streams(server: &BatonServer, n: usize, stop: impl Future<Output = ()>) {
    let undisturbed = join_all((0..n).map(async |i| server.post("/v1/chat/completions", &long_reply(i)).await.1));
    let undisturbed = undisturbed.await;
    let streams = join_all((0..n).map(async |i| {
        let mut stream = SseReply::open(server, &long_reply(i)).await;
        stream.read_pieces(20).await;
        stream
    }));
    let streams = streams.await;
    let ((), replies) = tokio::join!(stop, join_all(streams.into_iter().map(|stream| stream.whole())));
    for (reply, undisturbed) in replies.iter().zip(&undisturbed) {
        assert_eq!(reply.content, undisturbed["choices"][0]["message"]["content"].as_str().unwrap());
    }
    let all_ready = async || seen(server).await.1.iter().all(|life| life == "ready");
    eventually_async("every node to be ready", all_ready).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_was_stopped_blames_no_node() {
    let nodes = [BatonNode::with(&ENGINE), BatonNode::with(&ENGINE)];
    let server = BatonServer::with(&["--decode", &nodes[0].url, "--decode", &nodes[1].url, "--no-calibration"]);
    let stop = async {
        server.signal(Signal::STOP);
        let woken = async {
            tokio::time::sleep(stop_time()).await;
            server.signal(Signal::CONT);
        };
        // These come while it is stopped, so it finds them together with all its timers.
        let early = (0..8).map(async |i| server.post("/v1/chat/completions", &short_reply(i)).await.0);
        let ((), statuses) = tokio::join!(woken, join_all(early));
        assert_eq!(statuses, [200; 8]);
    };
    check_streams(&server, 8, stop).await;
    let (fallbacks, _) = seen(&server).await;
    // A node gives up a reader that takes nothing for a long time; its stream is then continued.
    if stop_time().as_secs() == SHORT_STOP {
        assert_eq!(fallbacks, json!({}), "no node was lost");
    }
    let metrics = server.get_text("/metrics").await;
    assert!(!metrics.contains("to=\"down\""), "no node was down: {metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_streams_of_a_node_that_was_stopped_continue_elsewhere_and_it_is_used_again() {
    let nodes = [BatonNode::with(&ENGINE), BatonNode::with(&ENGINE)];
    let decode = ["--decode", &nodes[0].url, "--decode", &nodes[1].url];
    let server = BatonServer::with(&[&decode[..], &["--policy", "round_robin", "--no-calibration"]].concat());
    let stop = async {
        nodes[0].signal(Signal::STOP);
        tokio::time::sleep(stop_time()).await;
        nodes[0].signal(Signal::CONT);
    };
    check_streams(&server, 8, stop).await;
    let used = async || {
        let reply = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&short_reply(0));
        let response = reply.send().await.unwrap();
        response.headers()["x-baton-route"].to_str().unwrap().contains("decode=decode-1")
    };
    eventually_async("the node to be used again", used).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_was_stopped_with_its_engine_keeps_both() {
    let server = BatonServer::with(&[&ENGINE[..], &["--no-calibration"]].concat());
    let engine = server.engine();
    let stop = async {
        server.signal(Signal::STOP);
        kill_process(engine, Signal::STOP).unwrap();
        tokio::time::sleep(stop_time()).await;
        server.signal(Signal::CONT);
        // The endpoint runs for a moment before its engine does.
        tokio::time::sleep(Duration::from_millis(500)).await;
        kill_process(engine, Signal::CONT).unwrap();
    };
    check_streams(&server, 4, stop).await;
    assert_eq!((server.engine(), seen(&server).await.0), (engine, json!({})));
}
