//! Peers that lie about the checkpoints of a tiny hybrid model. The reply is right whatever they send.

use std::sync::Arc;

use baton_engines::registry::EngineOptions;
use baton_link::Engine;
use baton_link::handoff::PullPolicy;
use baton_schemas::Token;
use baton_schemas::handoff::{HandoffFailure, PrefillRequest};
use baton_schemas::node::Role;
use tiny_gguf::Architecture;

use super::states::{Lie, Sent, put, reply};
use super::{HANG, OK};
use crate::models;
use crate::peers::fake::{Call, FakeNode, say};
use crate::peers::{self, KEY, generate, node, request};

/// The tokens with which both conversations begin.
const N_SHARED: u32 = 1_200;

fn text(seed: u32, n: u32) -> Vec<Token> {
    (0..n).map(|i| 3 + (i * (2 * seed + 7) + seed) % 240).collect()
}

fn conversation(seed: u32) -> Vec<Token> {
    [&text(1, N_SHARED)[..], &text(seed, 400)].concat()
}

/// The checkpoints that a peer names, for the one that it is asked for.
type Named = fn(u32) -> Vec<u32>;

/// A peer that changes which checkpoints it was asked for, and lies about states.
async fn liar(engine: Arc<dyn Engine>, named: Named, lie: Lie) -> FakeNode {
    let real = Arc::new(node(Arc::clone(&engine), Role::Prefill, KEY).await);
    FakeNode::start(move |call: Call, stream| {
        let (real, engine) = (Arc::clone(&real), Arc::clone(&engine));
        async move {
            if !call.is_pull() {
                return say(stream, call.relay(&real.address).await.raw).await;
            }
            let mut request: PrefillRequest = serde_json::from_slice(&call.body).unwrap();
            assert_eq!(request.checkpoints, [N_SHARED], "where the conversations part is asked for");
            request.checkpoints = named(N_SHARED);
            let reply = reply(&*engine, request, lie).await;
            say(stream, [OK.as_bytes(), &reply].concat()).await;
        }
    })
    .await
}

/// States of the checkpoint; those of the end are not touched.
fn is_checkpoint(position: u32) -> bool {
    position < N_SHARED + 100
}

#[tokio::test(flavor = "multi_thread")]
async fn checkpoints_that_nobody_asked_for_and_wrong_ones_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_gguf::write(&path, Architecture::Lfm2, 1);
    let options = EngineOptions { n_threads: Some(1), n_ctx: Some(2_048), n_slots: Some(2), ..models::of_llama(path) };
    let prefill = models::start(options.clone(), None).await;
    let prompt = conversation(2);
    let n_pulled = prompt.len() as u32 - 5;
    let expected = generate(&*prefill, request(&prompt, 8, None)).await.tokens;
    let rejected = (Some(HandoffFailure::FrameRejected), 0);
    let to_checkpoint = (Some(HandoffFailure::FrameRejected), N_SHARED);
    let honest: Lie = |_, _| Sent::Once;
    let cases: [(&str, Named, Lie, _); 8] = [
        ("as asked", |at| vec![at], honest, (None, n_pulled)),
        ("none, as an earlier version", |_| vec![], honest, (None, n_pulled)),
        ("another position", |at| vec![at - 1], honest, rejected),
        ("one more", |at| vec![at, at + 1], honest, rejected),
        ("many more", |at| (at - 6..=at).collect(), honest, rejected),
        ("states that never come", |at| vec![at], |part, _| never_at_checkpoint(part.position), rejected),
        ("states of another position", |at| vec![at], |part, bytes| moved(part.position, bytes), rejected),
        ("states that come twice", |at| vec![at], |part, _| twice_at_checkpoint(part.position), to_checkpoint),
    ];
    for (what, named, lie, outcome) in cases {
        let fake = liar(Arc::clone(&prefill), named, lie).await;
        let decoder = models::start(options.clone(), Some(peers::puller(PullPolicy::default()) as Arc<_>)).await;
        generate(&*decoder, request(&conversation(3), 1, None)).await;
        let asked = generate(&*decoder, request(&prompt, 8, Some(&fake.url)));
        let reply = tokio::time::timeout(HANG, asked).await.expect("a handoff hangs");
        let handoff = reply.handoff.unwrap();
        assert_eq!((handoff.failure, handoff.n_tokens), outcome, "{what}");
        assert_eq!(
            (reply.tokens, reply.timings.prompt_n),
            (expected.clone(), prompt.len() as u32 - outcome.1),
            "{what}"
        );
    }
}

fn never_at_checkpoint(position: u32) -> Sent {
    if is_checkpoint(position) { Sent::Never } else { Sent::Once }
}

fn twice_at_checkpoint(position: u32) -> Sent {
    if is_checkpoint(position) { Sent::Twice } else { Sent::Once }
}

fn moved(position: u32, bytes: &mut [u8]) -> Sent {
    if is_checkpoint(position) { put(bytes, 0, position + 1) } else { Sent::Once }
}
