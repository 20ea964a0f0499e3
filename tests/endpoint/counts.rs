//! What an endpoint says of its requests is what its engines say of themselves: in a burst, after clients have left, after a
//! node is lost, and at the end.

use std::process::Command;

use harness::occupy::load;
use harness::{BATON, BatonNode, BatonServer, eventually_async};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// Replies of 2,000 tokens last longer than the test.
const SIM: [&str; 6] = ["--engine", "sim", "--slots", "4", "--sim-decode-tps", "20"];

fn body(i: usize, n: u32, more: Value) -> Value {
    let mut body = json!({
        "model": "sim", "n": n, "ignore_eos": true, "messages": [{ "role": "user", "content": format!("number {i}") }],
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A request that stays until it is aborted.
fn long(server: &BatonServer, i: usize, n: u32) -> JoinHandle<()> {
    let body = body(i, n, json!({ "stream": true, "max_tokens": 2_000 }));
    let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body);
    tokio::spawn(async move { drop(call.send().await.unwrap().text().await) })
}

/// The value of a series without labels.
fn series(metrics: &str, name: &str) -> u64 {
    let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name} in {metrics}")).parse::<f64>().unwrap() as u64
}

/// The sum of a counter over its labels.
fn total(metrics: &str, name: &str) -> u64 {
    let of_series = metrics.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once(' '));
    of_series.map(|(_, value)| value.parse::<f64>().unwrap() as u64).sum()
}

/// Waits until so many requests are in the endpoint, so many sequences run, and at most so many wait in nodes, and every
/// count says so: the state, its nodes' cards, the metrics, `baton status` and the engines themselves.
async fn agree(server: &BatonServer, nodes: &[&BatonNode], n_requests: u64, [n_running, max_queued]: [u64; 2]) {
    eventually_async(&format!("{n_requests} requests and {n_running} running sequences"), async || {
        let mut engines = (0, 0);
        for node in nodes {
            let load = load(&node.url).await;
            engines.0 += u64::from(load.active_slots);
            engines.1 += u64::from(load.queued);
        }
        let state = server.state().await;
        let cards = state["models"][0]["nodes"].as_array().unwrap();
        let of_cards = |name: &str| cards.iter().map(|node| node[name].as_u64().unwrap()).sum::<u64>();
        let requests = &state["requests"];
        let [running, slots, waiting] = ["admitted", "slots", "waiting"].map(|name| requests[name].as_u64().unwrap());
        let metrics = server.get_text("/metrics").await;
        let of_metrics =
            ["running", "slots", "waiting"].map(|name| series(&metrics, &format!("baton_requests_{name}")));
        let status = Command::new(&*BATON).args(["status", &server.base]).output().unwrap();
        let status = String::from_utf8(status.stdout).unwrap();
        println!("{engines:?}, {requests}, cards {}", of_cards("active_slots"));
        // Each running request has a slot, and each of the others says since when it has none.
        let rows = state["running"].as_array().unwrap();
        let n_without_slot = rows.iter().filter(|row| row["no_slot_since_ms"].is_number()).count() as u64;
        running + waiting == n_requests
            && running <= slots
            && (rows.len() as u64, n_without_slot) == (n_requests, waiting)
            && engines.0 == n_running
            && engines.1 <= max_queued
            && (slots, of_cards("active_slots"), of_cards("queued")) == (n_running, n_running, engines.1)
            && of_metrics == [running, slots, waiting]
            && status.contains(&format!(" running in {slots} of {} slots, {waiting} waiting", requests["limit"]))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_endpoints_counts_are_its_engines_own_in_a_burst_with_cancellations_and_a_lost_node() {
    let nodes = [(); 3].map(|()| BatonNode::with(&SIM));
    let of_nodes = nodes.iter().flat_map(|node| ["--decode", &node.url]).collect::<Vec<_>>();
    let server = BatonServer::with(&of_nodes);
    let all = nodes.iter().collect::<Vec<_>>();
    agree(&server, &all, 0, [0, 0]).await;

    let mut n_tokens = 0;
    for i in 0..5 {
        let (status, reply) = server.post("/v1/chat/completions", &body(i, 2, json!({ "max_tokens": 3 }))).await;
        assert_eq!(status, 200, "{reply}");
        n_tokens += reply["usage"]["completion_tokens"].as_u64().unwrap();
    }
    let metrics = server.get_text("/metrics").await;
    assert_eq!((n_tokens, total(&metrics, "baton_generation_tokens_total")), (30, 30), "{metrics}");

    // 32 sequences for 12 slots.
    let mut burst: Vec<_> = (0..24).map(|i| long(&server, i, if i % 6 == 0 { 3 } else { 1 })).collect();
    agree(&server, &all, 24, [12, 0]).await;
    // The first ones run, and most of the last ones wait.
    let gone = burst.split_off(17).into_iter().chain(burst.drain(..4)).collect::<Vec<_>>();
    gone.iter().for_each(JoinHandle::abort);
    agree(&server, &all, 13, [12, 0]).await;
    // The four streams that ran there move to the others one after another, and wait in these nodes' queues.
    nodes[2].signal(Signal::KILL);
    agree(&server, &all[..2], 13, [8, 4]).await;
    burst.iter().for_each(JoinHandle::abort);
    agree(&server, &all[..2], 0, [0, 0]).await;

    let metrics = server.get_text("/metrics").await;
    assert_eq!(total(&metrics, "baton_requests_total"), 5 + 24, "{metrics}");
    let cancelled = r#"baton_requests_total{model="sim",outcome="cancelled"} 24"#;
    assert!(metrics.lines().any(|line| line == cancelled), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_endpoints_of_one_node_count_what_waits_in_its_queue_as_waiting() {
    let node = BatonNode::with(&["--engine", "sim", "--slots", "2", "--sim-decode-tps", "20"]);
    let servers = [(); 2].map(|()| BatonServer::with(&["--decode", &node.url]));
    let _requests: Vec<_> = (0..6).map(|i| long(&servers[i % 2], i, 1)).collect();
    eventually_async("two of six requests run", async || {
        let mut sums = [0; 3];
        for server in &servers {
            let state = server.state().await;
            let rows = state["running"].as_array().unwrap();
            let n_without_slot = rows.iter().filter(|row| row["no_slot_since_ms"].is_number()).count() as u64;
            let counts = ["admitted", "slots", "waiting"].map(|name| state["requests"][name].as_u64().unwrap());
            println!("{counts:?}, {n_without_slot} rows without a slot");
            if n_without_slot != counts[2] {
                return false;
            }
            sums = std::array::from_fn(|i| sums[i] + counts[i]);
        }
        sums == [2, 2, 4]
    })
    .await;
}
