//! One connection carries all streams of a node: what clients notice of it, and updates of a cluster machine by machine.

use std::process::Command;
use std::sync::Arc;

use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::node::{ClusterKey, Listener, router_speaking};
use baton_schemas::node::Role;
use baton_schemas::stream_versions::StreamVersions;
use futures::future::join_all;
use harness::{BATON, BatonNode, BatonServer, CLUSTER_KEY, SseReply, chat, eventually_async, free_address};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const ENGINE: [&str; 8] = ["--engine", "sim", "--sim-prefill-tps", "20000", "--sim-decode-tps", "50", "--slots", "32"];

/// The same simulator as a `baton node` with [`ENGINE`].
fn sim() -> SimEngine {
    SimEngine::new(SimConfig { prefill_tps: 20_000.0, decode_tps: 50.0, n_slots: 32, ..SimConfig::default() })
}

/// A node of another version, in this process. Dropping the guard stops it.
async fn node_speaking(versions: StreamVersions, address: &str) -> tokio_util::sync::DropGuard {
    let listener = loop {
        // The node before may still be ending.
        match Listener::bind(&address.parse().unwrap()).await {
            Ok(listener) => break listener,
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(50)).await,
        }
    };
    let stop = CancellationToken::new();
    let router = router_speaking(versions, Arc::new(sim()), Role::Both, ClusterKey::new(CLUSTER_KEY), stop.clone());
    tokio::spawn(listener.serve(router, stop.clone()));
    stop.drop_guard()
}

fn node_at(address: &str) -> BatonNode {
    BatonNode::with(&[&ENGINE[..], &["--listen", address]].concat())
}

fn serve(addresses: &[String]) -> BatonServer {
    let urls: Vec<String> = addresses.iter().map(|address| format!("http://{address}")).collect();
    let decode: Vec<&str> = urls.iter().flat_map(|url| ["--decode", url]).collect();
    BatonServer::with(&[&decode[..], &["--policy", "round_robin", "--no-calibration"]].concat())
}

fn request(i: usize, max_tokens: u32) -> Value {
    chat(&format!("stream {i}"), json!({ "model": "sim", "max_tokens": max_tokens, "ignore_eos": true }))
}

async fn whole(server: &BatonServer, i: usize, max_tokens: u32) -> String {
    let (status, reply) = server.post("/v1/chat/completions", &request(i, max_tokens)).await;
    assert_eq!(status, 200, "{reply}");
    reply["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

/// A decode node in `/baton/state`.
async fn node(server: &BatonServer, i: usize) -> Value {
    let state = server.state().await;
    let name = json!(format!("decode-{}", i + 1));
    state["models"][0]["nodes"].as_array().unwrap().iter().find(|node| node["name"] == name).unwrap().clone()
}

async fn is_in(server: &BatonServer, i: usize, life: &str) {
    eventually_async(life, || async { node(server, i).await["life"] == life }).await;
}

/// Opens streams and reads some of each.
async fn running(server: &BatonServer, n: usize, max_tokens: u32) -> Vec<SseReply> {
    join_all((0..n).map(async |i| {
        let mut stream = SseReply::open(server, &request(i, max_tokens)).await;
        stream.read_pieces(5).await;
        stream
    }))
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_another_version_is_not_used_and_both_are_named_until_one_is_updated() {
    let addresses = [free_address(), free_address()];
    let _node = node_at(&addresses[0]);
    let newer = node_speaking(StreamVersions { oldest: 2, newest: 3 }, &addresses[1]).await;
    let server = serve(&addresses);
    is_in(&server, 1, "down").await;
    let names_both = |text: &str| {
        let named =
            text.contains("versions 2 to 3") && text.contains("version 1") && text.contains("update the endpoint");
        assert!(named, "{text}");
    };
    names_both(&node(&server, 1).await.to_string());
    let status = Command::new(&*BATON).args(["status", &server.base]).output().unwrap();
    names_both(&String::from_utf8(status.stdout).unwrap());
    let metrics = server.get_text("/metrics").await;
    assert!(metrics.contains("to=\"down\",reason=\"version_mismatch\"} 1"), "{metrics}");
    // The other node serves.
    whole(&server, 1, 4).await;
    drop(newer);
    let _updated = node_speaking(StreamVersions { oldest: 1, newest: 2 }, &addresses[1]).await;
    is_in(&server, 1, "ready").await;
    for i in 0..4 {
        whole(&server, i, 4).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_machine_by_machine_loses_no_stream() {
    const N: usize = 16;
    const N_TOKENS: u32 = 400;
    let addresses = [free_address(), free_address()];
    let mut nodes = [node_at(&addresses[0]), node_at(&addresses[1])];
    let server = serve(&addresses);
    is_in(&server, 0, "ready").await;
    is_in(&server, 1, "ready").await;
    let undisturbed = join_all((0..N).map(|i| whole(&server, i, N_TOKENS))).await;
    let streams = running(&server, N, N_TOKENS).await;
    let update = async {
        let mut updated = Vec::new();
        for (i, node) in nodes.iter_mut().enumerate() {
            // The first one finishes its streams, the second one is killed.
            node.signal([Signal::TERM, Signal::KILL][i]);
            updated.push(node_speaking(StreamVersions { oldest: 1, newest: 2 }, &addresses[i]).await);
            is_in(&server, i, "ready").await;
        }
        updated
    };
    let (_updated, replies) = tokio::join!(update, join_all(streams.into_iter().map(|stream| stream.whole())));
    for (reply, undisturbed) in replies.iter().zip(&undisturbed) {
        assert_eq!(&reply.content, undisturbed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_delays_no_other_and_one_that_leaves_frees_its_slot() {
    let node_of = BatonNode::with(&[
        "--engine",
        "sim",
        "--sim-prefill-tps",
        "1000000",
        "--sim-decode-tps",
        "100000",
        "--slots",
        "8",
    ]);
    let server = BatonServer::with(&["--decode", &node_of.url, "--no-calibration"]);
    let endless = json!({ "model": "sim", "max_tokens": 16_000, "ignore_eos": true, "stream": true });
    let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base));
    let mut unread = call.json(&chat("unread", endless)).send().await.unwrap();
    unread.chunk().await.unwrap().unwrap();
    for i in 0..4 {
        whole(&server, i, 2_000).await;
    }
    // The node may still report a stream that has just ended.
    eventually_async("the unread stream alone", async || node(&server, 0).await["active_slots"] == 1).await;
    drop(unread);
    eventually_async("a free slot", || async { node(&server, 0).await["active_slots"] == 0 }).await;
}
