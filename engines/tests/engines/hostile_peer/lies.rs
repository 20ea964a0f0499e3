//! Peers that send something other than the requested KV.

use std::sync::{Arc, Mutex};

use baton_engines::sim::SimEngine;
use baton_link::handoff::PullPolicy;
use baton_link::node::ServerTls;
use baton_link::transport::Transport;
use baton_schemas::handoff::{HandoffFailure, PrefillRequest};
use baton_schemas::kv::{Chunk, KvLayout, LayerRows, LayerShape, Section, SectionRows};
use baton_schemas::node::{NodeDescription, Role};
use baton_schemas::stream_versions::StreamVersions;
use bytes::Bytes;

use super::{AttackedNode, OK, begin, small_info};
use crate::own_process::is_own;
use crate::peers::fake::{Call, FakeNode, say};
use crate::peers::{KEY, TestNode, generate, node, request_alone, serve, small_sim};

async fn honest() -> TestNode {
    node(Arc::new(SimEngine::new(small_sim())), Role::Prefill, KEY).await
}

/// A peer in front of a real node. It replies to pulls with the result of `lie`, which gets the real reply.
async fn liar(real: &TestNode, lie: impl Fn(Vec<u8>) -> Vec<u8> + Send + Sync + 'static) -> FakeNode {
    let address = real.address.clone();
    let lie = Arc::new(lie);
    FakeNode::start(move |call, stream| {
        let address = address.clone();
        let lie = Arc::clone(&lie);
        async move {
            let answer = call.relay(&address).await.raw;
            let answer = if call.is_pull() { lie(answer) } else { answer };
            say(stream, answer).await;
        }
    })
    .await
}

#[tokio::test]
async fn the_stream_of_another_handoff_is_refused() {
    let real = honest().await;
    let first = Arc::new(Mutex::new(None));
    let fake = liar(&real, move |answer| first.lock().unwrap().get_or_insert(answer).clone()).await;
    let decoder = AttackedNode::new(PullPolicy::default()).await;
    assert_eq!(decoder.ask(&fake.url).await.failure, None);
    let replayed = decoder.ask(&fake.url).await;
    assert_eq!((replayed.failure, replayed.n_tokens), (Some(HandoffFailure::FrameRejected), 0));
}

#[tokio::test]
async fn kv_of_other_tokens_is_refused_though_the_key_is_right() {
    let real = honest().await;
    let address = real.address.clone();
    let fake = FakeNode::start(move |mut call: Call, stream| {
        let address = address.clone();
        async move {
            if call.is_pull() {
                // The same handoff with the same number of tokens; one in the second chunk differs.
                let mut request: PrefillRequest = serde_json::from_slice(&call.body).unwrap();
                request.tokens[10] += 1;
                call.body = serde_json::to_vec(&request).unwrap();
            }
            say(stream, call.relay(&address).await.raw).await;
        }
    })
    .await;
    let handoff = AttackedNode::new(PullPolicy::default()).await.ask(&fake.url).await;
    assert_eq!(
        (handoff.failure, handoff.n_tokens),
        (Some(HandoffFailure::FrameRejected), 8),
        "the first chunk is right"
    );
}

/// The KV is verified and finite but wrong: the simulator compares each chunk with the expected one.
#[tokio::test]
async fn kv_that_the_engine_cannot_import_is_computed_instead() {
    let real = honest().await;
    let address = real.address.clone();
    let fake = FakeNode::start(move |call: Call, stream| {
        let address = address.clone();
        async move {
            if !call.is_pull() {
                return say(stream, call.relay(&address).await.raw).await;
            }
            let info = small_info().await;
            let (mut writer, head) = begin(&call, KEY.as_bytes(), &info);
            let zeros = zeros(&info.kv.unwrap().layout, 8);
            let frame = writer.frame(&zeros).unwrap().concat();
            say(stream, [OK.as_bytes(), &head, &frame].concat()).await;
        }
    })
    .await;
    let decoder = AttackedNode::new(PullPolicy::default()).await;
    let reply = generate(&decoder.engine, request_alone(&decoder.prompt, 4, &fake.url, 7)).await;
    assert_eq!(reply.tokens, decoder.expected);
    let handoff = reply.handoff.unwrap();
    assert_eq!((handoff.failure, handoff.n_tokens), (Some(HandoffFailure::ImportFailed), 0), "{handoff:?}");
    assert_eq!(reply.timings.prompt_n, decoder.prompt.len() as u32 - 1, "all of it was computed");
}

