//! A draft node in a process of its own: replies stay the same, whatever happens to it.

use harness::{BatonNode, BatonServer, SseReply, chat, eventually_async};
use rustix::process::Signal;
use serde_json::{Value, json};

/// The value of a counter with these labels.
pub(crate) async fn metric(server: &BatonServer, name: &str, labels: &[&str]) -> u64 {
    let metrics = server.get_text("/metrics").await;
    let of = |line: &&str| line.starts_with(&format!("{name}{{")) && labels.iter().all(|label| line.contains(label));
    metrics.lines().find(of).map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

pub(crate) async fn is_ready(server: &BatonServer) -> bool {
    let state = server.state().await;
    let nodes = state["models"][0]["nodes"].as_array().unwrap();
    nodes.iter().any(|node| node["name"] == "prefill-1" && node["life"] == "ready")
}

fn question(n: usize) -> Value {
    let topics = ["the planets of the solar system", "the months of the year", "the numbers from one to forty"];
    chat(&format!("Name {} in order.", topics[n % topics.len()]), json!({ "max_tokens": 64 }))
}

/// Its reply goes on for a while.
fn long_question() -> Value {
    chat("Tell a long story about a lighthouse.", json!({ "max_tokens": 160 }))
}

async fn ask(server: &BatonServer, body: &Value) -> String {
    let (status, reply) = server.post("/v1/chat/completions", body).await;
    assert_eq!(status, 200, "{reply}");
    reply["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_node_changes_no_text_and_its_loss_is_named() {
    let off = BatonServer::start(&["--speculation", "off", "--no-calibration"]);
    let mut expected = Vec::new();
    for n in 0..3 {
        expected.push(ask(&off, &question(n)).await);
    }
    let long = ask(&off, &long_question()).await;
    drop(off);
    let node = BatonNode::start(&["--role", "draft"]);
    let server = BatonServer::start(&["--prefill", &node.url, "--no-calibration"]);
    eventually_async("the draft node to be seen", || is_ready(&server)).await;
    // Alone, and two at once.
    assert_eq!(ask(&server, &question(0)).await, expected[0]);
    let (one, other) = (question(1), question(2));
    let found = tokio::join!(ask(&server, &one), ask(&server, &other));
    assert_eq!(found, (expected[1].clone(), expected[2].clone()));
    // It follows replies, and nothing is computed for others or handed over by it.
    let followed = SseReply::open(&server, &long_question()).await;
    eventually_async("a sequence at the draft node", || async {
        let state = server.state().await;
        let nodes = state["models"][0]["nodes"].as_array().unwrap();
        nodes.iter().any(|node| node["name"] == "prefill-1" && node["active_slots"].as_u64() > Some(0))
    })
    .await;
    drop(followed);
    let state = server.state().await;
    assert!(state["routes"].as_array().unwrap().iter().all(|route| route["prefill"].is_null()), "{state}");

    // It freezes, goes on, and ends.
    node.signal(Signal::STOP);
    assert_eq!(ask(&server, &question(0)).await, expected[0]);
    node.signal(Signal::CONT);
    eventually_async("the draft node to be back", || is_ready(&server)).await;
    let mut reply = SseReply::open(&server, &long_question()).await;
    reply.read_pieces(8).await;
    node.signal(Signal::KILL);
    assert_eq!(reply.whole().await.content, long);
    let lost = || async { metric(&server, "baton_lost_draft_nodes_total", &["reason=\"lost\""]).await };
    eventually_async("the loss to be counted", || async { lost().await > 0 }).await;
    assert_eq!(ask(&server, &question(1)).await, expected[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_node_of_another_vocabulary_is_named_and_asked_nothing() {
    let node = BatonNode::with(&["--engine", "sim", "--role", "draft"]);
    let server = BatonServer::start(&["--prefill", &node.url, "--no-calibration"]);
    eventually_async("the warning", async || {
        let state = server.state().await.to_string();
        state.contains("prefill-1 drafts nothing") && state.contains("another vocabulary")
    })
    .await;
    assert!(!ask(&server, &question(0)).await.is_empty());
    assert_eq!(metric(&server, "baton_draft_tokens_total", &["drafter=\"remote\""]).await, 0);
}
