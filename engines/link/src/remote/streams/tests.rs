//! Faults of a node on the connection, and the errors that callers get for them.

use std::pin::Pin;
use std::task::{Context, Poll};

use baton_schemas::SequenceRequest;
use baton_schemas::draft::{DraftedTokens, DrafterLoss};
use baton_schemas::embed::EmbedEvent;
use baton_schemas::sequence::{CachedTokens, FinishReason, GeneratedToken, SequenceEvent, Timings};
use baton_schemas::streams::{
    ClientFrame, FrameBuffer, HEAD_BYTES, MAX_CLIENT_PAYLOAD, MAX_CREDIT, NodeFrameWriter, StreamWork,
};
use futures::StreamExt;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};

use super::connection::NodeConnection;
use super::*;

const CREDIT: u32 = SequenceEvent::CREDIT;

/// A node's end of a connection, played by a test.
struct FakeNode {
    io: DuplexStream,
    inbox: FrameBuffer,
}

impl FakeNode {
    fn connected() -> (FakeNode, Arc<NodeConnection>) {
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        (
            FakeNode { io: theirs, inbox: FrameBuffer::new(MAX_CLIENT_PAYLOAD) },
            NodeConnection::over(ours, "a test".to_owned()),
        )
    }

    /// The next frame of the endpoint: its stream, and what it is.
    async fn next(&mut self) -> (u32, String) {
        loop {
            if let Some(frame) = self.inbox.next_frame().unwrap() {
                let stream = frame.stream;
                return (
                    stream,
                    match ClientFrame::parse(frame).unwrap() {
                        ClientFrame::Start(start) => {
                            format!("start with {} of {}", start.piece.len(), start.body_bytes)
                        }
                        ClientFrame::Body(piece) => format!("piece of {}", piece.len()),
                        ClientFrame::Credit(credit) => format!("credit {credit}"),
                        ClientFrame::Cancel => "cancel".to_owned(),
                        ClientFrame::Told(told) => format!("told {:?} at {}", told.tokens, told.at),
                    },
                );
            }
            assert_ne!(self.io.read_buf(self.inbox.space()).await.unwrap(), 0, "the endpoint left");
        }
    }

    async fn send(&mut self, write: impl FnOnce(&mut NodeFrameWriter)) {
        let mut frames = NodeFrameWriter::default();
        write(&mut frames);
        self.io.write_all(frames.frames()).await.unwrap();
    }
}

fn token(id: u32) -> GeneratedToken {
    GeneratedToken { id, bytes: b"a".to_vec(), special: false, logprobs: None, drafts: None }
}

fn drafted(at: u32, tokens: &[u32]) -> DraftedTokens {
    DraftedTokens { from: 2, at, tokens: tokens.to_vec() }
}

fn finished() -> SequenceEvent {
    SequenceEvent::Finished { reason: FinishReason::Stop, timings: Timings::default() }
}

async fn start(connection: &Arc<NodeConnection>) -> Result<RemoteStream<SequenceEvent>, EngineError> {
    let body = serde_json::to_vec(&SequenceRequest::default()).unwrap();
    RemoteStream::start(Arc::clone(connection), StreamWork::Generate, body).await
}

/// A connection with stream 1, which the node has accepted.
async fn accepted() -> (FakeNode, Arc<NodeConnection>, RemoteStream<SequenceEvent>) {
    let (mut node, connection) = FakeNode::connected();
    let (stream, ()) = tokio::join!(start(&connection), async {
        assert_eq!(node.next().await.0, 1);
        node.send(|frames| frames.accepted(1)).await;
    });
    (node, connection, stream.unwrap())
}

async fn rest(mut stream: RemoteStream<SequenceEvent>) -> (usize, Option<EngineError>) {
    let mut n_tokens = 0;
    while let Some(event) = stream.next().await {
        match event {
            Ok(event) => n_tokens += usize::from(matches!(event, SequenceEvent::Token(_))),
            Err(error) => return (n_tokens, Some(error)),
        }
    }
    (n_tokens, None)
}

