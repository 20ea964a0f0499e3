//! Each fallback has a reason that `/metrics` counts and `baton status` shows, and the client gets the same reply as
//! without it.

use std::process::Command;

use harness::occupy::{fill, load};
use harness::relay::{FaultyRelay, LinkFault};
use harness::{BATON, BatonNode, BatonServer, chat, eventually_async, long_prompt};
use rustix::process::Signal;
use serde_json::{Value, json};

/// An endpoint with a simulated engine of its own, and a simulated prefill node at the end of a relay.
struct Rig {
    server: BatonServer,
    relay: FaultyRelay,
    node: BatonNode,
}

impl Rig {
    async fn start(node_args: &[&str]) -> Rig {
        let speed = ["--engine", "sim", "--role", "prefill", "--sim-prefill-tps", "1000"];
        let node = BatonNode::with(&[&speed[..], node_args].concat());
        let relay = FaultyRelay::start(&node.url).await;
        let own = ["--engine", "sim", "--sim-decode-tps", "1000", "--policy", "always_handoff", "--no-calibration"];
        let server = BatonServer::with(&[&own[..], &["--prefill", &relay.url]].concat());
        Rig { server, relay, node }
    }

    /// Waits until the first KV of a handoff is on the link.
    async fn carries_kv(&self) {
        eventually_async("KV on the link", async || self.relay.has_carried_kv()).await;
    }

    /// Sends a request while something happens, and checks that the reply is the undisturbed one and that the reason is
    /// shown.
    async fn check(&self, reason: &str, happens: impl Future<Output = ()>) {
        let body = chat(&long_prompt(reason, 200), json!({ "model": "sim", "max_tokens": 24, "ignore_eos": true }));
        let (reply, ()) = tokio::join!(post(&self.server, &body), happens);
        assert_eq!(reply["timings"]["handoff"]["failure"], reason, "{reply}");
        let undisturbed = BatonServer::with(&["--engine", "sim", "--sim-decode-tps", "1000"]);
        let expected = post(&undisturbed, &body).await;
        assert_eq!(reply["choices"], expected["choices"]);
        shows(&self.server, reason).await;
    }
}

async fn post(server: &BatonServer, body: &Value) -> Value {
    let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(body);
    let response = call.send().await.unwrap();
    assert_eq!(response.status(), 200);
    response.json().await.unwrap()
}

async fn is_busy(node: &BatonNode) {
    eventually_async("a busy node", async || load(&node.url).await.active_slots > 0).await;
}

