//! What an endpoint says of its requests is what its engines say of themselves: in a burst, after clients have left, after a
//! node is lost, and at the end.

use std::process::Command;
use std::time::Duration;

use harness::mock::{Mock, Step};
use harness::occupy::{load, occupy};
use harness::{BATON, BatonNode, BatonServer, ReloadableServer, eventually_async, upstream};
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

/// What the endpoint says of its requests: those that are served, their slots, and those that wait.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Counts {
    running: u64,
    slots: u64,
    waiting: u64,
}

/// The counts, if the header, the rows, the metrics and `baton status` agree on them.
async fn counts(server: &BatonServer) -> Option<Counts> {
    let state = server.state().await;
    let requests = &state["requests"];
    let [running, slots, waiting] = ["running", "slots", "waiting"].map(|name| requests[name].as_u64().unwrap());
    let metrics = server.get_text("/metrics").await;
    let of_metrics = ["running", "slots", "waiting"].map(|name| series(&metrics, &format!("baton_requests_{name}")));
    let status = Command::new(&*BATON).args(["status", &server.base]).output().unwrap();
    let status = String::from_utf8(status.stdout).unwrap();
    let rows = state["open"].as_array().unwrap();
    // Each row says since when its request waits, or is served.
    let of_rows =
        ["running_since_ms", "waiting_since_ms"].map(|since| rows.iter().filter(|row| row[since].is_number()).count());
    let do_agree = of_metrics == [running, slots, waiting]
        && of_rows.map(|n| n as u64) == [running, waiting]
        && status.contains(&format!(" running in {slots} of {} slots, {waiting} waiting", requests["limit"]));
    do_agree.then_some(Counts { running, slots, waiting })
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
        let Some(counts) = counts(server).await else { return false };
        println!("{engines:?}, {counts:?}, cards {}", of_cards("active_slots"));
        let Counts { running, slots, waiting } = counts;
        running + waiting == n_requests
            && running <= slots
            && engines.0 == n_running
            && engines.1 <= max_queued
            && (slots, of_cards("active_slots"), of_cards("queued")) == (n_running, n_running, engines.1)
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
            let Some(Counts { running, slots, waiting }) = counts(server).await else { return false };
            sums = [sums[0] + running, sums[1] + slots, sums[2] + waiting];
        }
        sums == [2, 2, 4]
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstreams_requests_are_served_once_it_is_asked() {
    let mock = Mock::start(|_, _| vec![Step::Wait(Duration::from_secs(300))]).await;
    let front = ReloadableServer::start(&upstream("one", "openai", &mock.url, "max_concurrent = 1"));
    let request = json!({ "model": "m", "messages": [{ "role": "user", "content": "hello" }] });
    let call =
        || reqwest::Client::new().post(format!("{}/v1/chat/completions", front.server.base)).json(&request).send();
    let requests = [call(), call()].map(|call| tokio::spawn(async move { drop(call.await) }));
    let is = async |expected: Counts| counts(&front.server).await == Some(expected);
    eventually_async("one asked", async || is(Counts { running: 1, slots: 1, waiting: 1 }).await).await;
    requests.iter().for_each(JoinHandle::abort);
    eventually_async("none", async || is(Counts { running: 0, slots: 0, waiting: 0 }).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_for_vectors_run_one_after_another_and_wait_in_their_nodes_queue() {
    let node = BatonNode::with(&["--engine", "sim", "--slots", "4", "--sim-prefill-tps", "1"]);
    let server = BatonServer::with(&["--decode", &node.url]);
    let mut requests = Vec::new();
    for n in 1..=3 {
        let call = reqwest::Client::new()
            .post(format!("{}/v1/embeddings", server.base))
            .json(&json!({ "model": "sim", "input": "word ".repeat(400) }));
        requests.push(tokio::spawn(async move { drop(call.send().await) }));
        eventually_async("one text is computed", async || {
            counts(&server).await == Some(Counts { running: 1, slots: 1, waiting: n - 1 })
        })
        .await;
    }
    requests.iter().for_each(JoinHandle::abort);
    eventually_async("none", async || counts(&server).await == Some(Counts { running: 0, slots: 0, waiting: 0 })).await;
}

/// Waits until the endpoint serves so many requests and so many wait, as its prefill and decode node say: of the latter, one
/// is computed at most, and the others wait in the prefill node's queue with a slot of the decode node.
async fn agree_in_pair(server: &BatonServer, [prefill, decode]: [&BatonNode; 2], [running, waiting]: [u64; 2]) {
    eventually_async(&format!("{running} served requests and {waiting} in the prefill node's queue"), async || {
        let (queued, active) = (load(&prefill.url).await.queued, load(&decode.url).await.active_slots);
        let found = counts(server).await;
        println!("queued {queued}, active {active}, {found:?}");
        (u64::from(queued), u64::from(active)) == (waiting, running + waiting)
            && found == Some(Counts { running, slots: running + waiting, waiting })
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_in_the_queue_of_the_node_that_computes_its_prompt_counts_as_waiting() {
    let slow = ["--engine", "sim", "--role", "prefill", "--slots", "1", "--sim-prefill-tps", "100"];
    let pair = [BatonNode::with(&slow), BatonNode::with(&SIM)];
    let [prefill, decode] = [&pair[0], &pair[1]];
    let policy = ["--policy", "always_handoff", "--no-calibration"];
    let server = BatonServer::with(&[&["--decode", &decode.url, "--prefill", &prefill.url], &policy[..]].concat());
    // Another client's prompt has the only slot until that client leaves.
    let other = tokio::spawn(occupy(prefill.url.clone(), 1));
    eventually_async("a taken slot", async || load(&prefill.url).await.active_slots == 1).await;
    let mut requests = Vec::new();
    for n_words in [900, 900, 2] {
        let text = "word ".repeat(n_words) + &requests.len().to_string();
        let more = json!({ "stream": true, "max_tokens": 2_000, "messages": [{ "role": "user", "content": text }] });
        let body = body(0, 1, more);
        let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body);
        requests.push(tokio::spawn(async move { drop(call.send().await.unwrap().text().await) }));
        agree_in_pair(&server, [prefill, decode], [0, requests.len() as u64]).await;
    }
    other.abort();
    agree_in_pair(&server, [prefill, decode], [1, 2]).await;
    requests[0].abort();
    agree_in_pair(&server, [prefill, decode], [1, 1]).await;
    requests[1].abort();
    // The last prompt is short: it is computed soon, and its reply lasts.
    agree_in_pair(&server, [prefill, decode], [1, 0]).await;
    eventually_async("an idle prefill node", async || load(&prefill.url).await.active_slots == 0).await;
    agree_in_pair(&server, [prefill, decode], [1, 0]).await;
    requests[2].abort();
    agree_in_pair(&server, [prefill, decode], [0, 0]).await;
}

/// A handoff that is planned, not sent.
#[derive(Debug)]
struct PlannedHandoff {
    /// Tokens of its prompt that the prefill node would compute.
    n_own: u64,
    /// Tokens of other prompts that it is predicted to wait for there.
    n_ahead: u64,
}

/// The handoff of a request; `None` while nothing is predicted.
async fn planned(server: &BatonServer, body: &Value) -> Option<PlannedHandoff> {
    let call = reqwest::Client::new().post(format!("{}/baton/plan", server.base)).json(body);
    let plan: Value = call.send().await.unwrap().json().await.unwrap();
    let route = plan["routes"].as_array()?.iter().find(|route| route["prefill"].is_string())?;
    let time = |part: &str| route["prediction"][part].as_f64();
    let n_own = plan["n_prompt"].as_u64()? - 1 - route["cached_on_prefill"].as_u64()?;
    // At one rate, times are to each other as the tokens.
    let n_ahead = (time("queue_ms")? / time("prefill_ms")? * n_own as f64).round() as u64;
    Some(PlannedHandoff { n_own, n_ahead })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handoff_behind_three_others_is_predicted_to_wait_for_their_prompts() {
    let slow = ["--engine", "sim", "--role", "prefill", "--slots", "1", "--sim-prefill-tps", "100"];
    let [prefill, decode] = [BatonNode::with(&slow), BatonNode::with(&SIM)];
    let pair = ["--decode", &decode.url, "--prefill", &prefill.url, "--policy", "always_handoff"];
    let server = BatonServer::with(&pair);
    let request = |i: usize| {
        let text = format!("{i} {}", "word ".repeat(400));
        let messages = json!([{ "role": "user", "content": text }]);
        body(i, 1, json!({ "stream": true, "max_tokens": 2_000, "messages": messages }))
    };
    eventually_async("a prediction", async || planned(&server, &request(3)).await.is_some()).await;
    let other = tokio::spawn(occupy(prefill.url.clone(), 1));
    eventually_async("a taken slot", async || load(&prefill.url).await.active_slots == 1).await;
    let mut requests = Vec::new();
    for i in 0..3 {
        let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&request(i));
        requests.push(tokio::spawn(async move { drop(call.send().await.unwrap().text().await) }));
        eventually_async("a handoff in the queue", async || load(&prefill.url).await.queued as usize == i + 1).await;
    }
    // The prompts are of one length. The node says how many tokens it has not computed of all that it has accepted.
    let agree = async |max_prompts: Option<u64>, n_waiting: u64| {
        eventually_async(&format!("{n_waiting} prompts in the queue and their tokens in the prediction"), async || {
            let before = load(&prefill.url).await;
            let Some(PlannedHandoff { n_own, n_ahead }) = planned(&server, &request(3)).await else { return false };
            let after = load(&prefill.url).await;
            println!("{before:?}, {n_own} tokens behind {n_ahead}");
            let is_queue = u64::from(after.queued) == n_waiting && n_ahead >= n_waiting * n_own;
            is_queue
                && before.prefill_backlog == after.prefill_backlog
                && n_ahead == u64::from(after.prefill_backlog)
                && max_prompts.is_none_or(|max| n_ahead <= max * n_own)
        })
        .await;
    };
    // Behind another client's prompt, and without it: then the first of the three is computed.
    agree(None, 3).await;
    other.abort();
    agree(Some(3), 2).await;
}
