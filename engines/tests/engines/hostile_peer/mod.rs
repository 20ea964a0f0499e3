//! Attacks of a prefill node on a decode node, a module for each kind.

#[cfg(feature = "llama")]
mod checkpoints;
mod damage;
mod lies;
#[cfg(feature = "llama")]
mod model;
mod stalls;
mod states;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use baton_link::handoff::PullPolicy;
use baton_schemas::Token;
use baton_schemas::handoff::{HandoffFailure, HandoffReport, PrefillRequest};
use baton_schemas::kv::{Codec, Handoff, HandoffWriter, Mac, ModelKnowledge, StreamChoice};
use baton_schemas::node::NodeInfo;

use crate::peers::fake::Call;
use crate::peers::{generate, puller, request, request_alone, small_sim, tokens};

/// A handoff that takes longer hangs.
pub(crate) const HANG: Duration = Duration::from_secs(20);

/// The next request's cache scope. Each request has its own, so that none finds another's KV.
static SCOPE: AtomicU64 = AtomicU64::new(1);

/// A decode node, a prompt and the expected reply.
pub(crate) struct AttackedNode {
    engine: SimEngine,
    prompt: Vec<Token>,
    expected: Vec<Token>,
}

impl AttackedNode {
    pub(crate) async fn new(policy: PullPolicy) -> AttackedNode {
        AttackedNode::simulating(small_sim(), policy).await
    }

    pub(crate) async fn simulating(config: SimConfig, policy: PullPolicy) -> AttackedNode {
        let prompt = tokens(20);
        let expected = generate(&SimEngine::new(config.clone()), request(&prompt, 4, None)).await.tokens;
        AttackedNode { engine: SimEngine::with_puller(config, Some(puller(policy))), prompt, expected }
    }

    /// Generates with KV from `url`, and checks that the reply is correct whatever the peer does.
    pub(crate) async fn ask(&self, url: &str) -> HandoffReport {
        let scope = SCOPE.fetch_add(1, Ordering::Relaxed);
        let reply = generate(&self.engine, request_alone(&self.prompt, 4, url, scope));
        let reply = tokio::time::timeout(HANG, reply).await.expect("a handoff hangs");
        assert_eq!(reply.tokens, self.expected);
        let handoff = reply.handoff.expect("a handoff was tried");
        // The simulator compares every chunk with the expected one.
        assert_ne!(handoff.failure, Some(HandoffFailure::ImportFailed), "wrong KV reached the engine");
        let n_wanted = self.prompt.len() as u32 - 1;
        assert_eq!(handoff.n_tokens + reply.timings.prompt_n, n_wanted, "missing KV is computed");
        assert!(handoff.failure.is_some() || handoff.n_tokens == n_wanted, "{handoff:?}");
        handoff
    }
}

/// The head of a reply whose body ends with the connection.
pub(crate) const OK: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";

/// The description of the simulated nodes.
pub(crate) async fn small_info() -> NodeInfo {
    SimEngine::new(small_sim()).info().await.unwrap()
}

/// Begins the reply to a pull like a node with `key`. Returns the writer and the first record.
pub(crate) fn begin(call: &Call, key: &[u8], info: &NodeInfo) -> (HandoffWriter, Vec<u8>) {
    begin_reply(serde_json::from_slice(&call.body).unwrap(), key, info)
}

fn begin_reply(request: PrefillRequest, key: &[u8], info: &NodeInfo) -> (HandoffWriter, Vec<u8>) {
    let kv = info.kv.clone().unwrap();
    let handoff = Handoff {
        id: request.handoff,
        fingerprint: kv.fingerprint,
        layout: kv.layout,
        start: request.start,
        tokens: request.tokens,
    };
    let known = ModelKnowledge::default();
    let state_codec = request.state_codecs.first().map_or(Codec::None, |number| Codec::from_number(*number).unwrap());
    let (codec, mac) = (Codec::None, Mac::Blake3);
    let choice = StreamChoice { codec, state_codec, mac, checkpoints: &request.checkpoints, known };
    let (writer, head) = HandoffWriter::begin_as(key, handoff, choice).unwrap();
    (writer, head.concat())
}
