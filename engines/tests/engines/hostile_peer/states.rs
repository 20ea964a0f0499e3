//! Peers that lie about the states of a hybrid model. Rows without the right state are worth nothing: the decode node computes
//! the whole prompt.

use std::sync::Arc;

use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use baton_link::engine::KvEvent;
use baton_link::handoff::PullPolicy;
use baton_schemas::handoff::{HandoffFailure, PrefillRequest};
use baton_schemas::kv::record::{MAC_BYTES, RecordKind};
use baton_schemas::kv::{Codec, HandoffKey, Mac, StatePart};
use baton_schemas::node::Role;
use futures::StreamExt;

use super::{AttackedNode, OK, begin_reply};
use crate::peers::fake::{Call, FakeNode, say};
use crate::peers::{KEY, node, small_sim};

/// Two states of 12 and 52 bytes.
fn hybrid_sim() -> SimConfig {
    SimConfig { state_bytes: 64, ..small_sim() }
}

/// What a peer does with a record of states: the payload is `position, first, n, codec, prefix hash`, then the values.
pub(super) type Lie = fn(&mut StatePart, &mut Vec<u8>) -> Sent;

/// How often a record is sent.
pub(super) enum Sent {
    Never,
    Once,
    Twice,
}

/// A peer that computes honest KV and sends it with a right MAC, except that it lies about states.
async fn liar(lie: Lie) -> FakeNode {
    liar_with(hybrid_sim(), lie).await
}

async fn liar_with(config: SimConfig, lie: Lie) -> FakeNode {
    let real = node(Arc::new(SimEngine::new(config.clone())), Role::Prefill, KEY).await;
    let real = Arc::new(real);
    FakeNode::start(move |call: Call, stream| {
        let (real, config) = (Arc::clone(&real), config.clone());
        async move {
            if !call.is_pull() {
                return say(stream, call.relay(&real.address).await.raw).await;
            }
            let request = serde_json::from_slice(&call.body).unwrap();
            let reply = reply(&SimEngine::new(config), request, lie).await;
            say(stream, [OK.as_bytes(), &reply].concat()).await;
        }
    })
    .await
}

/// The records of a prefill, whose states `lie` may change.
pub(super) async fn reply(engine: &dyn Engine, request: PrefillRequest, lie: Lie) -> Vec<u8> {
    let key = HandoffKey::derive(KEY.as_bytes(), request.handoff);
    let (mut writer, head) = begin_reply(request.clone(), KEY.as_bytes(), &engine.info().await.unwrap());
    let mut stream = head;
    let mut index = 1;
    let mut send = |kind, payload: Vec<u8>| {
        stream.extend(key.seal(Mac::Blake3, kind, index, vec![payload.into()]).concat());
        index += 1;
    };
    let mut events = engine.prefill(request).await.unwrap();
    while let Some(event) = events.next().await {
        match event.unwrap() {
            KvEvent::Begun => {}
            KvEvent::Chunk(chunk) => send(RecordKind::Frame, payload(&writer.frame(&chunk).unwrap().concat())),
            KvEvent::State(mut part) => {
                let mut bytes = payload(&writer.state(&part).unwrap().concat());
                let n = match lie(&mut part, &mut bytes) {
                    Sent::Never => 0,
                    Sent::Once => 1,
                    Sent::Twice => 2,
                };
                (0..n).for_each(|_| send(RecordKind::State, bytes.clone()));
            }
            KvEvent::End(timings) => send(RecordKind::End, payload(&writer.end(timings).unwrap().concat())),
        }
    }
    stream
}

fn payload(record: &[u8]) -> Vec<u8> {
    record[20..record.len() - MAC_BYTES].to_vec()
}

#[tokio::test]
async fn states_that_are_right_are_taken() {
    let fake = liar(|_, _| Sent::Once).await;
    let handoff = AttackedNode::simulating(hybrid_sim(), PullPolicy::default()).await.ask(&fake.url).await;
    assert_eq!((handoff.failure, handoff.n_tokens, handoff.state_bytes), (None, 19, 64));
}

