//! An endpoint's end of a connection: one task reads frames into the queues of their streams and writes what the
//! streams have to send. No queue is ever full, because a node sends only what there is credit for.

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_schemas::streams::{FrameBuffer, MAX_NODE_PAYLOAD, MAX_PARTIAL_BODIES, MAX_PIECE_BYTES, StreamWork};
use baton_schemas::{EngineError, Token};
use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio_util::task::AbortOnDropHandle;
use tracing::Span;

use super::super::calls::SILENCE_TIMEOUT;
use super::event::Inbox;
use super::state::{ConnectionState, NodeFault, StartedStream};
use crate::{awake, trace};

/// Starts and pieces of bodies wait while more bytes than this are not sent: one piece, so a start that comes later waits
/// for few bytes of others.
const MAX_UNSENT_BYTES: usize = 64 << 10;

/// Pieces of bodies that may be added at the same moment beyond that. With one, each write would carry one piece.
const MAX_PIECES_AT_ONCE: usize = 8;

/// Time for the node to take any byte. It reads whatever its engine does, so it needs milliseconds: this is twice the time
/// of silence after which the node counts as lost.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// A sign of life of a node that sends a long frame. Fewer bytes that are no whole frame show none.
const SIGN_OF_LIFE_BYTES: usize = 4 << 10;

/// The size of one read.
const READ_BYTES: usize = 64 << 10;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum NodeConnectionEnd {
    #[error("the node closed the connection")]
    Closed,
    #[error("this process no longer uses it")]
    Unused,
    #[error("its task failed in this process")]
    Failed,
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("no sign of life for {} s", SILENCE_TIMEOUT.as_secs())]
    Silent,
    #[error("the node reads nothing")]
    Unread,
    #[error("the node broke the stream protocol: {0}")]
    Fault(#[from] NodeFault),
}

/// A connection, open or not. When its last stream and its engine's client are dropped, it closes.
pub(super) struct NodeConnection {
    shared: Arc<Shared>,
    _task: AbortOnDropHandle<()>,
}

/// The state that the connection's task shares with its streams.
struct Shared {
    /// The node's address, for the log.
    node: String,
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

    /// Ends the connection and its streams, and says so in the log, if that has not happened yet.
    fn end(&self, end: &NodeConnectionEnd) {
        let mut state = self.lock();
        if !state.is_open() {
            return;
        }
        let n_lost = state.end(&EngineError::lost(end));
        drop(state);
        self.has_room.notify_waiters();
        let node = &self.node;
        match end {
            NodeConnectionEnd::Closed | NodeConnectionEnd::Io(_) | NodeConnectionEnd::Unused => {
                tracing::debug!(%end, node, n_lost, "the connection to a node has ended");
            }
            NodeConnectionEnd::Silent | NodeConnectionEnd::Unread if n_lost == 0 => {
                tracing::info!(%end, node, "the connection to a node is closed; no request was using it");
            }
            NodeConnectionEnd::Fault(_)
            | NodeConnectionEnd::Silent
            | NodeConnectionEnd::Unread
            | NodeConnectionEnd::Failed => {
                tracing::warn!(%end, node, n_lost, "the connection to a node is closed, with the requests on it");
            }
        }
    }

    /// Waits until a piece of a body can be added. The piece is added before the permit is dropped.
    async fn room(&self) -> Option<SemaphorePermit<'_>> {
        let permit = self.pieces.acquire().await.ok();
        loop {
            let sent = self.has_room.notified();
            {
                let state = self.lock();
                if !state.is_open() || state.n_outgoing() <= MAX_UNSENT_BYTES {
                    return permit;
                }
            }
            sent.await;
        }
    }
}

impl NodeConnection {
    /// Starts to read and write. `node` is the address for the log.
    pub(super) fn over(io: impl AsyncRead + AsyncWrite + Send + 'static, node: String) -> Arc<NodeConnection> {
        let shared = Arc::new(Shared {
            node,
            state: Mutex::default(),
            has_bytes: Notify::new(),
            has_room: Notify::new(),
            pieces: Semaphore::new(MAX_PIECES_AT_ONCE),
            bodies: Semaphore::new(MAX_PARTIAL_BODIES),
        });
        let task = tokio::spawn(run(io, EndGuard(Arc::clone(&shared))));
        Arc::new(NodeConnection { shared, _task: AbortOnDropHandle::new(task) })
    }

