//! The states of a node that receives SIGTERM, freezes or returns, and what they mean for requests.

use std::process::Command;
use std::time::Duration;

use harness::{BATON, BatonNode, BatonServer, chat, eventually_async, long_prompt};
use rustix::process::Signal;
use serde_json::{Value, json};

struct Rig {
    nodes: Vec<BatonNode>,
    server: BatonServer,
}

impl Rig {
    fn start() -> Rig {
        let node = || BatonNode::with(&["--engine", "sim", "--sim-prefill-tps", "20000", "--sim-decode-tps", "50"]);
        let nodes = vec![node(), node()];
        let urls = ["--decode", &nodes[0].url, "--decode", &nodes[1].url];
        let server = BatonServer::with(&[&urls[..], &["--policy", "round_robin", "--no-calibration"]].concat());
        Rig { nodes, server }
    }

    async fn get(&self, path: &str) -> String {
        reqwest::get(format!("{}{path}", self.server.base)).await.unwrap().text().await.unwrap()
    }

    /// A decode node in `/baton/state`.
    async fn node(&self, i: usize) -> Value {
        let state: Value = serde_json::from_str(&self.get("/baton/state").await).unwrap();
        let name = json!(format!("decode-{}", i + 1));
        let nodes = state["models"][0]["nodes"].as_array().unwrap().iter();
        nodes.clone().find(|node| node["name"] == name).unwrap().clone()
    }

    async fn is_in(&self, i: usize, life: &str) {
        eventually_async(life, || async { self.node(i).await["life"] == life }).await;
    }

    /// Sends a request. Returns the text and the index of the node that generated it.
    async fn ask(&self, max_tokens: u32) -> (String, usize) {
        let more = json!({ "model": "sim", "max_tokens": max_tokens, "ignore_eos": true });
        let body = chat(&long_prompt("the same for all", 50), more);
        let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", self.server.base)).json(&body);
        let response = call.send().await.unwrap();
        let route = response.headers()["x-baton-route"].to_str().unwrap().to_owned();
        let place = route.split("; ").find_map(|part| part.strip_prefix("decode=decode-")).unwrap();
        let reply: Value = response.json().await.unwrap();
        assert_eq!(reply["usage"]["completion_tokens"], max_tokens, "{reply}");
        let text = reply["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
        (text, place.parse::<usize>().unwrap() - 1)
    }

    /// Checks the counter of a transition for one of these reasons.
    async fn counts(&self, i: usize, [from, to]: [&str; 2], reasons: &[&str], expected: u32) {
        let metrics = self.get("/metrics").await;
        let labels = format!("node=\"decode-{}\",task=\"decode\",from=\"{from}\",to=\"{to}\"", i + 1);
        let is_it = |line: &str, reason: &str| {
            let series = format!("{labels},reason=\"{reason}\"}} {expected}\n");
            line.starts_with("baton_node_state_transitions_total") && line.contains(&series)
        };
        let is_any = |line: &str| reasons.iter().any(|reason| is_it(line, reason));
        assert!(metrics.split_inclusive('\n').any(is_any), "{labels} {reasons:?} in\n{metrics}");
    }

    fn status(&self) -> String {
        String::from_utf8(Command::new(&*BATON).args(["status", &self.server.base]).output().unwrap().stdout).unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_node_gets_nothing_new_and_finishes_what_it_runs() {
    let rig = Rig::start();
    let (undisturbed, _) = rig.ask(150).await;
    let busy = async |i: usize| rig.node(i).await["active_slots"] == 1;
    eventually_async("idle nodes", async || !busy(0).await && !busy(1).await).await;
    // The reply takes three seconds.
    let ((text, on), stopping) = tokio::join!(rig.ask(150), async {
        eventually_async("a stream", async || busy(0).await || busy(1).await).await;
        let stopping = if busy(0).await { 0 } else { 1 };
        rig.nodes[stopping].signal(Signal::TERM);
        rig.is_in(stopping, "draining").await;
        let status = rig.status();
        assert!(status.contains("stopping: the node is stopping"), "{status}");
        let health: Value = serde_json::from_str(&rig.get("/health").await).unwrap();
        assert_eq!(health, json!({ "status": "ok", "nodes": { "ready": 1, "draining": 1 } }));
        for _ in 0..4 {
            assert_eq!(rig.ask(2).await.1, 1 - stopping, "new requests go elsewhere");
        }
        assert_eq!(rig.node(stopping).await["life"], "draining", "it still runs the stream");
        stopping
    });
    assert_eq!((text, on), (undisturbed, stopping), "the stream was finished where it began");
    rig.is_in(stopping, "down").await;
    rig.counts(stopping, ["ready", "draining"], &["told_to_stop"], 1).await;
    rig.counts(stopping, ["draining", "down"], &["stopped"], 1).await;
    let metrics = rig.get("/metrics").await;
    assert!(!metrics.contains("baton_fallbacks_total{"), "nothing went another way than planned\n{metrics}");
    assert!(
        metrics.contains(&format!("node=\"decode-{}\",task=\"decode\",state=\"down\"}} 1.0", stopping + 1)),
        "{metrics}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_node_is_suspect_then_down_and_ready_within_five_seconds_of_its_return() {
    let rig = Rig::start();
    rig.is_in(0, "ready").await;
    rig.nodes[0].signal(Signal::STOP);
    // It is suspect first, as the counters below show, but only for a moment if a call was open when it froze.
    eventually_async("suspicion", async || ["suspect", "down"].map(Value::from).contains(&rig.node(0).await["life"]))
        .await;
    // It gets no request while another node is ready.
    for _ in 0..3 {
        assert_eq!(rig.ask(2).await.1, 1);
    }
    rig.is_in(0, "down").await;
    rig.nodes[0].signal(Signal::CONT);
    let back = std::time::Instant::now();
    rig.is_in(0, "ready").await;
    assert!(back.elapsed() < Duration::from_secs(5), "{:?}", back.elapsed());
    // Either its load stream was silent, or a call at that moment failed.
    rig.counts(0, ["ready", "suspect"], &["silent", "unreachable"], 1).await;
    rig.counts(0, ["down", "ready"], &["answers"], 1).await;
    let mut used = Vec::new();
    for _ in 0..4 {
        used.push(rig.ask(2).await.1);
    }
    assert!(used.contains(&0), "{used:?}");
    // The other node was ready all the time.
    assert_eq!(rig.node(1).await["transitions"].as_array().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn load_on_a_node_from_other_clients_is_noticed() {
    let rig = Rig::start();
    let other_client = tokio::spawn(harness::occupy::occupy(rig.nodes[1].url.clone(), 1));
    eventually_async("the load", || async { rig.node(1).await["active_slots"] == 1 }).await;
    other_client.abort();
    eventually_async("the end of the load", || async { rig.node(1).await["active_slots"] == 0 }).await;
}
