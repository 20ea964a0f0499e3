//! Endpoints that do not read, do not send, or leave things unfinished. The clock is paused: deadlines pass at once.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use baton_schemas::node::{NodeErrorReply, NodeLoad, Role};
use baton_schemas::sequence::{CachedTokens, FinishReason, GeneratedToken, SequenceEvent, Timings};
use baton_schemas::stream_versions::StreamVersions;
use baton_schemas::streams::{
    FrameBuffer, MAX_CREDIT, MAX_NODE_PAYLOAD, NewStream, NodeFrame, StreamWork, put_body, put_cancel, put_credit,
    put_start, put_told,
};
use baton_schemas::{SequenceRequest, Token};
use bytes::BytesMut;
use futures::{StreamExt, stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::limits::{MAX_BODIES_BYTES, MAX_STREAMS};
use super::*;
use crate::engine::{Engine, SequenceStream};
use crate::node::ClusterKey;
use crate::node::connection::DEADLINES;
use crate::wrapper::{EngineWrapper, UnusedEngine};

/// An engine that computes nothing and has a slot for each stream.
#[derive(Default)]
struct SlotEngine {
    /// Every stream has a clone.
    slot: Arc<()>,
}

#[async_trait]
impl EngineWrapper for SlotEngine {
    fn inner(&self) -> &dyn Engine {
        &UnusedEngine
    }

    async fn load(&self) -> Result<NodeLoad, EngineError> {
        let active_slots = Arc::strong_count(&self.slot) as u32 - 1;
        Ok(NodeLoad { active_slots, ..NodeLoad::default() })
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let slot = Arc::clone(&self.slot);
        let tokens = async_stream::stream! {
            let _slot = slot;
            yield Ok(SequenceEvent::Started(CachedTokens::in_slot(0)));
            for _ in 0..request.max_tokens.unwrap_or(1) {
                tokio::task::yield_now().await;
                yield Ok(SequenceEvent::Token(GeneratedToken { id: 7, bytes: vec![b' '], special: false, logprobs: None, drafts: None }));
            }
            yield Ok(SequenceEvent::Finished { reason: FinishReason::Length, timings: Timings::default() });
        };
        Ok(tokens.boxed())
    }
}

/// A node, and an endpoint's end of a connection to it.
struct Rig {
    node: NodeService,
    closing: CancellationToken,
    served: JoinHandle<()>,
    io: UnixStream,
    inbox: FrameBuffer,
}

/// A frame, as far as these tests look at it.
#[derive(Debug, PartialEq)]
enum Said {
    Accepted,
    Started,
    Token,
    Finished,
    Error(EngineError),
    Other,
}

impl Rig {
    fn new(engine: impl Engine + 'static) -> Rig {
        let stop = CancellationToken::new();
        let key = ClusterKey::new("key");
        let node = NodeService::new(StreamVersions::OURS, Arc::new(engine), Role::Both, key, stop);
        let (io, far) = UnixStream::pair().unwrap();
        let closing = CancellationToken::new();
        let served = tokio::spawn(serve(far, node.clone(), closing.clone()));
        Rig { node, closing, served, io, inbox: FrameBuffer::new(MAX_NODE_PAYLOAD) }
    }

    async fn send(&mut self, write: impl FnOnce(&mut BytesMut)) {
        let mut bytes = BytesMut::new();
        write(&mut bytes);
        self.io.write_all(&bytes).await.unwrap();
    }

    /// The frames of the next bytes: a token of a step each, without signs of life.
    async fn next(&mut self) -> Vec<(u32, Said)> {
        let mut said = Vec::new();
        while said.is_empty() {
            assert_ne!(self.io.read_buf(self.inbox.space()).await.unwrap(), 0, "the node has left");
            while let Some(frame) = self.inbox.next_frame().unwrap() {
                let stream = frame.stream;
                match NodeFrame::parse(frame).unwrap() {
                    NodeFrame::Step(tokens) => {
                        said.extend(tokens.map(|token| (token.unwrap().stream, Said::Token)));
                    }
                    NodeFrame::Accepted => said.push((stream, Said::Accepted)),
                    NodeFrame::Event(json) => said.push((stream, event(json))),
                    NodeFrame::Error(json) => {
                        said.push((stream, Said::Error(serde_json::from_slice::<NodeErrorReply>(json).unwrap().error)));
                    }
                    NodeFrame::Alive => {}
                    NodeFrame::Vector(_) | NodeFrame::End | NodeFrame::Drafted(_) => said.push((stream, Said::Other)),
                }
            }
        }
        said
    }

    /// The last frame of a stream.
    async fn last(&mut self, stream: u32) -> Said {
        loop {
            for (of, said) in self.next().await {
                if of == stream && matches!(said, Said::Finished | Said::Error(_)) {
                    return said;
                }
            }
        }
    }

    async fn n_active(&self) -> u32 {
        self.node.engine.load().await.unwrap().active_slots
    }
}

fn event(json: &[u8]) -> Said {
    match serde_json::from_slice(json) {
        Ok(SequenceEvent::Started { .. }) => Said::Started,
        Ok(SequenceEvent::Finished { .. }) => Said::Finished,
        _ => Said::Other,
    }
}

fn request(first: Token, n_tokens: u32) -> Vec<u8> {
    let mut request = SequenceRequest {
        prompt: vec![first, 7, 9],
        max_tokens: Some(n_tokens),
        ignore_eos: true,
        ..SequenceRequest::default()
    };
    request.sampling.temperature = 0.0;
    serde_json::to_vec(&request).unwrap()
}

fn start(out: &mut BytesMut, stream: u32, credit: u32, body: &[u8]) {
    let _rest = put_start(out, stream, &NewStream { work: StreamWork::Generate, credit, traceparent: None, body });
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_reads_too_little_loses_its_connection_and_its_slots() {
    for takes_a_byte_at_a_time in [false, true] {
        let mut rig = Rig::new(SlotEngine::default());
        rig.send(|out| (1..=40).for_each(|stream| start(out, stream, MAX_CREDIT, &request(stream, 10_000)))).await;
        tokio::time::sleep(DEADLINES.read / 2).await;
        assert_eq!(rig.n_active().await, 40, "all streams wait for the socket");
        // A cancel is heard although nothing can be sent.
        rig.send(|out| put_cancel(out, 1)).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(rig.n_active().await, 39);
        let (mut reader, _writer) = rig.io.into_split();
        let drip = async {
            while takes_a_byte_at_a_time && reader.read_u8().await.is_ok() {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            served = tokio::time::timeout(3 * DEADLINES.read, rig.served) => served.expect("it goes on").unwrap(),
            () = drip => {}
        }
        assert_eq!(rig.node.engine.load().await.unwrap().active_slots, 0);
        assert_eq!(rig.node.stream_limits.streams.available_permits(), MAX_STREAMS);
    }
}

#[tokio::test(start_paused = true)]
async fn refusals_that_are_not_read_end_the_connection() {
    let mut rig = Rig::new(SlotEngine::default());
    rig.send(|out| start(out, 1, 64, &request(1, 10_000))).await;
    assert_eq!(rig.next().await[0], (1, Said::Accepted));
    rig.closing.cancel();
    let flood = async {
        for first in (2..).step_by(1_000) {
            let mut bytes = BytesMut::new();
            (first..first + 1_000).for_each(|stream| start(&mut bytes, stream, 1, b""));
            if first > 100_000 || rig.io.write_all(&bytes).await.is_err() {
                break;
            }
        }
    };
    flood.await;
    tokio::time::timeout(Duration::from_secs(10), rig.served).await.expect("the node keeps all refusals").unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_streams_of_a_node_are_counted_over_all_connections() {
    let mut rig = Rig::new(SlotEngine::default());
    let others = Arc::clone(&rig.node.stream_limits.streams);
    let others = others.try_acquire_many_owned(MAX_STREAMS as u32).unwrap();
    rig.send(|out| start(out, 1, 64, &request(1, 3))).await;
    assert!(matches!(rig.last(1).await, Said::Error(EngineError::Unavailable { .. })));
    drop(others);
    rig.send(|out| start(out, 2, 64, &request(1, 3))).await;
    assert_eq!(rig.last(2).await, Said::Finished);
}

#[tokio::test(start_paused = true)]
async fn only_tokens_wait_for_credit() {
    let mut rig = Rig::new(SlotEngine::default());
    rig.send(|out| start(out, 1, 3, &request(1, 3))).await;
    assert_eq!(rig.last(1).await, Said::Finished, "all credit is used up");
    rig.send(|out| start(out, 2, 0, &request(1, 3))).await;
    let mut said = Vec::new();
    while said.len() < 2 {
        said.extend(rig.next().await);
    }
    assert_eq!(said, [(2, Said::Accepted), (2, Said::Started)]);
    rig.send(|out| put_credit(out, 2, 3)).await;
    assert_eq!(rig.last(2).await, Said::Finished);
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_grants_a_credit_at_a_time_loses_its_stream() {
    let mut rig = Rig::new(SlotEngine::default());
    rig.send(|out| start(out, 1, 64, &request(1, 10_000))).await;
    let mut n_tokens = 0;
    loop {
        for (_, said) in rig.next().await {
            match said {
                Said::Token => n_tokens += 1,
                Said::Error(error) => {
                    assert!(matches!(error, EngineError::Lost { .. }), "{error:?}");
                    assert_eq!(rig.n_active().await, 0);
                    return;
                }
                _ => {}
            }
        }
        assert!(n_tokens < 64 + 32, "it goes on");
        if n_tokens >= 64 {
            tokio::time::sleep(DEADLINES.read / 6).await;
            rig.send(|out| put_credit(out, 1, 1)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_come_ends_its_stream() {
    let mut rig = Rig::new(SlotEngine::default());
    rig.send(|out| start(out, 1, 64, &[b' '; 70_000])).await;
    assert!(matches!(rig.last(1).await, Said::Error(EngineError::Lost { .. })));
    assert_eq!(rig.node.stream_limits.body_bytes.available_permits(), MAX_BODIES_BYTES);
    // The rest comes late and is dropped; the connection stays.
    rig.send(|out| assert!(put_body(out, 1, &[b' '; 100]).is_empty())).await;
    rig.send(|out| start(out, 2, 64, &request(1, 3))).await;
    assert_eq!(rig.last(2).await, Said::Finished);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_request_that_waits_to_be_parsed_holds_no_bytes() {
    let mut rig = Rig::new(SlotEngine::default());
    let limits = Arc::clone(&rig.node.stream_limits);
    let n_parsers = limits.parsers.available_permits() as u32;
    let busy = limits.parsers.acquire_many(n_parsers).await.unwrap();
    let free = |n_bytes: usize| limits.body_bytes.available_permits() == MAX_BODIES_BYTES - n_bytes;
    let body = [&request(1, 3)[..], &[b' '; 70_000]].concat();
    let whole = |out: &mut BytesMut, stream| {
        let new = NewStream { work: StreamWork::Generate, credit: 64, traceparent: None, body: &body };
        let rest = put_start(out, stream, &new);
        assert!(put_body(out, stream, rest).is_empty());
    };
    rig.send(|out| whole(out, 1)).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(free(body.len()));
    rig.send(|out| put_cancel(out, 1)).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(free(0));
    drop(busy);
    rig.send(|out| whole(out, 2)).await;
    assert_eq!(rig.last(2).await, Said::Finished);
}

/// An engine that panics in a stream whose prompt begins with 1.
struct PanickingEngine(SlotEngine);

#[async_trait]
impl EngineWrapper for PanickingEngine {
    fn inner(&self) -> &dyn Engine {
        &self.0
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        match request.prompt[0] {
            1 => Ok(stream::poll_fn(|_| panic!("a test's panic")).boxed()),
            _ => Engine::generate(&self.0, request).await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_engine_ends_only_its_stream() {
    let mut rig = Rig::new(PanickingEngine(SlotEngine::default()));
    rig.send(|out| start(out, 1, 64, &request(1, 3))).await;
    assert!(matches!(rig.last(1).await, Said::Error(EngineError::Internal { .. })));
    rig.send(|out| start(out, 2, 64, &request(2, 3))).await;
    assert_eq!(rig.last(2).await, Said::Finished);
}

#[tokio::test(start_paused = true)]
async fn tokens_that_are_told_to_a_stream_without_drafts_end_the_connection() {
    let mut rig = Rig::new(SlotEngine::default());
    rig.send(|out| start(out, 1, 0, &request(1, 3))).await;
    assert_eq!(rig.next().await[0], (1, Said::Accepted));
    rig.send(|out| assert!(put_told(out, 1, 3, &[7]).is_empty())).await;
    tokio::time::timeout(Duration::from_secs(10), rig.served).await.expect("it goes on").unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_node_of_another_role_drafts_nothing_and_keeps_the_connection() {
    let mut rig = Rig::new(SlotEngine::default());
    let new = NewStream { work: StreamWork::Draft, credit: 0, traceparent: None, body: b"{}" };
    rig.send(|out| assert!(put_start(out, 1, &new).is_empty())).await;
    let Said::Error(EngineError::Unsupported { feature }) = rig.last(1).await else { panic!("it drafts") };
    assert_eq!(feature, "drafting: its role is both");
    // Tokens that were told meanwhile are dropped.
    rig.send(|out| assert!(put_told(out, 1, 3, &[7]).is_empty())).await;
    rig.send(|out| start(out, 2, 64, &request(1, 3))).await;
    assert_eq!(rig.last(2).await, Said::Finished);
    assert_eq!(rig.node.stream_limits.drafts.available_permits(), super::limits::MAX_DRAFTS);
}
