//! No more memory: for an engine, and for the endpoint.

use std::time::Duration;

use futures::future::join_all;
use harness::{BatonServer, SseReply, chat, eventually_async};
use rustix::process::Resource;
use serde_json::json;

use super::{SIM, limit, pid, request, status};

const MIB: u64 = 1 << 20;

/// What an endpoint needs beside what it has, for the worst that its clients can send.
const FOR_REQUESTS: u64 = 1_024 * MIB;

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_gets_no_memory_is_replaced_and_its_streams_go_on() {
    let server = BatonServer::with(&SIM);
    let undisturbed = server.post("/v1/chat/completions", &request("a story", 200)).await.1;
    let mut stream = SseReply::open(&server, &request("a story", 200)).await;
    stream.read_pieces(10).await;
    let engine = server.engine();
    limit(engine, Resource::As, 1);
    let long = chat(&"word ".repeat(100_000), json!({ "model": "sim", "max_tokens": 1 }));
    let client = reqwest::Client::new();
    let url = format!("{}/v1/chat/completions", server.base);
    eventually_async("the end of the engine", async || {
        let replies =
            join_all((0..4).map(|_| client.post(&url).json(&long).timeout(Duration::from_secs(50)).send())).await;
        for reply in replies.into_iter().flatten() {
            let status = reply.status().as_u16();
            assert!(status == 200 || reply.text().await.unwrap().contains("error"), "{status}");
        }
        !server.children().contains(&engine)
    })
    .await;
    let whole = stream.whole().await;
    assert_eq!(whole.content, undisturbed["choices"][0]["message"]["content"].as_str().unwrap());
    assert_eq!(status(&client, &server, "sim").await, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_with_a_limit_of_memory_refuses_what_it_cannot_hold_and_goes_on() {
    let server = BatonServer::with(&SIM);
    let client = reqwest::Client::new();
    assert_eq!(status(&client, &server, "sim").await, 200);
    let held = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let data = held.lines().find_map(|line| line.strip_prefix("VmData:")?.trim().strip_suffix(" kB")).unwrap();
    limit(pid(&server), Resource::Data, data.parse::<u64>().unwrap() * 1024 + FOR_REQUESTS);
    let long = chat(&"x".repeat(8 * MIB as usize), json!({ "model": "sim", "max_tokens": 1 })).to_string();
    let url = format!("{}/v1/chat/completions", server.base);
    let statuses = join_all((0..64).map(async |_| {
        let reply = client.post(&url).body(long.clone()).send().await.unwrap();
        let status = reply.status().as_u16();
        assert!(reply.text().await.unwrap().contains("error"), "{status}");
        status
    }));
    let statuses = statuses.await;
    assert!(statuses.iter().all(|status| [400, 413, 503].contains(status)), "{statuses:?}");
    assert_eq!(status(&client, &server, "sim").await, 200, "the process lives");
}
