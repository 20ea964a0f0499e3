//! Thousands of streams through one endpoint: none is cut, and each costs little.
//!
//! CI runs a small part of it. All of it: `BATON_LOAD_STREAMS=2000 cargo test --release --test load`. The simulator stands
//! in for engines, in this process, so that what is measured of the endpoint's process is the endpoint.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test that cannot go on panics")]

mod harness;

use std::sync::Arc;
use std::time::Duration;

use baton_engines::node::{ClusterKey, Listener, router};
use baton_engines::sim::{SimConfig, SimEngine};
use baton_schemas::node::Role;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use harness::{CLUSTER_KEY, Server};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Resident memory of the endpoint that one more stream may cost.
const MAX_KIB_PER_STREAM: u64 = 64;

/// Tokens of each reply, and how fast they come: long enough for all streams to run side by side.
const N_TOKENS: u32 = 60;
const TOKENS_PER_SECOND: f64 = 3.0;

/// A simulated node in this process.
async fn node(n_slots: u32) -> String {
    let config = SimConfig {
        n_slots,
        decode_tps: TOKENS_PER_SECOND,
        prefill_tps: 1e9,
        max_queued: 4_096,
        ..SimConfig::default()
    };
    let engine = Arc::new(SimEngine::new(config));
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).await.unwrap();
    let url = format!("http://{}", listener.tcp_address().unwrap());
    let app = router(engine, Role::Both, ClusterKey::new(CLUSTER_KEY));
    tokio::spawn(async move { listener.serve(app, Default::default()).await });
    url
}

async fn connect(address: &str) -> TcpStream {
    let body = json!({
        "model": "sim", "stream": true, "max_tokens": N_TOKENS, "ignore_eos": true,
        "messages": [{ "role": "user", "content": "hello" }],
    })
    .to_string();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}",
        body.len()
    );
    stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn no_stream_is_cut_and_each_costs_little() {
    let n: u32 = std::env::var("BATON_LOAD_STREAMS").ok().map_or(200, |n| n.parse().unwrap());
    let n_deaf = n / 10;
    let url = node(n + n_deaf).await;
    let server = Server::with(&["--node", &url, "--name", "sim"]);
    let address = server.base.trim_start_matches("http://");
    // What the first streams cost is the process warming up.
    let mut warm = connect(address).await;
    warm.read_to_string(&mut String::new()).await.unwrap();
    let before = server.resident_kib();

    // These never read what they are sent.
    let mut deaf = Vec::new();
    for _ in 0..n_deaf {
        deaf.push(connect(address).await);
    }
    let mut streams = FuturesUnordered::new();
    for _ in 0..n {
        let stream = connect(address).await;
        streams.push(async move {
            let (mut stream, mut text) = (stream, String::new());
            stream.read_to_string(&mut text).await.unwrap();
            text
        });
    }
    // All of them are under way, and the first one has some time to go.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let state: serde_json::Value =
        reqwest::get(format!("{}/baton/state", server.base)).await.unwrap().json().await.unwrap();
    let n_running = state["requests"]["admitted"].as_u64().unwrap();
    let per_stream = (server.resident_kib() - before) / u64::from(n + n_deaf);
    println!("{n} streams and {n_deaf} that do not read: {n_running} running, {per_stream} KiB each");

    let mut n_whole = 0;
    while let Some(text) = streams.next().await {
        assert!(text.starts_with("HTTP/1.1 200") && text.contains("data: [DONE]"), "{text}");
        let n_deltas = text.matches(r#""content":"#).count() as u32;
        assert!(n_deltas >= N_TOKENS / 2, "{n_deltas} deltas");
        n_whole += 1;
    }
    assert_eq!(n_whole, n);
    assert_eq!(n_running, u64::from(n + n_deaf), "all at once");
    assert!(per_stream <= MAX_KIB_PER_STREAM, "{per_stream} KiB a stream");
    drop(deaf);
}
