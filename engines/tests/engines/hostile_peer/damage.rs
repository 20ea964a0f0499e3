//! Real replies of a real node, cut or changed in transit.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use baton_engines::sim::SimEngine;
use baton_link::handoff::PullPolicy;
use baton_schemas::handoff::{HandoffFailure, HandoffReport};
use baton_schemas::node::Role;

use super::{AttackedNode, HANG};
use crate::peers::fake::{FakeNode, say};
use crate::peers::recording::Recording;
use crate::peers::{KEY, node, small_sim};

/// Requests in succession that may end before a damaged reply is sent.
const ATTEMPTS: usize = 5;

/// The damage to a recorded reply.
#[derive(Debug, Clone, Copy)]
enum Damage {
    /// Only this many bytes are sent.
    Cut(usize),
    /// One bit of this byte is flipped.
    Flip(usize),
}

impl Damage {
    fn apply(self, recording: &Recording) -> Vec<u8> {
        let mut raw = recording.raw.clone();
        match self {
            Damage::Cut(n) => raw.truncate(n),
            Damage::Flip(at) => {
                if let Some(byte) = raw.get_mut(at) {
                    *byte ^= 1 << (at % 8);
                }
            }
        }
        raw
    }

    /// Returns true if a reader must notice the damage. Damage to HTTP's framing may have no effect.
    fn must_be_noticed(self, recording: &Recording) -> bool {
        match self {
            Damage::Cut(n) => n < recording.payload_end(),
            Damage::Flip(at) => recording.payload.contains(&at),
        }
    }
}

/// Sends a damaged reply of `real` to a decoder and checks the outcome.
async fn suffer(decoder: &AttackedNode, fake: &FakeNode, real: &str, damage: Damage) -> HandoffReport {
    for _ in 0..ATTEMPTS {
        let (handoff, must_be_noticed) = attempt(decoder, fake, real, damage).await;
        match must_be_noticed {
            Some(true) => assert!(handoff.failure.is_some(), "{damage:?} was not noticed: {handoff:?}"),
            Some(false) => {}
            // On a busy machine, a connection or a head can be late. Then no damaged reply was sent.
            None => {
                assert!(handoff.failure.is_some(), "KV without a pull: {handoff:?}");
                continue;
            }
        }
        if let Damage::Cut(_) = damage {
            let named = [None, Some(HandoffFailure::PrefillDown), Some(HandoffFailure::PrefillLost)];
            assert!(named.contains(&handoff.failure), "{damage:?}: {handoff:?}");
            // The bytes that came are counted even so.
            assert!(handoff.n_bytes >= u64::from(handoff.n_tokens), "{damage:?}: {handoff:?}");
        }
        return handoff;
    }
    panic!("{ATTEMPTS} requests in succession brought no pull to the prefill node");
}

/// Asks once. Also returns whether the damage must have been noticed, if a damaged reply was sent.
async fn attempt(decoder: &AttackedNode, fake: &FakeNode, real: &str, damage: Damage) -> (HandoffReport, Option<bool>) {
    let (noticed, heard) = tokio::sync::oneshot::channel();
    let noticed = Arc::new(Mutex::new(Some(noticed)));
    let real = real.to_owned();
    fake.follow(move |call, stream| {
        let real = real.clone();
        let noticed = Arc::clone(&noticed);
        async move {
            let recording = call.relay(&real).await;
            if !call.is_pull() {
                return say(stream, &recording.raw).await;
            }
            if let Some(noticed) = noticed.lock().unwrap().take() {
                noticed.send(damage.must_be_noticed(&recording)).unwrap();
            }
            say(stream, damage.apply(&recording)).await;
        }
    });
    let handoff = decoder.ask(&fake.url).await;
    // With the script goes its end of the channel, once no connection follows it.
    fake.follow(|_, stream| say(stream, ""));
    let heard = tokio::time::timeout(HANG, heard).await.expect("a connection of the prefill node hangs");
    (handoff, heard.ok())
}

/// An undamaged reply.
async fn recorded(decoder: &AttackedNode, real: &str) -> Recording {
    let kept = Arc::new(Mutex::new(None));
    let keep = Arc::clone(&kept);
    let real = real.to_owned();
    let fake = FakeNode::start(move |call, stream| {
        let keep = Arc::clone(&keep);
        let real = real.clone();
        async move {
            let recording = call.relay(&real).await;
            if call.is_pull() {
                *keep.lock().unwrap() = Some(recording.clone());
            }
            say(stream, recording.raw).await;
        }
    })
    .await;
    assert_eq!(decoder.ask(&fake.url).await.failure, None);
    let recording = kept.lock().unwrap().take();
    recording.expect("a pull was made")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_cut_or_flipped_at_any_byte_costs_no_reply() {
    const WORKERS: usize = 8;
    let began = Instant::now();
    let real = node(Arc::new(SimEngine::new(small_sim())), Role::Prefill, KEY).await;
    let recording = recorded(&AttackedNode::new(PullPolicy::default()).await, &real.address).await;
    // Times in the last record differ by some digits.
    let n_bytes = recording.raw.len() + 32;
    let next = Arc::new(AtomicUsize::new(0));
    let workers = (0..WORKERS).map(|_| {
        let next = Arc::clone(&next);
        let real = real.address.clone();
        tokio::spawn(async move {
            let decoder = AttackedNode::new(PullPolicy::default()).await;
            let fake = FakeNode::start(|_, stream| say(stream, "")).await;
            let mut failures = HashMap::new();
            loop {
                let case = next.fetch_add(1, Ordering::Relaxed);
                let damage = match case {
                    n if n < n_bytes => Damage::Cut(n),
                    n if n < 2 * n_bytes => Damage::Flip(n - n_bytes),
                    _ => return failures,
                };
                let handoff = suffer(&decoder, &fake, &real, damage).await;
                *failures.entry(handoff.failure).or_insert(0) += 1;
            }
        })
    });
    let mut failures = HashMap::<_, usize>::new();
    for worker in workers.collect::<Vec<_>>() {
        for (failure, n) in worker.await.unwrap() {
            *failures.entry(failure).or_default() += n;
        }
    }
    println!("{n_bytes} bytes, each cut and flipped, in {:?}: {failures:?}", began.elapsed());
    assert!(failures[&Some(HandoffFailure::PrefillLost)] > 0);
    assert!(failures[&Some(HandoffFailure::FrameRejected)] > recording.payload.len() / 2);
    assert!(began.elapsed() < Duration::from_secs(60));
}
