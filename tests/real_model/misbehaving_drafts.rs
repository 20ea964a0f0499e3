//! A draft node that is slow or hostile, between real processes: replies are right, and the draft node is given up for its reason.

use harness::draft_relay::{DraftFault, DraftRelay};
use harness::{BatonNode, BatonServer, eventually_async};
use serde_json::json;
use tempfile::TempDir;
use tiny_gguf::scripted::{Reply, Script, Tokenizer};

use crate::draft_nodes::{is_ready, metric};

/// Tokens of the reply: more than the steps after which a late draft node is given up.
const N_REPLY: usize = 300;

/// The steps without a candidate after which a draft node is given up.
const MOST_LATE: u64 = 256;

/// An endpoint with a draft node of the same model, behind a relay. The model is certain of each token, so rounding changes none.
struct Rig {
    server: BatonServer,
    relay: DraftRelay,
    _node: BatonNode,
    _folder: TempDir,
}

fn words() -> impl Iterator<Item = String> {
    (0..N_REPLY).map(|n| format!("word{n} "))
}

impl Rig {
    async fn start(fault: DraftFault) -> Rig {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("scripted.gguf");
        let script = Script {
            tokenizer: Tokenizer::default(),
            template: "{{ messages[0].content }}<|go|>".into(),
            control: Vec::new(),
            user_defined: Vec::new(),
            bos: None,
            end: "<|end|>".into(),
            context_length: 2_048,
            replies: vec![Reply::new("<|go|>", words())],
        };
        script.write(&model);
        let of_model = ["--model", model.to_str().unwrap(), "--threads", "1"];
        let node = BatonNode::with(&[&of_model[..], &["--role", "draft"]].concat());
        let relay = DraftRelay::start(&node.url, fault).await;
        let drafted = ["--name", "scripted", "--prefill", &relay.url, "--speculation", "auto", "--no-calibration"];
        let server = BatonServer::with(&[&of_model[..], &drafted].concat());
        eventually_async("the draft node to be seen", || is_ready(&server)).await;
        Rig { server, relay, _node: node, _folder: folder }
    }

    /// Asks with a prompt of this text, and checks the reply.
    async fn ask(&self, prompt: &str) {
        let body = json!({ "model": "scripted", "prompt": format!("{prompt}<|go|>"), "max_tokens": 2 * N_REPLY,
            "temperature": 0.0 });
        let (status, reply) = self.server.post("/v1/completions", &body).await;
        assert_eq!(
            (status, reply["choices"][0]["text"].as_str()),
            (200, Some(&*words().collect::<String>())),
            "{reply}"
        );
    }

    async fn n_lost(&self, reason: &str) -> u64 {
        metric(&self.server, "baton_lost_draft_nodes_total", &[&format!("reason=\"{reason}\"")]).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_node_behind_a_slow_link_is_given_up_after_a_number_of_steps() {
    let rig = Rig::start(DraftFault::Behind(40)).await;
    for n in 1..=2 {
        let before = rig.relay.n_told();
        rig.ask("Hello").await;
        eventually_async("it to be counted", async || rig.n_lost("late").await == n).await;
        let n_told = rig.relay.n_told() - before;
        assert!(n_told <= MOST_LATE, "it was told {n_told} tokens");
    }
    assert_eq!(metric(&rig.server, "baton_draft_tokens_total", &["drafter=\"remote\""]).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_draft_node_changes_no_reply_and_is_given_up() {
    let rig = Rig::start(DraftFault::None).await;
    rig.ask("Hello").await;
    for (fault, reason) in [
        (DraftFault::OutOfRange, "invalid"),
        (DraftFault::TooMany, "invalid"),
        (DraftFault::OfAnother, "invalid"),
        (DraftFault::OfUnknown, "lost"),
    ] {
        rig.relay.set(fault);
        let before = rig.n_lost(reason).await;
        // On a busy machine a reply may end before the first candidate.
        eventually_async(&format!("{fault:?} to be counted"), async || {
            rig.ask("Hello").await;
            rig.ask(&"A longer question. ".repeat(40)).await;
            rig.n_lost(reason).await > before
        })
        .await;
    }
    // Nothing of it stays: it follows the next replies.
    rig.relay.set(DraftFault::None);
    let before = rig.relay.n_told();
    eventually_async("a reply to be followed", async || {
        rig.ask("Hello").await;
        rig.relay.n_told() > before
    })
    .await;
}