/// Checks that these bytes, after stream 1 was accepted, end the connection with this cause.
async fn is_fault(cause: &str, write: impl FnOnce(&mut NodeFrameWriter)) {
    let (mut node, connection, stream) = accepted().await;
    node.send(write).await;
    let (_, error) = rest(stream).await;
    let Some(EngineError::Lost { detail }) = error else { panic!("{cause}: {error:?}") };
    assert!(detail.contains("broke the stream protocol") && detail.contains(cause), "{cause}: {detail}");
    assert!(!connection.takes_streams());
    assert!(matches!(start(&connection).await.err(), Some(EngineError::Lost { .. })), "{cause}: the next call");
}

#[tokio::test]
async fn a_node_that_breaks_the_protocol_loses_its_connection_with_the_cause() {
    is_fault("a frame of 4294967295 bytes", |frames| {
        frames.frames().extend_from_slice(&[255, 255, 255, 255, 16, 0, 0, 0, 0, 0, 0, 0])
    })
    .await;
    is_fault("the unknown kind 77", |frames| frames.frames().extend_from_slice(&[0, 0, 0, 0, 77, 0, 0, 0, 1, 0, 0, 0]))
        .await;
    is_fault("never started", |frames| frames.token(2, &token(1)).unwrap()).await;
    is_fault("never started", |frames| frames.accepted(9)).await;
    is_fault("accepted one stream twice", |frames| frames.accepted(1)).await;
    is_fault("credit", |frames| (0..=CREDIT).for_each(|_| frames.token(1, &token(1)).unwrap())).await;
    is_fault("work", |frames| frames.vector(1, &[1.0]).unwrap()).await;
    is_fault("work", |frames| frames.drafted(1, &drafted(2, &[1])).unwrap()).await;
    is_fault("cut off", |frames| {
        frames.token(1, &token(1)).unwrap();
        // The token claims more bytes than there are.
        let bytes = frames.frames();
        bytes[HEAD_BYTES + 10] = 9;
    })
    .await;
    const { assert!(CREDIT <= MAX_CREDIT) };
}

#[tokio::test]
async fn tokens_before_the_request_is_accepted_are_a_fault() {
    let (mut node, connection) = FakeNode::connected();
    let (refused, ()) = tokio::join!(start(&connection), async {
        node.next().await;
        node.send(|frames| frames.token(1, &token(1)).unwrap()).await;
    });
    assert!(matches!(refused.err(), Some(EngineError::Lost { detail }) if detail.contains("not accepted")));
}

#[tokio::test]
async fn a_slow_reader_gets_its_tokens_later_and_other_streams_go_on() {
    let (mut node, connection, slow) = accepted().await;
    let (fast, ()) = tokio::join!(start(&connection), async {
        assert_eq!(node.next().await.0, 2);
        node.send(|frames| {
            frames.accepted(2);
            (0..CREDIT).for_each(|_| frames.token(1, &token(1)).unwrap());
            (0..CREDIT / 2).for_each(|_| frames.token(2, &token(2)).unwrap());
            frames.event(2, &finished()).unwrap();
        })
        .await;
    });
    assert_eq!(rest(fast.unwrap()).await, (CREDIT as usize / 2, None));
    // Credit for the fast stream crossed its end and is not sent.
    let (read, ()) = tokio::join!(rest(slow), async {
        assert_eq!(node.next().await, (1, format!("credit {}", CREDIT / 2)));
        assert_eq!(node.next().await, (1, format!("credit {}", CREDIT / 2)));
        node.send(|frames| frames.event(1, &finished()).unwrap()).await;
    });
    assert_eq!(read, (CREDIT as usize, None));
}