    /// Returns true if streams can be started.
    pub(super) fn takes_streams(&self) -> bool {
        self.shared.lock().takes_streams()
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

    /// Sends the pieces of a body after the first one. Stops if the stream ends: a cancel then says so.
    pub(super) async fn send_rest(&self, stream: u32, body: &[u8]) {
        let mut rest = body.get(MAX_PIECE_BYTES..).unwrap_or_default();
        while !rest.is_empty() {
            let _room = self.shared.room().await;
            rest = self.shared.lock().add_piece(stream, rest);
            self.shared.has_bytes.notify_one();
        }
    }

    /// Grants a stream more credit, if it has not ended.
    pub(super) fn grant(&self, stream: u32, credit: u32) {
        self.shared.lock().grant(stream, credit);
        self.shared.has_bytes.notify_one();
    }

    /// Tells a stream of drafts the next tokens of its sequence, if it has not ended.
    pub(super) fn tell(&self, stream: u32, at: u32, tokens: &[Token]) {
        self.shared.lock().tell(stream, at, tokens);
        self.shared.has_bytes.notify_one();
    }

    /// Ends a stream that its reader has left.
    pub(super) fn cancel(&self, stream: u32) {
        self.shared.lock().cancel(stream);
        self.shared.has_bytes.notify_one();
    }
}

/// Ends the connection however its task ends, so that no stream waits for a task that has panicked.
struct EndGuard(Arc<Shared>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        // Dropped without a panic: by the last one who used it, or by the end of this process.
        let failed = std::thread::panicking();
        self.0.end(if failed { &NodeConnectionEnd::Failed } else { &NodeConnectionEnd::Unused });
    }
}

/// Reads and writes until the connection ends. Then all its streams are lost.
async fn run(io: impl AsyncRead + AsyncWrite + Send + 'static, guard: EndGuard) {
    let shared = &*guard.0;
    let (reader, writer) = tokio::io::split(io);
    let Err(end) = tokio::select! {
        end = read(reader, shared) => end,
        end = write(writer, shared) => end,
    };
    shared.end(&end);
}

async fn read(mut io: ReadHalf<impl AsyncRead + AsyncWrite>, shared: &Shared) -> Result<Infallible, NodeConnectionEnd> {
    let mut inbox = FrameBuffer::new(MAX_NODE_PAYLOAD);
    loop {
        let shown = awake::timeout(SILENCE_TIMEOUT, life(&mut io, &mut inbox, shared)).await;
        shown.map_err(|_| NodeConnectionEnd::Silent)??;
    }
}

/// Reads until the node has shown that it is alive: by a whole frame, or by much of one.
async fn life(
    io: &mut ReadHalf<impl AsyncRead + AsyncWrite>,
    inbox: &mut FrameBuffer,
    shared: &Shared,
) -> Result<(), NodeConnectionEnd> {
    let mut n_read = 0;
    let mut has_frame = false;
    while !has_frame && n_read < SIGN_OF_LIFE_BYTES {
        let space = inbox.space();
        space.reserve(READ_BYTES);
        match io.read_buf(space).await? {
            0 => return Err(NodeConnectionEnd::Closed),
            n => n_read += n,
        }
        let mut state = shared.lock();
        while let Some(frame) = inbox.next_frame().map_err(NodeFault::from)? {
            has_frame = true;
            state.receive(frame)?;
        }
        if state.is_unread() {
            return Err(NodeConnectionEnd::Unread);
        }
        if state.has_urgent() {
            shared.has_bytes.notify_one();
        }
    }
    Ok(())
}

async fn write(
    mut io: WriteHalf<impl AsyncRead + AsyncWrite>,
    shared: &Shared,
) -> Result<Infallible, NodeConnectionEnd> {
    let mut bytes = BytesMut::new();
    loop {
        shared.lock().take(&mut bytes);
        if bytes.is_empty() {
            shared.has_bytes.notified().await;
            continue;
        }
        while !bytes.is_empty() {
            let written = awake::timeout(WRITE_TIMEOUT, io.write_buf(&mut bytes)).await;
            if written.map_err(|_| NodeConnectionEnd::Unread)?? == 0 {
                return Err(NodeConnectionEnd::Closed);
            }
        }
        awake::timeout(WRITE_TIMEOUT, io.flush()).await.map_err(|_| NodeConnectionEnd::Unread)??;
        bytes.clear();
        shared.has_room.notify_waiters();
    }
}
