//! Peers that stall a decode node.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engines::sim::SimEngine;
use baton_link::handoff::{PullPolicy, PullTimeouts};
use baton_schemas::SequenceRequest;
use baton_schemas::handoff::{HandoffFailure, KvSource};
use baton_schemas::kv::Wait;
use baton_schemas::node::Role;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::{AttackedNode, OK, begin, small_info};
use crate::peers::fake::{Call, FakeNode, drip, say};
use crate::peers::{KEY, generate, node, request, small_sim};

/// A policy that gives up on a silent peer after half a second. The default is five seconds.
fn impatient() -> PullPolicy {
    let timeouts = PullTimeouts { head: HALF_A_SECOND, stall: HALF_A_SECOND, ..PullTimeouts::default() };
    PullPolicy { timeouts, ..PullPolicy::default() }
}

const HALF_A_SECOND: Duration = Duration::from_millis(500);

/// Several times the deadlines in these tests, for busy machines, but less than the default deadlines.
const SOON: Duration = Duration::from_millis(4_500);

/// A peer that describes itself like a real node and replies to pulls with `stall`.
async fn staller<F: Future<Output = ()> + Send + 'static>(
    stall: impl Fn(Call, TcpStream) -> F + Send + Sync + 'static,
) -> FakeNode {
    let real = node(Arc::new(SimEngine::new(small_sim())), Role::Prefill, KEY).await;
    let real = Arc::new(real);
    let stall = Arc::new(stall);
    FakeNode::start(move |call: Call, stream| {
        let real = Arc::clone(&real);
        let stall = Arc::clone(&stall);
        async move {
            if call.is_pull() {
                stall(call, stream).await;
            } else {
                say(stream, call.relay(&real.address).await.raw).await;
            }
        }
    })
    .await
}

async fn gives_up(fake: &FakeNode, policy: PullPolicy, within: Duration) {
    let decoder = AttackedNode::new(policy).await;
    let began = Instant::now();
    let handoff = decoder.ask(&fake.url).await;
    assert_eq!(handoff.failure, Some(HandoffFailure::PrefillStalled), "{handoff:?}");
    assert!(began.elapsed() < within, "{:?}", began.elapsed());
}

#[tokio::test]
async fn endless_signs_of_life_are_given_up() {
    let fake = staller(|call, mut stream| async move {
        let (mut writer, head) = begin(&call, KEY.as_bytes(), &small_info().await);
        let mut answer = [OK.as_bytes(), &head].concat();
        while stream.write_all(&answer).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
            answer = writer.wait(Wait::default()).unwrap().concat();
        }
    })
    .await;
    let policy = PullPolicy { allowance: Duration::from_secs(1), ..PullPolicy::default() };
    gives_up(&fake, policy, SOON).await;
}

#[tokio::test]
async fn a_pull_is_given_up_after_its_predicted_time() {
    let fake = staller(|call, mut stream| async move {
        let (mut writer, head) = begin(&call, KEY.as_bytes(), &small_info().await);
        let mut answer = [OK.as_bytes(), &head].concat();
        while stream.write_all(&answer).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
            answer = writer.wait(Wait::default()).unwrap().concat();
        }
    })
    .await;
    // Without a predicted time, the node would wait for a minute.
    let decoder = AttackedNode::new(PullPolicy::default()).await;
    let source = KvSource { patience_ms: Some(1_000), ..KvSource::at(&fake.url) };
    let request = SequenceRequest { kv_source: Some(source), ..request(&decoder.prompt, 4, None) };
    let began = Instant::now();
    let reply = generate(&decoder.engine, request).await;
    assert_eq!(reply.tokens, decoder.expected);
    assert_eq!(reply.handoff.unwrap().failure, Some(HandoffFailure::PrefillLate), "slow, but alive");
    let took = began.elapsed();
    assert!((Duration::from_secs(1)..2 * SOON).contains(&took), "{took:?}");
}

#[tokio::test]
async fn a_silent_node_stalls_and_is_not_late() {
    let fake = staller(|_, mut stream| async move {
        stream.write_all(OK.as_bytes()).await.unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    // The silence is longer than that of a live peer.
    let timeouts = PullTimeouts { life_sign: Duration::from_millis(300), ..PullTimeouts::default() };
    let decoder = AttackedNode::new(PullPolicy { timeouts, ..PullPolicy::default() }).await;
    let source = KvSource { patience_ms: Some(600), ..KvSource::at(&fake.url) };
    let request = SequenceRequest { kv_source: Some(source), ..request(&decoder.prompt, 4, None) };
    let reply = generate(&decoder.engine, request).await;
    assert_eq!(reply.handoff.unwrap().failure, Some(HandoffFailure::PrefillStalled));
}

#[tokio::test]
async fn a_record_byte_by_byte_is_given_up() {
    let fake = staller(|_, stream| async move {
        let mut record = b"BKV1\x01\0\0\0\0\0\0\0".to_vec();
        record.extend(1_000_000_u64.to_le_bytes());
        drip(stream, [OK.as_bytes(), &record].concat(), Duration::from_millis(20)).await;
    })
    .await;
    let policy = PullPolicy { allowance: Duration::from_secs(1), ..PullPolicy::default() };
    gives_up(&fake, policy, SOON).await;
}

#[tokio::test]
async fn an_http_head_byte_by_byte_is_given_up() {
    let head = b"HTTP/1.1 200 OK\r\nx: ".to_vec();
    let fake = staller(move |_, stream| drip(stream, head.clone(), Duration::from_millis(20))).await;
    gives_up(&fake, impatient(), SOON).await;
}

#[tokio::test]
async fn a_refusal_byte_by_byte_is_given_up() {
    let head = b"HTTP/1.1 503 Busy\r\n\r\n{\"error\":".to_vec();
    let fake = staller(move |_, stream| drip(stream, head.clone(), Duration::from_millis(20))).await;
    gives_up(&fake, impatient(), SOON).await;
}

#[tokio::test]
async fn silence_is_given_up() {
    for answer in ["", OK] {
        let fake = staller(move |_, mut stream| async move {
            stream.write_all(answer.as_bytes()).await.unwrap();
            std::future::pending::<()>().await;
        })
        .await;
        gives_up(&fake, impatient(), SOON).await;
    }
}