/// KV of the first `n` positions, all zeros.
fn zeros(layout: &KvLayout, n: u32) -> Chunk {
    let rows = |bytes: usize| Bytes::from(vec![0; n as usize * bytes]);
    let layer = |layer: &LayerShape| LayerRows { k: rows(layer.k.bytes()), v: rows(layer.v.map_or(0, |v| v.bytes())) };
    let section = |section: &Section| SectionRows { start: 0, layers: section.layers.iter().map(layer).collect() };
    Chunk { p0: 0, p1: n, sections: layout.sections.iter().map(section).collect() }
}

#[tokio::test]
async fn garbage_is_refused() {
    let real = honest().await;
    let noise: Vec<u8> = (0..100_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let cases: [(Vec<u8>, HandoffFailure); 5] = [
        (Vec::new(), HandoffFailure::PrefillDown),
        (noise.clone(), HandoffFailure::PrefillDown),
        ([OK.as_bytes(), &noise].concat(), HandoffFailure::FrameRejected),
        (OK.as_bytes().to_vec(), HandoffFailure::PrefillLost),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\n\r\nhello".to_vec(), HandoffFailure::PrefillDown),
    ];
    for (answer, failure) in cases {
        let fake = liar(&real, move |_| answer.clone()).await;
        let handoff = AttackedNode::new(PullPolicy::default()).await.ask(&fake.url).await;
        assert_eq!((handoff.failure, handoff.n_tokens), (Some(failure), 0));
    }
    // Also in reply to the request for the node's description.
    let fake = FakeNode::start(move |_, stream| say(stream, noise.clone())).await;
    let handoff = AttackedNode::new(PullPolicy::default()).await.ask(&fake.url).await;
    assert_eq!(handoff.failure, Some(HandoffFailure::PrefillDown));
}

#[tokio::test]
async fn claimed_lengths_allocate_no_memory() {
    if !is_own("hostile_peer::lies::claimed_lengths_allocate_no_memory") {
        return;
    }
    const TEN_GB: u64 = 10_000_000_000;
    let real = honest().await;
    let claim = |kind: u8, index: u32| {
        let mut header = b"BKV1".to_vec();
        header.extend([kind, 0, 0, 0]);
        header.extend(index.to_le_bytes());
        header.extend(TEN_GB.to_le_bytes());
        header
    };
    let before = resident_kib();
    // A head, a frame in a head's place, and a frame after the real head.
    for (kind, index) in [(1, 0), (2, 0)] {
        let answer = [OK.as_bytes(), &claim(kind, index), &[0; 4096]].concat();
        let fake = liar(&real, move |_| answer.clone()).await;
        let handoff = AttackedNode::new(PullPolicy::default()).await.ask(&fake.url).await;
        assert_eq!(handoff.failure, Some(HandoffFailure::FrameRejected));
    }
    let frame = claim(2, 1);
    let fake = FakeNode::start(move |call: Call, stream| {
        let frame = frame.clone();
        let address = real.address.clone();
        async move {
            if !call.is_pull() {
                return say(stream, call.relay(&address).await.raw).await;
            }
            let head = begin(&call, KEY.as_bytes(), &small_info().await);
            say(stream, [OK.as_bytes(), &head.1, &frame, &[0; 4096]].concat()).await;
        }
    })
    .await;
    let handoff = AttackedNode::new(PullPolicy::default()).await.ask(&fake.url).await;
    assert_eq!(handoff.failure, Some(HandoffFailure::FrameRejected));
    // Also HTTP's content length.
    let real = honest().await;
    for status in ["200 OK", "503 Busy"] {
        let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {TEN_GB}\r\n\r\nBKV");
        let fake = liar(&real, move |_| answer.clone().into_bytes()).await;
        let handoff = AttackedNode::new(PullPolicy::default()).await.ask(&fake.url).await;
        assert!(handoff.failure.is_some());
    }
    if let (Some(before), Some(after)) = (before, resident_kib()) {
        assert!(after < before + (1 << 20), "{before} KiB grew to {after} KiB");
    }
}

/// The most memory that this process has used, in KiB, if the system reports it.
fn resident_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[tokio::test]
async fn an_impostor_without_the_key_is_detected() {
    let info = small_info().await;
    let fake = FakeNode::start(move |call: Call, stream| {
        let info = info.clone();
        async move {
            if call.is_pull() {
                let (_, head) = begin(&call, b"a guess", &info);
                say(stream, [OK.as_bytes(), &head].concat()).await;
            } else {
                let info = NodeDescription { info, streams: StreamVersions::OURS };
                let body = serde_json::to_vec(&info).unwrap();
                say(stream, [OK.as_bytes(), &body].concat()).await;
            }
        }
    })
    .await;
    let handoff = AttackedNode::new(PullPolicy::default()).await.ask(&fake.url).await;
    assert_eq!((handoff.failure, handoff.n_tokens), (Some(HandoffFailure::FrameRejected), 0));
}

#[tokio::test]
async fn a_valid_certificate_does_not_replace_the_key() {
    let folder = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let cert = folder.path().join("cert.pem");
    let key = folder.path().join("key.pem");
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let tls = ServerTls::load(&cert, &key).unwrap();
    let policy = || PullPolicy { transport: Transport::new(Some(&cert), false).unwrap(), ..PullPolicy::default() };
    for (cluster_key, failure) in [("another key", Some(HandoffFailure::KeyRefused)), (KEY, None)] {
        let engine = Arc::new(SimEngine::new(small_sim()));
        let node = serve(engine, Role::Prefill, cluster_key, Some(tls.clone())).await;
        let url = format!("https://{}", node.address);
        assert_eq!(AttackedNode::new(policy()).await.ask(&url).await.failure, failure);
        // Without the CA, no request is sent.
        let handoff = AttackedNode::new(PullPolicy::default()).await.ask(&url).await;
        assert_eq!(handoff.failure, Some(HandoffFailure::PrefillDown));
    }
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let real = honest().await;
    let elsewhere = FakeNode::start(|_, stream| say(stream, "")).await;
    for status in [301, 302, 303, 307, 308] {
        let location = elsewhere.url.clone();
        let answer = move |call: &Call| {
            let path = call.head.split(' ').nth(1).unwrap().to_owned();
            format!("HTTP/1.1 {status} Elsewhere\r\nlocation: {location}{path}\r\ncontent-length: 0\r\n\r\n")
        };
        for only_pulls in [true, false] {
            let answer = answer.clone();
            let address = real.address.clone();
            let fake = FakeNode::start(move |call: Call, stream| {
                let answer = answer(&call);
                let address = address.clone();
                async move {
                    if only_pulls && !call.is_pull() {
                        return say(stream, call.relay(&address).await.raw).await;
                    }
                    say(stream, answer).await;
                }
            })
            .await;
            let handoff = AttackedNode::new(PullPolicy::default()).await.ask(&fake.url).await;
            assert_eq!(handoff.failure, Some(HandoffFailure::PrefillDown));
        }
    }
    assert_eq!(elsewhere.n_connections(), 0, "the key would have been sent there");
}

#[tokio::test]
async fn huge_http_heads_are_refused() {
    let real = honest().await;
    let long = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "a".repeat(10 << 20));
    let many: String = (0..10_000).map(|i| format!("x-{i}: 1\r\n")).collect();
    for answer in [long, format!("HTTP/1.1 200 OK\r\n{many}\r\n")] {
        let fake = liar(&real, move |_| answer.clone().into_bytes()).await;
        let handoff = AttackedNode::new(PullPolicy::default()).await.ask(&fake.url).await;
        assert_eq!(handoff.failure, Some(HandoffFailure::PrefillDown));
    }
}

#[tokio::test]
async fn the_key_is_not_sent_unencrypted_to_another_machine() {
    // An address for documentation (RFC 5737), to which nothing is sent.
    let handoff = AttackedNode::new(PullPolicy::default()).await.ask("http://192.0.2.1:9000").await;
    assert_eq!(handoff.failure, Some(HandoffFailure::AddressRefused));
}
