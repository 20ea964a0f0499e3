//! An endpoint's end of a connection: one task reads frames into the queues of their streams and writes what the
//! streams have to send. No queue is ever full, because a node sends only what there is credit for.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_schemas::EngineError;
use baton_schemas::streams::{
    FrameBuffer, MAX_NODE_PAYLOAD, MAX_PARTIAL_BODIES, MAX_PIECE_BYTES, StreamWork, put_body,
};
use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio_util::task::AbortOnDropHandle;
use tracing::Span;

use super::super::calls::SILENCE_TIMEOUT;
use super::event::Inbox;
use super::state::{ConnectionState, NodeFault, StartedStream};
use crate::{awake, trace};

/// Starts and pieces of bodies wait while more bytes than this are not sent.
const MAX_UNSENT_BYTES: usize = 256 << 10;

/// Pieces of bodies that may be added at the same moment beyond that.
const MAX_PIECES_AT_ONCE: usize = 8;

/// Time for the node to take the bytes of one write. It reads whatever its engine does.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// The size of one read.
const READ_BYTES: usize = 64 << 10;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum ConnectionEnd {
    #[error("the node closed the connection")]
    Closed,
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("no sign of life for {} s", SILENCE_TIMEOUT.as_secs())]
    Silent,
    #[error("the node reads nothing")]
    Unread,
    #[error("the node broke the stream protocol: it sent {0}")]
    Fault(#[from] NodeFault),
}

/// A connection, open or not. When its last stream and its engine's client are dropped, it closes.
pub(super) struct Connection {
    shared: Arc<Shared>,
    _task: AbortOnDropHandle<()>,
}

/// What the connection's task shares with its streams.
struct Shared {
    state: Mutex<ConnectionState>,
    /// Notified when there are bytes to send.
    has_bytes: Notify,
    /// Notified when bytes were sent.
    has_room: Notify,
    /// Permits to add a piece of a body to the bytes that wait.
    pieces: Semaphore,
    /// Permits for bodies of several pieces.
    bodies: Semaphore,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a piece of a body can be added. The piece is added before the permit is dropped.
    async fn room(&self) -> Option<SemaphorePermit<'_>> {
        let permit = self.pieces.acquire().await.ok();
        loop {
            let sent = self.has_room.notified();
            {
                let state = self.lock();
                if !state.is_open() || state.outgoing.len() <= MAX_UNSENT_BYTES {
                    return permit;
                }
            }
            sent.await;
        }
    }
}

impl Connection {
    /// Starts to read and write.
    pub(super) fn over(io: impl AsyncRead + AsyncWrite + Send + 'static) -> Arc<Connection> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            has_bytes: Notify::new(),
            has_room: Notify::new(),
            pieces: Semaphore::new(MAX_PIECES_AT_ONCE),
            bodies: Semaphore::new(MAX_PARTIAL_BODIES),
        });
        let task = tokio::spawn(run(io, Arc::clone(&shared)));
        Arc::new(Connection { shared, _task: AbortOnDropHandle::new(task) })
    }

    /// Returns true if streams can be started.
    pub(super) fn is_open(&self) -> bool {
        self.shared.lock().is_open()
    }

    /// Waits for the turn of a body of this length. Only some long bodies are sent at the same time.
    pub(super) async fn body_turn(&self, body_bytes: usize) -> Option<SemaphorePermit<'_>> {
        if body_bytes > MAX_PIECE_BYTES { self.shared.bodies.acquire().await.ok() } else { None }
    }

    /// Starts a stream with the first piece of its body. From then on the caller cancels it if nobody reads it. Errors:
    /// the connection has ended.
    pub(super) async fn start(
        &self,
        inbox: Inbox,
        work: StreamWork,
        body: &[u8],
    ) -> Result<StartedStream, EngineError> {
        let traceparent = trace::traceparent(&Span::current());
        let _room = self.shared.room().await;
        let started = self.shared.lock().start(inbox, work, traceparent.as_deref(), body);
        self.shared.has_bytes.notify_one();
        started
    }

    /// Sends the pieces of a body after the first one.
    pub(super) async fn send_rest(&self, stream: u32, body: &[u8]) {
        let mut rest = body.get(MAX_PIECE_BYTES..).unwrap_or_default();
        while !rest.is_empty() {
            let _room = self.shared.room().await;
            rest = put_body(&mut self.shared.lock().outgoing, stream, rest);
            self.shared.has_bytes.notify_one();
        }
    }

    /// Grants a stream more credit, if it has not ended.
    pub(super) fn grant(&self, stream: u32, credit: u32) {
        self.shared.lock().grant(stream, credit);
        self.shared.has_bytes.notify_one();
    }

    /// Ends a stream that its reader has left.
    pub(super) fn cancel(&self, stream: u32) {
        self.shared.lock().cancel(stream);
        self.shared.has_bytes.notify_one();
    }
}

/// Reads and writes until the connection ends. Then all its streams are lost.
async fn run(io: impl AsyncRead + AsyncWrite + Send + 'static, shared: Arc<Shared>) {
    let (reader, writer) = tokio::io::split(io);
    let end = tokio::select! {
        end = read(reader, &shared) => end,
        end = write(writer, &shared) => end,
    };
    let end = end.err().unwrap_or(ConnectionEnd::Closed);
    match end {
        ConnectionEnd::Fault(_) => tracing::warn!(%end, "a connection to a node is closed; its streams are lost"),
        _ => tracing::debug!(%end, "a connection to a node has ended"),
    }
    shared.lock().end(&EngineError::lost(end));
    shared.has_room.notify_waiters();
}

async fn read(mut io: ReadHalf<impl AsyncRead + AsyncWrite>, shared: &Shared) -> Result<(), ConnectionEnd> {
    let mut inbox = FrameBuffer::new(MAX_NODE_PAYLOAD);
    loop {
        let space = inbox.space();
        space.reserve(READ_BYTES);
        let read = awake::timeout(SILENCE_TIMEOUT, io.read_buf(space)).await;
        if read.map_err(|_| ConnectionEnd::Silent)?? == 0 {
            return Ok(());
        }
        let mut state = shared.lock();
        while let Some(frame) = inbox.next_frame().map_err(NodeFault::from)? {
            state.receive(frame)?;
        }
        if state.is_unread() {
            return Err(ConnectionEnd::Unread);
        }
    }
}

async fn write(mut io: WriteHalf<impl AsyncRead + AsyncWrite>, shared: &Shared) -> Result<(), ConnectionEnd> {
    let mut bytes = BytesMut::new();
    loop {
        std::mem::swap(&mut shared.lock().outgoing, &mut bytes);
        if bytes.is_empty() {
            shared.has_bytes.notified().await;
            continue;
        }
        let sent = async {
            io.write_all(&bytes).await?;
            io.flush().await
        };
        awake::timeout(WRITE_TIMEOUT, sent).await.map_err(|_| ConnectionEnd::Unread)??;
        bytes.clear();
        shared.has_room.notify_waiters();
    }
}
