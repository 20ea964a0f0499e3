//! Thousands of streams through one endpoint: none is cut, each costs little, and clients that stop reading do not affect
//! others.
//!
//! The simulated engine runs in this process, so the endpoint's process contains only the endpoint. `BATON_LOAD_STREAMS=200`
//! makes the test smaller.

use std::sync::Arc;
use std::time::Instant;

use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::node::{ClusterKey, Listener, router};
use baton_schemas::node::Role;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use harness::{BatonServer, CLUSTER_KEY, eventually_async};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

const DEFAULT_STREAMS: u32 = 2_000;

/// Resident memory of the endpoint that one more stream may cost.
const MAX_KIB_PER_STREAM: u64 = 64;

/// Tokens of each reply, and their rate: long enough for all streams to run at once.
const N_TOKENS: u32 = 60;
const TOKENS_PER_SECOND: f64 = 2.0;

/// Receive buffer of a client that does not read. The rest of its reply fills the endpoint's socket, and then waits.
const SLOW_BUFFER: u32 = 4 << 10;

/// Each stream has four socket ends, two of them in this process.
fn raise_open_files() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let wanted = maximum.map_or(32_768, |maximum| maximum.min(32_768));
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }).unwrap();
}

/// A simulated node in this process.
async fn node(n_slots: u32) -> String {
    let config = SimConfig {
        n_slots,
        decode_tps: TOKENS_PER_SECOND,
        prefill_tps: 1e9,
        max_queued: 4_096,
        ..SimConfig::default()
    };
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).await.unwrap();
    let url = format!("http://{}", listener.tcp_address().unwrap());
    let app = router(Arc::new(SimEngine::new(config)), Role::Both, ClusterKey::new(CLUSTER_KEY));
    tokio::spawn(async move { listener.serve(app, Default::default()).await });
    url
}

async fn ask(stream: &mut TcpStream, more: Value) {
    let mut body = harness::chat("hello", json!({ "model": "sim", "stream": true, "ignore_eos": true }));
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let body = body.to_string();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: ";
    stream.write_all(format!("{head}{}\r\n\r\n{body}", body.len()).as_bytes()).await.unwrap();
}

async fn listening(address: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    ask(&mut stream, json!({ "max_tokens": N_TOKENS })).await;
    stream
}

/// Choices of a reply that nobody reads: many, to fill the sockets quickly.
const N_SLOW_CHOICES: u32 = 4;

/// A client that never reads its large, endless reply.
async fn never_reading(address: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(SLOW_BUFFER).unwrap();
    let mut stream = socket.connect(address.parse().unwrap()).await.unwrap();
    ask(&mut stream, json!({ "max_tokens": 10_000, "n": N_SLOW_CHOICES, "logprobs": true, "top_logprobs": 20 })).await;
    stream
}

async fn n_admitted(server: &BatonServer) -> u64 {
    let state = reqwest::get(format!("{}/baton/state", server.base)).await.unwrap();
    state.json::<Value>().await.unwrap()["requests"]["running"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_stream_is_cut_and_each_costs_little() {
    let _alone = crate::machine().await;
    let n: u32 = std::env::var("BATON_LOAD_STREAMS").ok().map_or(DEFAULT_STREAMS, |n| n.parse().unwrap());
    let n_slow = n / 10;
    raise_open_files();
    let url = node(n + n_slow * N_SLOW_CHOICES).await;
    let server = BatonServer::with(&["--node", &url, "--name", "sim", "--no-calibration"]);
    let address = server.base.trim_start_matches("http://");
    // The first stream warms the process up and is not measured.
    let mut warm = TcpStream::connect(address).await.unwrap();
    ask(&mut warm, json!({ "max_tokens": 2 })).await;
    warm.read_to_string(&mut String::new()).await.unwrap();
    let before = server.resident_kib();
    let started = Instant::now();

    let mut never_read = Vec::new();
    for _ in 0..n_slow {
        never_read.push(never_reading(address).await);
    }
    let mut streams = FuturesUnordered::new();
    for _ in 0..n {
        let mut stream = listening(address).await;
        streams.push(tokio::spawn(async move {
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            text
        }));
    }
    let all = u64::from(n + n_slow);
    eventually_async("all of them at once", || async { n_admitted(&server).await == all }).await;
    let all_after = started.elapsed();

    let mut n_whole = 0;
    let mut most = 0;
    while let Some(text) = streams.next().await {
        most = most.max(if n_whole % 100 == 0 { server.resident_kib() } else { 0 });
        let text = text.unwrap();
        assert!(text.starts_with("HTTP/1.1 200") && text.contains("data: [DONE]"), "{text}");
        assert!(text.contains(r#""finish_reason":"length""#), "{text}");
        n_whole += 1;
    }
    // Each choice is a separate stream from the node, with its own buffers.
    let per_stream = most.saturating_sub(before) / u64::from(n + n_slow * N_SLOW_CHOICES);
    println!(
        "{n} streams and {n_slow} that do not read: all at once after {:.1} s, whole after {:.1} s, {per_stream} KiB each",
        all_after.as_secs_f64(),
        started.elapsed().as_secs_f64(),
    );
    assert_eq!(n_whole, n);
    assert!(per_stream <= MAX_KIB_PER_STREAM, "{per_stream} KiB a stream");
    // A client that reads nothing for 30 s is cut off.
    eventually_async("an end of those that do not read", || async { n_admitted(&server).await == 0 }).await;
    drop(never_read);
}
