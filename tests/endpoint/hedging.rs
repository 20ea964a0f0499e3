//! With `hedge = true` a request whose first token is late is started a second time, on another node.

use std::io::Write;

use baton_schemas::node::NodeLoad;
use harness::relay::{FaultyRelay, LinkFault};
use harness::{BatonNode, BatonServer, CLUSTER_KEY, chat, eventually_async, long_prompt};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Tokens of a reply, which take four seconds.
const N_TOKENS: u32 = 200;

/// Two decode nodes, each at the end of a relay, that take a second for a prompt.
struct Rig {
    nodes: [BatonNode; 2],
    relays: [FaultyRelay; 2],
    server: BatonServer,
    _config: tempfile::NamedTempFile,
}

impl Rig {
    async fn start() -> Rig {
        let node = || BatonNode::with(&["--engine", "sim", "--sim-prefill-tps", "1500", "--sim-decode-tps", "50"]);
        let nodes = [node(), node()];
        let relays = [FaultyRelay::start(&nodes[0].url).await, FaultyRelay::start(&nodes[1].url).await];
        let mut config = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
        config.write_all(b"[deadlines]\nfloor_ms = 200\nfactor = 1.3\nhedge = true\n").unwrap();
        let args = ["--config", config.path().to_str().unwrap(), "--no-calibration"];
        let server =
            BatonServer::with(&[&args[..], &["--decode", &relays[0].url, "--decode", &relays[1].url]].concat());
        let rig = Rig { nodes, relays, server, _config: config };
        // Only a predicted first token can be late, so both nodes must have been measured.
        eventually_async("predictions of both routes", async || rig.predicts().await).await;
        rig
    }

    /// Returns true if both routes of a request have a prediction.
    async fn predicts(&self) -> bool {
        let body = chat("a prompt", json!({ "model": "sim", "max_tokens": N_TOKENS }));
        let call = reqwest::Client::new().post(format!("{}/baton/plan", self.server.base)).json(&body);
        let plan: Value = call.send().await.unwrap().json().await.unwrap();
        let routes = plan["routes"].as_array().map_or(&[][..], Vec::as_slice);
        routes.len() == 2 && routes.iter().all(|route| route["prediction"].is_object())
    }

    /// A node's own report of its load, not through its link.
    async fn load(&self, i: usize) -> NodeLoad {
        let call = reqwest::Client::new().get(format!("{}/node/v1/load", self.nodes[i].url)).bearer_auth(CLUSTER_KEY);
        call.send().await.unwrap().json().await.unwrap()
    }

    async fn is_busy(&self, i: usize) -> bool {
        self.load(i).await.active_slots == 1
    }

    /// The counter of a fallback reason.
    async fn count(&self, reason: &str) -> u32 {
        let metrics = reqwest::get(format!("{}/metrics", self.server.base)).await.unwrap().text().await.unwrap();
        let series = format!("baton_fallbacks_total{{model=\"sim\",reason=\"{reason}\"}} ");
        metrics.lines().find_map(|line| line.strip_prefix(&series)).map_or(0, |n| n.parse().unwrap())
    }

    /// Sends a request, disturbs its node before the first token, and checks that the undisturbed reply comes from the
    /// other node, once.
    async fn check(&self, tag: &str, happens: impl Fn(usize), ends: impl Fn(usize)) {
        let body = chat(
            &long_prompt(tag, 250),
            json!({ "model": "sim", "max_tokens": N_TOKENS, "ignore_eos": true, "stream": true }),
        );
        let (reply, ()) = tokio::join!(stream(&self.server, &body), async {
            eventually_async("a node with the request", async || self.is_busy(0).await || self.is_busy(1).await).await;
            let late = if self.is_busy(0).await { 0 } else { 1 };
            happens(late);
            eventually_async("the second route's token", async || self.count("hedge_won").await == 1).await;
            ends(late);
            // This is long before the loser would have finished.
            eventually_async("the loser to be cancelled", async || {
                !self.is_busy(late).await && self.is_busy(1 - late).await
            })
            .await;
        });
        let undisturbed = BatonServer::with(&["--engine", "sim"]);
        assert_eq!(reply, stream(&undisturbed, &body).await);
        for (reason, expected) in [("first_token_late", 1), ("hedged", 1), ("hedge_won", 1), ("decode_lost", 0)] {
            assert_eq!(self.count(reason).await, expected, "{reason}");
        }
        for i in 0..2 {
            eventually_async("no slot to be held", async || {
                let load = self.load(i).await;
                load.active_slots == 0 && load.queued == 0
            })
            .await;
        }
        let state: Value =
            reqwest::get(format!("{}/baton/state", self.server.base)).await.unwrap().json().await.unwrap();
        assert_eq!(state["requests"]["running"], 0, "{state}");
    }
}

/// A streamed reply: its text, the number of finish reasons, and the number of tokens.
async fn stream(server: &BatonServer, body: &Value) -> (String, u32, u64) {
    let mut body = body.clone();
    body["stream_options"] = json!({ "include_usage": true });
    let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body);
    let sse = call.send().await.unwrap().text().await.unwrap();
    assert_eq!(sse.matches("data: [DONE]").count(), 1, "{sse}");
    let mut text = String::new();
    let mut n_finished = 0;
    let mut n_tokens = 0;
    for event in sse.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]") {
        let chunk: Value = serde_json::from_str(event).unwrap();
        assert!(chunk["error"].is_null(), "{chunk}");
        let choice = &chunk["choices"][0];
        text += choice["delta"]["content"].as_str().unwrap_or_default();
        n_finished += u32::from(choice["finish_reason"].is_string());
        n_tokens += chunk["usage"]["completion_tokens"].as_u64().unwrap_or_default();
    }
    assert_eq!((n_finished, n_tokens), (1, u64::from(N_TOKENS)), "{sse}");
    (text, n_finished, n_tokens)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_whose_link_is_slow_is_hedged() {
    let rig = Rig::start().await;
    rig.check("slow link", |late| rig.relays[late].set(LinkFault::Slow(5.0)), |_| {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_whose_node_freezes_is_hedged() {
    let rig = Rig::start().await;
    let (stop, go_on) =
        (|late: usize| rig.nodes[late].signal(Signal::STOP), |late: usize| rig.nodes[late].signal(Signal::CONT));
    rig.check("frozen node", stop, go_on).await;
}
