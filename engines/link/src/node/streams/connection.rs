//! A node's end of a connection: reads the endpoint's frames, polls its streams, and writes what they have as few frames.
//!
//! One task does all of this. It polls only streams that were woken. What their engine sends in one go is collected in
//! one buffer, so the tokens of an engine's step leave in one frame and one write.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use baton_schemas::streams::{FrameBuffer, MAX_CLIENT_PAYLOAD};
use bytes::Buf;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, Sleep};
use tokio_util::io::poll_read_buf;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::super::{NodeService, SIGN_OF_LIFE};
use super::endpoint_deadline::EndpointDeadline;
use super::open_streams::{EndpointFault, OpenStreams};
use super::run::MAX_UNSENT_BYTES;

/// Bytes that are read before streams have their turn.
const READ_BYTES: usize = 64 << 10;
const MAX_READS_PER_TURN: usize = 4;

/// How often the task lets others run while more tokens keep coming, before it writes. The thread of an engine needs a
/// moment to send the tokens of a step.
const MAX_COLLECTING_TURNS: u32 = 4;
const MAX_COLLECTING: Duration = Duration::from_micros(100);

/// So few streams have no tokens to collect: one of loads, and one that generates.
const MAX_UNCOLLECTED_STREAMS: usize = 2;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum EndpointConnectionEnd {
    /// The endpoint has closed it.
    #[error("the endpoint left")]
    Left,
    /// The node stops, and the last stream has ended.
    #[error("the node stops")]
    Drained,
    /// The socket failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Bytes wait, and the endpoint takes too few of them.
    #[error("the endpoint reads too little before the deadline")]
    Unread,
    /// The endpoint broke the protocol.
    #[error("{0}")]
    Fault(#[from] EndpointFault),
}

/// Serves streams until the endpoint leaves or breaks the protocol. Once `closing` is cancelled, refuses new streams and
/// returns after the last one. Returning or dropping the future cancels all streams.
pub(super) async fn serve(
    io: impl AsyncRead + AsyncWrite + Unpin + Send,
    node: NodeService,
    closing: CancellationToken,
) {
    let mut connection = EndpointConnection {
        io,
        streams: OpenStreams::new(node),
        inbox: FrameBuffer::new(MAX_CLIENT_PAYLOAD),
        sign_of_life: Box::pin(tokio::time::sleep(SIGN_OF_LIFE)),
        last_written: Instant::now(),
        last_tick: Instant::now(),
        deadline: EndpointDeadline::new(),
        n_collecting: 0,
        collecting_since: Instant::now(),
        closing: Box::pin(closing.cancelled_owned()),
    };
    let end = std::future::poll_fn(|context| connection.poll(context)).await;
    let EndpointConnection { mut io, streams, .. } = connection;
    let n_steps = streams.outbox.lock().n_steps();
    let n_streams = streams.n_open();
    // Frees their slots before anything waits for the endpoint.
    drop(streams);
    match end {
        EndpointConnectionEnd::Left | EndpointConnectionEnd::Drained | EndpointConnectionEnd::Io(_) => {
            tracing::debug!(%end, n_streams, n_steps, "a connection of streams has ended");
        }
        EndpointConnectionEnd::Fault(_) | EndpointConnectionEnd::Unread => {
            tracing::warn!(%end, n_streams, "a connection of streams is closed");
        }
    }
    // Ends TLS in order. It fails if the endpoint has left.
    drop(tokio::time::timeout(SIGN_OF_LIFE, io.shutdown()).await);
}

struct EndpointConnection<S> {
    io: S,
    streams: OpenStreams,
    inbox: FrameBuffer,
    sign_of_life: Pin<Box<Sleep>>,
    last_written: Instant,
    /// When the time of incomplete bodies was counted last.
    last_tick: Instant,
    deadline: EndpointDeadline,
    /// Turns in a row in which tokens came and nothing was written.
    n_collecting: u32,
    collecting_since: Instant,
    closing: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> EndpointConnection<S> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<EndpointConnectionEnd> {
        match self.turn(context) {
            Ok(()) if self.streams.is_drained() => Poll::Ready(EndpointConnectionEnd::Drained),
            Ok(()) => Poll::Pending,
            Err(end) => Poll::Ready(end),
        }
    }

    /// Reads, polls the streams, and writes, each as far as possible without waiting.
    fn turn(&mut self, context: &mut Context<'_>) -> Result<(), EndpointConnectionEnd> {
        if !self.streams.refuses_new() && self.closing.as_mut().poll(context).is_ready() {
            self.streams.refuse_new();
        }
        self.read(context)?;
        let n_before = self.streams.outbox.lock().len();
        self.streams.poll(context);
        if self.collects(n_before) {
            context.waker().wake_by_ref();
            return Ok(());
        }
        self.n_collecting = 0;
        self.show_life(context);
        self.write(context)?;
        self.streams.wake_if_room();
        Ok(())
    }

    /// Returns true if bytes were added and others may follow at once, so that one write takes them all.
    fn collects(&mut self, n_before: usize) -> bool {
        let n_bytes = self.streams.outbox.lock().len();
        if n_bytes == n_before || n_bytes >= MAX_UNSENT_BYTES || self.streams.n_running() <= MAX_UNCOLLECTED_STREAMS {
            return false;
        }
        if self.n_collecting == 0 {
            self.collecting_since = Instant::now();
        }
        self.n_collecting += 1;
        self.n_collecting <= MAX_COLLECTING_TURNS && self.collecting_since.elapsed() < MAX_COLLECTING
    }

    fn read(&mut self, context: &mut Context<'_>) -> Result<(), EndpointConnectionEnd> {
        for _ in 0..MAX_READS_PER_TURN {
            let space = self.inbox.space();
            space.reserve(READ_BYTES);
            let Poll::Ready(n) = poll_read_buf(Pin::new(&mut self.io), context, space)? else { return Ok(()) };
            if n == 0 {
                return Err(EndpointConnectionEnd::Left);
            }
            while let Some(frame) = self.inbox.next_frame().map_err(EndpointFault::from)? {
                self.streams.receive(frame)?;
            }
        }
        context.waker().wake_by_ref();
        Ok(())
    }

    fn write(&mut self, context: &mut Context<'_>) -> Result<(), EndpointConnectionEnd> {
        let mut out = self.streams.outbox.lock();
        let bytes = out.frames();
        let mut n_written = 0;
        let is_blocked = loop {
            if bytes.is_empty() {
                // TLS keeps bytes until it is flushed.
                break Pin::new(&mut self.io).poll_flush(context)?.is_pending();
            }
            match Pin::new(&mut self.io).poll_write(context, bytes)? {
                Poll::Ready(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Poll::Ready(n) => {
                    bytes.advance(n);
                    n_written += n;
                }
                // Without a flush: a socket's flush is always ready, which would end its write deadline.
                Poll::Pending => break true,
            }
        };
        if n_written > 0 {
            self.last_written = Instant::now();
        }
        if !is_blocked {
            self.deadline.stop();
        } else if self.deadline.poll_missed(context, n_written, bytes.len()).is_ready() {
            return Err(EndpointConnectionEnd::Unread);
        }
        Ok(())
    }

    /// Adds a sign of life after a second without a frame, and ends streams whose body does not come.
    fn show_life(&mut self, context: &mut Context<'_>) {
        while self.sign_of_life.as_mut().poll(context).is_ready() {
            let silent = self.last_written.elapsed() >= SIGN_OF_LIFE;
            if silent && self.streams.outbox.lock().is_empty() {
                self.streams.outbox.lock().alive();
            }
            let from = if silent { Instant::now() } else { self.last_written };
            self.sign_of_life.as_mut().reset(from + SIGN_OF_LIFE);
            // A stop of this process counts as a short time.
            self.streams.age_bodies(self.last_tick.elapsed().min(2 * SIGN_OF_LIFE));
            self.last_tick = Instant::now();
        }
    }
}