#[tokio::test]
async fn a_dropped_stream_is_cancelled_and_what_still_comes_for_it_is_ignored() {
    let (mut node, connection, stream) = accepted().await;
    drop(stream);
    assert_eq!(node.next().await, (1, "cancel".to_owned()));
    node.send(|frames| {
        (0..1_000).for_each(|_| frames.token(1, &token(1)).unwrap());
        frames.event(1, &finished()).unwrap();
    })
    .await;
    // A request that is given up before its answer is cancelled, too.
    {
        let starting = start(&connection);
        tokio::pin!(starting);
        tokio::select! {
            biased;
            _ = &mut starting => panic!("it is not answered"),
            sent = node.next() => assert_eq!(sent.0, 2),
        }
    }
    assert_eq!(node.next().await, (2, "cancel".to_owned()));
    assert!(connection.takes_streams());
}

#[tokio::test]
async fn a_refusal_ends_only_its_stream() {
    let (mut node, connection, stream) = accepted().await;
    let full = EngineError::QueueFull { limit: 3 };
    let (refused, ()) = tokio::join!(start(&connection), async {
        node.next().await;
        node.send(|frames| frames.error(2, full.clone())).await;
    });
    assert_eq!(refused.err(), Some(full));
    node.send(|frames| {
        frames.token(1, &token(1)).unwrap();
        frames.error(1, EngineError::NotFinite);
    })
    .await;
    assert_eq!(rest(stream).await, (1, Some(EngineError::NotFinite)));
    assert!(connection.takes_streams());
}