/// Checks that the reason is counted and that an operator can see it.
async fn shows(server: &BatonServer, reason: &str) {
    let metrics = reqwest::get(format!("{}/metrics", server.base)).await.unwrap().text().await.unwrap();
    let series = format!("baton_fallbacks_total{{model=\"sim\",reason=\"{reason}\"}} 1\n");
    assert!(metrics.contains(&series), "{metrics}");
    let status = Command::new(&*BATON).args(["status", &server.base]).output().unwrap();
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.lines().any(|line| line.trim_start().starts_with(reason)), "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_down() {
    let rig = Rig::start(&[]).await;
    rig.relay.lead_to("http://127.0.0.1:1");
    rig.check("prefill_down", async {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_busy() {
    let rig = Rig::start(&["--slots", "1", "--max-queued", "1"]).await;
    let _crowd = fill(&rig.node.url).await;
    rig.check("prefill_busy", async {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_stalled() {
    let rig = Rig::start(&[]).await;
    let freeze = async {
        rig.carries_kv().await;
        rig.node.signal(Signal::STOP);
    };
    rig.check("prefill_stalled", freeze).await;
    rig.node.signal(Signal::CONT);
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_lost() {
    let rig = Rig::start(&[]).await;
    let kill = async {
        rig.carries_kv().await;
        rig.node.signal(Signal::KILL);
    };
    rig.check("prefill_lost", kill).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_refused() {
    let rig = Rig::start(&[]).await;
    let other = BatonNode::with(&["--engine", "sim", "--role", "decode"]);
    rig.relay.lead_to(&other.url);
    rig.check("prefill_refused", async {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn key_refused() {
    let rig = Rig::start(&[]).await;
    let other = BatonNode::with_key("another cluster key", &["--engine", "sim", "--role", "prefill"]);
    rig.relay.lead_to(&other.url);
    rig.check("key_refused", async {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_node_with_another_key_is_called_that_and_not_down() {
    let other = BatonNode::with_key("another cluster key", &["--engine", "sim", "--role", "prefill"]);
    let server = BatonServer::with(&["--engine", "sim", "--policy", "always_handoff", "--prefill", &other.url]);
    let body = chat("hello", json!({ "model": "sim", "max_tokens": 2 }));
    eventually_async("the reason", || async {
        let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body);
        call.send().await.unwrap().headers()["x-baton-route"].to_str().unwrap().contains("reason=key_refused")
    })
    .await;
    let state: Value = reqwest::get(format!("{}/baton/state", server.base)).await.unwrap().json().await.unwrap();
    let nodes = state["models"][0]["nodes"].as_array().unwrap();
    let node = nodes.iter().find(|node| node["task"] == "prefill").unwrap();
    assert_eq!((&node["life"], &node["transitions"][0]["reason"]), (&json!("down"), &json!("key_refused")), "{node}");
    let status = Command::new(&*BATON).args(["status", &server.base]).output().unwrap();
    assert!(String::from_utf8(status.stdout).unwrap().contains("not used: it has another cluster key"));
}

#[tokio::test(flavor = "multi_thread")]
async fn frame_rejected() {
    let rig = Rig::start(&[]).await;
    rig.relay.set(LinkFault::Flip);
    rig.check("frame_rejected", async {}).await;
    assert!(rig.relay.n_touched() > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn fingerprint_mismatch() {
    // The same vocabulary and shape, other weights. The endpoint knows the node's old description, so that the decode node's own
    // check finds it.
    let rig = Rig::start(&[]).await;
    let other = BatonNode::with(&["--engine", "sim", "--role", "prefill", "--name", "other weights"]);
    rig.relay.lead_to(&other.url);
    rig.check("fingerprint_mismatch", async {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_other_weights_is_handed_nothing_unless_the_operator_lets_its_kv_be_compared() {
    let node = BatonNode::with(&["--engine", "sim", "--role", "prefill", "--name", "other weights"]);
    let route = async |more: &[&str]| {
        let own = ["--engine", "sim", "--policy", "always_handoff", "--prefill", &node.url];
        let server = BatonServer::with(&[&own[..], more].concat());
        eventually_async("the node's answer", || async {
            let state: Value =
                reqwest::get(format!("{}/baton/state", server.base)).await.unwrap().json().await.unwrap();
            state["models"][0]["links"][0]["same_weights"] == false
        })
        .await;
        let body = chat(&long_prompt("weights", 200), json!({ "model": "sim", "max_tokens": 2 }));
        let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body);
        let reply = call.send().await.unwrap();
        (reply.headers()["x-baton-route"].to_str().unwrap().to_owned(), server)
    };
    // Calibration does not try the pair, either.
    let (words, server) = route(&[]).await;
    assert!(words.starts_with("direct; ") && words.contains("reason=other_weights"), "{words}");
    let state: Value = reqwest::get(format!("{}/baton/state", server.base)).await.unwrap().json().await.unwrap();
    let model = &state["models"][0];
    assert_eq!(model["links"][0]["unused_reason"], "other_weights", "{state}");
    assert_eq!((&model["links"][0]["breaker"]["failures"], &model["fallbacks"]), (&json!({}), &json!({})), "{state}");
    let status = Command::new(&*BATON).args(["status", &server.base]).output().unwrap();
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("not used: it runs other weights of the model"), "{status}");
    assert!(status.contains("--max-canary-distance"), "the warning says what to do: {status}");
    let (words, _server) = route(&["--max-canary-distance", "1", "--no-calibration"]).await;
    assert!(words.starts_with("handoff; "), "{words}");
}

#[tokio::test(flavor = "multi_thread")]
async fn decode_busy_and_decode_lost() {
    let node = |args: &[&str]| BatonNode::with(&[&["--engine", "sim", "--sim-decode-tps", "100"], args].concat());
    let nodes = [node(&["--slots", "1", "--max-queued", "1"]), node(&[])];
    let decode = ["--decode", &nodes[0].url, "--decode", &nodes[1].url];
    let server = BatonServer::with(&[&decode[..], &["--policy", "round_robin", "--no-calibration"]].concat());
    let body = |tag| chat(tag, json!({ "model": "sim", "max_tokens": 100, "ignore_eos": true }));
    let crowd = fill(&nodes[0].url).await;
    // The full node is first in turn.
    post(&server, &body("one")).await;
    shows(&server, "decode_busy").await;
    drop(crowd);
    let kill = async {
        is_busy(&nodes[1]).await;
        nodes[1].signal(Signal::KILL);
    };
    let three = body("three");
    let four = body("four");
    let (one, two, ()) = tokio::join!(post(&server, &three), post(&server, &four), kill);
    for reply in [one, two] {
        assert_eq!(reply["usage"]["completion_tokens"], 100, "{reply}");
    }
    shows(&server, "decode_lost").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_node_that_was_frozen_under_load_is_chosen_again() {
    let node = BatonNode::with(&["--engine", "sim", "--role", "prefill", "--sim-prefill-tps", "6000"]);
    let server = BatonServer::with(&["--engine", "sim", "--sim-prefill-tps", "2000", "--prefill", &node.url]);
    let body = |tag: &str| chat(&long_prompt(tag, 300), json!({ "model": "sim", "max_tokens": 2 }));
    // A new prompt each time, because a cached one is not handed over.
    let is_handed_over = async || {
        let body = body(&rand::random::<u32>().to_string());
        let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body);
        call.send().await.unwrap().headers()["x-baton-route"].to_str().unwrap().starts_with("handoff")
    };
    eventually_async("calibration", &is_handed_over).await;
    let freeze = async {
        is_busy(&node).await;
        node.signal(Signal::STOP);
    };
    let bodies = ["one", "two", "three", "four"].map(body);
    let (replies, ()) = tokio::join!(futures::future::join_all(bodies.iter().map(|body| post(&server, body))), freeze);
    assert!(replies.iter().any(|reply| reply["timings"]["handoff"]["failure"] == "prefill_stalled"), "{replies:?}");
    node.signal(Signal::CONT);
    // The five seconds of the fault must not count as the node's rate.
    eventually_async("the node to be chosen again", &is_handed_over).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn not_worth_it() {
    let node = BatonNode::with(&["--engine", "sim", "--role", "prefill", "--sim-prefill-tps", "1000"]);
    let server = BatonServer::with(&["--engine", "sim", "--sim-prefill-tps", "9000", "--prefill", &node.url]);
    let body = chat("short", json!({ "model": "sim", "max_tokens": 2 }));
    // The reason differs until calibration has measured the link.
    eventually_async("a reason", || async {
        let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body);
        call.send().await.unwrap().headers()["x-baton-route"].to_str().unwrap().contains("reason=not_worth_it")
    })
    .await;
    let metrics = reqwest::get(format!("{}/metrics", server.base)).await.unwrap().text().await.unwrap();
    let is_counted = |line: &str| line.starts_with("baton_route_decisions_total") && line.contains("not_worth_it");
    assert!(metrics.lines().any(is_counted), "{metrics}");
    let status = Command::new(&*BATON).args(["status", &server.base]).output().unwrap();
    assert!(String::from_utf8(status.stdout).unwrap().contains("not faster"));
}