#[tokio::test]
async fn states_that_are_wrong_or_missing_cost_no_reply() {
    let rejected = HandoffFailure::FrameRejected;
    let lies: [(&str, Lie, HandoffFailure); 11] = [
        ("a missing state", |part, _| if part.first == 1 { Sent::Never } else { Sent::Once }, rejected),
        ("no state", |_, _| Sent::Never, rejected),
        ("a position before", |_, bytes| put(bytes, 0, 18), rejected),
        ("a position after", |_, bytes| put(bytes, 0, u32::MAX), rejected),
        ("another state", |_, bytes| put(bytes, 4, 1), rejected),
        ("more states than there are", |_, bytes| put(bytes, 8, 3), rejected),
        ("NaN", |_, bytes| put(bytes, 48, f32::NAN.to_bits()), HandoffFailure::NotFinite),
        ("short", |_, bytes| cut(bytes, 1), rejected),
        ("trailing bytes", |_, bytes| grow(bytes), rejected),
        ("a state of another prompt", |_, bytes| put(bytes, 16, 7), rejected),
        ("two states", |_, _| Sent::Twice, rejected),
    ];
    // With a narrower codec, the first value is a scale.
    for codecs in codecs() {
        for (what, lie, failure) in lies {
            let fake = liar(lie).await;
            let policy = PullPolicy { codecs: codecs.clone(), ..PullPolicy::default() };
            let handoff = AttackedNode::simulating(hybrid_sim(), policy).await.ask(&fake.url).await;
            assert_eq!((handoff.failure, handoff.n_tokens), (Some(failure), 0), "{what}, {codecs:?}");
        }
    }
}

/// A node with other weights sends its canary's states, too. The simulator computes the same of every model.
#[tokio::test]
async fn other_weights_need_states_that_are_close() {
    let other = SimConfig { model: "other".into(), ..hybrid_sim() };
    let policy = || PullPolicy { max_canary_distance: Some(0.1), ..PullPolicy::default() };
    let honest = liar_with(other.clone(), |_, _| Sent::Once).await;
    let handoff = AttackedNode::simulating(hybrid_sim(), policy()).await.ask(&honest.url).await;
    assert_eq!((handoff.failure, handoff.n_tokens, handoff.kv_distance), (None, 19, Some(0.0)));
    let lies: [(&str, Lie, HandoffFailure); 6] = [
        (
            "another recurrence",
            |part, bytes| if part.first == 1 { put(bytes, 48, 1f32.to_bits()) } else { Sent::Once },
            HandoffFailure::CanaryFailed,
        ),
        (
            "another convolution",
            |part, bytes| if part.first == 0 { put(bytes, 48, 1f32.to_bits()) } else { Sent::Once },
            HandoffFailure::CanaryFailed,
        ),
        ("NaN", |_, bytes| put(bytes, 48, f32::NAN.to_bits()), HandoffFailure::NotFinite),
        ("short", |_, bytes| cut(bytes, 1), HandoffFailure::FrameRejected),
        (
            "a missing state",
            |part, _| if part.first == 1 { Sent::Never } else { Sent::Once },
            HandoffFailure::FrameRejected,
        ),
        ("no state", |_, _| Sent::Never, HandoffFailure::FrameRejected),
    ];
    for (what, lie, failure) in lies {
        let fake = liar_with(other.clone(), lie).await;
        let handoff = AttackedNode::simulating(hybrid_sim(), policy()).await.ask(&fake.url).await;
        // Without bytes, the prompt was not even asked for.
        assert_eq!((handoff.failure, handoff.n_tokens, handoff.n_bytes), (Some(failure), 0, 0), "{what}");
    }
}

/// What an operator names. The simulator compares values, so it takes no states that a codec has changed.
fn codecs() -> [Vec<Codec>; 3] {
    [vec![], vec![Codec::StateF16], vec![Codec::StateInt8]]
}

#[tokio::test]
async fn states_stay_as_they_are_if_the_prefill_node_measured_no_loss_and_there_is_a_limit() {
    let real = node(Arc::new(SimEngine::new(hybrid_sim())), Role::Prefill, KEY).await;
    for codecs in codecs() {
        let policy = PullPolicy { codecs, max_kv_kl: Some(0.1), ..PullPolicy::default() };
        let handoff =
            AttackedNode::simulating(hybrid_sim(), policy).await.ask(&format!("http://{}", real.address)).await;
        assert_eq!((handoff.failure, handoff.n_tokens, handoff.state_bytes), (None, 19, 64));
    }
}

pub(super) fn put(bytes: &mut [u8], at: usize, value: u32) -> Sent {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    Sent::Once
}

fn cut(bytes: &mut Vec<u8>, n: usize) -> Sent {
    bytes.truncate(bytes.len() - n);
    Sent::Once
}

fn grow(bytes: &mut Vec<u8>) -> Sent {
    bytes.push(0);
    Sent::Once
}

/// A peer whose model has no states, or larger ones, is another model.
#[tokio::test]
async fn a_model_with_other_states_is_another_model() {
    for theirs in [small_sim(), SimConfig { state_bytes: 128, ..small_sim() }] {
        let real = node(Arc::new(SimEngine::new(theirs)), Role::Prefill, KEY).await;
        let decoder = AttackedNode::simulating(hybrid_sim(), PullPolicy::default()).await;
        let handoff = decoder.ask(&format!("http://{}", real.address)).await;
        assert_eq!((handoff.failure, handoff.n_tokens), (Some(HandoffFailure::FingerprintMismatch), 0));
    }
}