#[tokio::test]
async fn a_long_body_lets_other_frames_pass() {
    let (mut node, connection, short) = accepted().await;
    let body = vec![b' '; 1 << 20];
    let long = RemoteStream::<SequenceEvent>::start(Arc::clone(&connection), StreamWork::Generate, body);
    let (long, ()) = tokio::join!(long, async {
        assert_eq!(node.next().await, (2, format!("start with 65536 of {}", 1 << 20)));
        drop(short);
        let mut n_pieces = 0;
        let mut cancelled_after = None;
        while n_pieces < 15 {
            match node.next().await {
                (2, said) => {
                    assert_eq!(said, "piece of 65536");
                    n_pieces += 1;
                }
                (1, said) => {
                    assert_eq!(said, "cancel");
                    cancelled_after = Some(n_pieces);
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(cancelled_after.is_some_and(|n| n < 15), "{cancelled_after:?}");
        node.send(|frames| frames.accepted(2)).await;
    });
    assert!(long.is_ok());
}

#[tokio::test]
async fn a_closed_connection_loses_its_streams() {
    let (mut node, _connection, stream) = accepted().await;
    node.send(|frames| frames.token(1, &token(1)).unwrap()).await;
    drop(node);
    let (n_tokens, error) = rest(stream).await;
    assert_eq!(n_tokens, 1);
    assert!(matches!(error, Some(EngineError::Lost { .. })), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_silent_node_is_lost_and_one_that_shows_life_is_not() {
    let (mut node, _connection, stream) = accepted().await;
    let began = tokio::time::Instant::now();
    for _ in 0..30 {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        node.send(|frames| frames.alive()).await;
    }
    let (_, error) = rest(stream).await;
    assert!(matches!(error, Some(EngineError::Lost { detail }) if detail.contains("no sign of life")));
    assert_eq!(began.elapsed().as_secs(), 35);
}

#[tokio::test]
async fn what_this_endpoint_cannot_read_ends_only_its_stream() {
    let (mut node, connection, mut first) = accepted().await;
    let started = || serde_json::to_value(SequenceEvent::Started(CachedTokens::in_slot(0))).unwrap();
    // Events of a newer node: one that is unknown, a token as JSON, and more than there can be.
    for (stream, events) in [
        (2, vec![json!("an event of a newer node")]),
        (3, vec![json!({ "token": { "id": 1, "bytes": "a" } })]),
        (4, (0..5).map(|_| started()).collect()),
    ] {
        let (begun, ()) = tokio::join!(start(&connection), async {
            node.next().await;
            node.send(|frames| {
                frames.accepted(stream);
                events.iter().for_each(|event| frames.event(stream, event).unwrap());
            })
            .await;
            assert_eq!(node.next().await, (stream, "cancel".to_owned()));
        });
        let (n_tokens, error) = rest(begun.unwrap()).await;
        assert!(matches!(&error, Some(EngineError::Lost { detail }) if detail.contains("cannot read")), "{error:?}");
        assert_eq!(n_tokens, 0);
    }
    // An error of an unknown kind, too. The node has ended that stream, so nothing is cancelled.
    let (refused, ()) = tokio::join!(start(&connection), async {
        assert_eq!(node.next().await.0, 5);
        node.send(|frames| {
            let json = br#"{"error":{"kind":"of_a_newer_node"}}"#;
            frames.frames().extend_from_slice(&[json.len() as u8, 0, 0, 0, 20, 0, 0, 0, 5, 0, 0, 0]);
            frames.frames().extend_from_slice(json);
            frames.token(1, &token(1)).unwrap();
        })
        .await;
    });
    assert!(matches!(refused.err(), Some(EngineError::Lost { detail }) if detail.contains("cannot read")));
    assert!(matches!(first.next().await, Some(Ok(SequenceEvent::Token(_)))));
    assert!(connection.takes_streams());
    drop(first);
    assert_eq!(node.next().await, (1, "cancel".to_owned()));
}

#[tokio::test]
async fn a_stream_of_vectors_has_little_credit() {
    let (mut node, connection) = FakeNode::connected();
    let start = RemoteStream::<EmbedEvent>::start(Arc::clone(&connection), StreamWork::Embed, b"{}".to_vec());
    let (stream, ()) = tokio::join!(start, async {
        node.next().await;
        node.send(|frames| {
            frames.accepted(1);
            (0..16).for_each(|_| frames.vector(1, &[1.0]).unwrap());
        })
        .await;
    });
    let mut stream = stream.unwrap();
    for _ in 0..8 {
        stream.next().await.unwrap().unwrap();
    }
    assert_eq!(node.next().await, (1, "credit 8".to_owned()));
    node.send(|frames| (0..9).for_each(|_| frames.vector(1, &[1.0]).unwrap())).await;
    // A reader that goes on would grant more.
    while connection.takes_streams() {
        tokio::task::yield_now().await;
    }
    let last = stream.filter_map(|event| std::future::ready(event.err())).next().await;
    assert!(matches!(&last, Some(EngineError::Lost { detail }) if detail.contains("credit")), "{last:?}");
}

#[tokio::test]
async fn bodies_that_are_refused_early_free_their_places() {
    const BODY_BYTES: usize = 8 << 20;
    let (mut node, connection, _first) = accepted().await;
    for stream in 2..40 {
        let body = vec![b' '; BODY_BYTES];
        let long = RemoteStream::<SequenceEvent>::start(Arc::clone(&connection), StreamWork::Generate, body);
        let full = EngineError::QueueFull { limit: 3 };
        let (refused, n_pieces) = tokio::join!(long, async {
            assert_eq!(node.next().await.0, stream);
            node.send(|frames| frames.error(stream, full.clone())).await;
            let mut n_pieces = 0;
            while node.next().await != (stream, "cancel".to_owned()) {
                n_pieces += 1;
            }
            n_pieces
        });
        assert_eq!(refused.err(), Some(full));
        assert!(n_pieces < BODY_BYTES / (64 << 10) - 1, "the rest is not sent: {n_pieces}");
    }
    assert!(connection.takes_streams());
}

#[tokio::test(start_paused = true)]
async fn a_node_that_sends_single_bytes_is_silent() {
    let (mut node, _connection, stream) = accepted().await;
    let began = tokio::time::Instant::now();
    let drip = async {
        node.io.write_all(&[0, 0, 16, 0, 18, 0, 0, 0, 1, 0, 0, 0]).await.unwrap();
        for _ in 0..60 {
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            // It fails once the endpoint has left.
            let _ = node.io.write_all(b"x").await;
        }
    };
    let (((_, error), elapsed), ()) = tokio::join!(async { (rest(stream).await, began.elapsed()) }, drip);
    assert_eq!(elapsed.as_secs(), 5);
    assert!(matches!(&error, Some(EngineError::Lost { detail }) if detail.contains("no sign of life")), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_node_that_reads_nothing_is_lost_though_it_shows_life() {
    let (mut node, connection, stream) = accepted().await;
    let body = vec![b' '; 4 << 20];
    let began = tokio::time::Instant::now();
    let long = RemoteStream::<SequenceEvent>::start(connection, StreamWork::Generate, body);
    let shows_life = async {
        loop {
            let mut frames = NodeFrameWriter::default();
            frames.alive();
            let _ = node.io.write_all(frames.frames()).await;
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        }
    };
    let lost = tokio::select! {
        lost = long => lost.err(),
        () = shows_life => None,
    };
    assert!(matches!(&lost, Some(EngineError::Lost { detail }) if detail.contains("reads nothing")), "{lost:?}");
    assert_eq!(began.elapsed().as_secs(), 10);
    assert!(rest(stream).await.1.is_some());
}

/// A socket whose code panics.
struct PanickingIo;

impl AsyncRead for PanickingIo {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        panic!("a defect")
    }
}

impl AsyncWrite for PanickingIo {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<std::io::Result<usize>> {
        panic!("a defect")
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[tokio::test]
async fn a_panic_ends_the_connection_and_its_streams() {
    let connection = NodeConnection::over(PanickingIo, "a test".to_owned());
    let lost = start(&connection).await.err();
    assert!(matches!(lost, Some(EngineError::Lost { .. })), "{lost:?}");
    assert!(!connection.takes_streams());
}

#[tokio::test]
async fn candidates_that_no_draft_node_sends_end_their_drafts_and_nothing_else() {
    let (mut node, connection, stream) = accepted().await;
    let board = Arc::new(DraftBoard::new(2, 10));
    let start = RemoteDraftStream::start(Arc::clone(&connection), Arc::clone(&board), b"{}".to_vec());
    let (drafts, ()) = tokio::join!(start, async {
        assert_eq!(node.next().await, (2, "start with 2 of 2".to_owned()));
        node.send(|frames| frames.accepted(2)).await;
    });
    let drafts = drafts.unwrap();
    drafts.tell(2, &[5, 6]);
    assert_eq!(node.next().await, (2, "told [5, 6] at 2".to_owned()));
    node.send(|frames| frames.drafted(2, &drafted(2, &[5, 6])).unwrap()).await;
    // The vocabulary has ten tokens.
    node.send(|frames| frames.drafted(2, &drafted(4, &[10])).unwrap()).await;
    assert_eq!(node.next().await, (2, "cancel".to_owned()));
    assert_eq!(board.loss(), Some(DrafterLoss::Invalid));
    // Candidates that are still on their way are dropped.
    node.send(|frames| frames.drafted(2, &drafted(5, &[1])).unwrap()).await;
    node.send(|frames| frames.event(1, &finished()).unwrap()).await;
    assert_eq!(rest(stream).await, (0, None));
    assert!(connection.takes_streams());
}

#[tokio::test]
async fn drafts_end_with_their_connection_and_with_the_nodes_refusal() {
    for refuses in [true, false] {
        let (mut node, connection) = FakeNode::connected();
        let board = Arc::new(DraftBoard::new(2, 10));
        let start = RemoteDraftStream::start(Arc::clone(&connection), Arc::clone(&board), b"{}".to_vec());
        let (started, ()) = tokio::join!(start, async {
            assert_eq!(node.next().await.0, 1);
            node.send(|frames| match refuses {
                true => frames.error(1, EngineError::invalid("no")),
                false => frames.accepted(1),
            })
            .await;
        });
        assert_eq!(started.is_err(), refuses);
        if let Ok(_drafts) = started {
            drop(node);
            let told = Arc::clone(&board);
            assert_eq!(tokio::spawn(async move { told.to_tell().await }).await.unwrap(), None);
            assert_eq!(board.loss(), Some(DrafterLoss::Lost));
        }
    }
}
