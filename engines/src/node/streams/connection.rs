//! A node's end of a connection: starts, polls and cancels its streams, and writes what they have as few frames.
//!
//! One task does all of this. It polls only streams that were woken. What their engine sends in one go is collected in
//! one buffer, so the tokens of an engine's step leave in one frame and one write.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use baton_schemas::EngineError;
use baton_schemas::streams::{
    ClientFrame, FrameBuffer, FrameError, MAX_CLIENT_PAYLOAD, MAX_PARTIAL_BODIES, RawFrame, Start, StreamWork,
};
use bytes::Buf;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep};
use tokio_util::io::poll_read_buf;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tokio_util::task::AbortOnDropHandle;
use tracing::{Instrument, Span};

use super::super::connection::DEADLINES;
use super::super::traced::stream_span;
use super::super::{NodeService, SIGN_OF_LIFE, loads};
use super::limits::MAX_STREAMS;
use super::reader::EndpointDeadline;
use super::run::{MAX_UNSENT_BYTES, Outbox, RunPhase, StreamControl, StreamRun};
use super::work::{RequestBody, begin};

/// Refusals are added to the bytes that wait for the socket only up to this length. Streams leave less.
const MAX_UNSENT_WITH_REFUSALS: usize = 2 << 20;

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
enum ConnectionEnd {
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
    /// The endpoint's bytes do not keep to the protocol.
    #[error("the endpoint sent {0}")]
    Frame(#[from] FrameError),
    /// Its frames make no sense in their order.
    #[error("the endpoint broke the protocol of streams: {0}")]
    Protocol(&'static str),
}

/// Serves streams until the endpoint leaves or breaks the protocol. Once `closing` is cancelled, refuses new streams and
/// returns after the last one. Returning or dropping the future cancels all streams.
pub(super) async fn serve(
    io: impl AsyncRead + AsyncWrite + Unpin + Send,
    node: NodeService,
    closing: CancellationToken,
) {
    let mut connection = Connection {
        io,
        streams: Streams::new(node),
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
    let Connection { mut io, streams, .. } = connection;
    let n_steps = streams.outbox.lock().n_steps();
    let n_streams = streams.open.len();
    // Frees their slots before anything waits for the endpoint.
    drop(streams);
    match end {
        ConnectionEnd::Left | ConnectionEnd::Drained | ConnectionEnd::Io(_) => {
            tracing::debug!(%end, n_streams, n_steps, "a connection of streams has ended");
        }
        ConnectionEnd::Frame(_) | ConnectionEnd::Protocol(_) | ConnectionEnd::Unread => {
            tracing::warn!(%end, n_streams, "a connection of streams is closed");
        }
    }
    // Ends TLS in order. It fails if the endpoint has left.
    drop(tokio::time::timeout(SIGN_OF_LIFE, io.shutdown()).await);
}

struct Connection<S> {
    io: S,
    streams: Streams,
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

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<ConnectionEnd> {
        match self.turn(context) {
            Ok(()) if self.streams.is_drained() => Poll::Ready(ConnectionEnd::Drained),
            Ok(()) => Poll::Pending,
            Err(end) => Poll::Ready(end),
        }
    }

    /// Reads, polls the streams, and writes, each as far as possible without waiting.
    fn turn(&mut self, context: &mut Context<'_>) -> Result<(), ConnectionEnd> {
        if !self.streams.refuses_new && self.closing.as_mut().poll(context).is_ready() {
            self.streams.refuses_new = true;
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
        if n_bytes == n_before || n_bytes >= MAX_UNSENT_BYTES || self.streams.running.len() <= MAX_UNCOLLECTED_STREAMS {
            return false;
        }
        if self.n_collecting == 0 {
            self.collecting_since = Instant::now();
        }
        self.n_collecting += 1;
        self.n_collecting <= MAX_COLLECTING_TURNS && self.collecting_since.elapsed() < MAX_COLLECTING
    }

    fn read(&mut self, context: &mut Context<'_>) -> Result<(), ConnectionEnd> {
        for _ in 0..MAX_READS_PER_TURN {
            let space = self.inbox.space();
            space.reserve(READ_BYTES);
            let Poll::Ready(n) = poll_read_buf(Pin::new(&mut self.io), context, space)? else { return Ok(()) };
            if n == 0 {
                return Err(ConnectionEnd::Left);
            }
            while let Some(frame) = self.inbox.next_frame()? {
                self.streams.receive(frame)?;
            }
        }
        context.waker().wake_by_ref();
        Ok(())
    }

    fn write(&mut self, context: &mut Context<'_>) -> Result<(), ConnectionEnd> {
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
            return Err(ConnectionEnd::Unread);
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

/// The streams of a connection.
struct Streams {
    node: NodeService,
    outbox: Outbox,
    running: FuturesUnordered<StreamRun>,
    open: HashMap<u32, Arc<StreamControl>>,
    /// Streams whose body is not complete.
    partial: HashMap<u32, PartialBody>,
    /// The highest number of a stream so far.
    newest: u32,
    refuses_new: bool,
}

/// A stream whose body is not complete.
struct PartialBody {
    n_left: usize,
    /// How long no piece has come.
    silent: Duration,
    /// `None`: it was refused, so the rest of its body is dropped.
    opened: Option<Opened>,
}

/// A stream that was not refused.
struct Opened {
    body: RequestBody,
    place: Option<OwnedSemaphorePermit>,
    work: StreamWork,
    span: Span,
    control: Arc<StreamControl>,
}

impl Streams {
    fn new(node: NodeService) -> Streams {
        Streams {
            node,
            outbox: Outbox::default(),
            running: FuturesUnordered::new(),
            open: HashMap::new(),
            partial: HashMap::new(),
            newest: 0,
            refuses_new: false,
        }
    }

    /// Returns true if there are no streams and no bytes of any, and none may come.
    fn is_drained(&self) -> bool {
        self.refuses_new && self.open.is_empty() && self.outbox.lock().is_empty()
    }

    /// Polls the streams that were woken.
    fn poll(&mut self, context: &mut Context<'_>) {
        while let Poll::Ready(Some(ended)) = self.running.poll_next_unpin(context) {
            self.open.remove(&ended);
        }
    }

    /// Wakes the streams that waited until fewer bytes wait for the socket.
    fn wake_if_room(&self) {
        if self.outbox.has_room_again() {
            self.open.values().for_each(|control| control.wake());
        }
    }

    fn receive(&mut self, frame: RawFrame<'_>) -> Result<(), ConnectionEnd> {
        let stream = frame.stream;
        match ClientFrame::parse(frame)? {
            ClientFrame::Start(start) => self.start(stream, &start),
            ClientFrame::Body(piece) => self.add(stream, piece),
            // Frames for a stream that has ended may have crossed its last frame.
            _ if stream > self.newest => Err(ConnectionEnd::Protocol("a frame for a stream that was never started")),
            ClientFrame::Credit(credit) => match self.open.get(&stream) {
                Some(control) if !control.grant(credit) => {
                    Err(ConnectionEnd::Protocol("more credit than a stream may have"))
                }
                _ => Ok(()),
            },
            ClientFrame::Cancel => {
                if self.partial.remove(&stream).is_some() {
                    self.open.remove(&stream);
                }
                self.open.get(&stream).into_iter().for_each(|control| control.cancel());
                Ok(())
            }
        }
    }

    fn start(&mut self, stream: u32, start: &Start<'_>) -> Result<(), ConnectionEnd> {
        if stream <= self.newest {
            return Err(ConnectionEnd::Protocol("a stream's number does not follow the one before"));
        }
        self.newest = stream;
        let n_left = start.body_bytes - start.piece.len();
        if n_left > 0 && self.partial.len() >= MAX_PARTIAL_BODIES {
            return Err(ConnectionEnd::Protocol("too many bodies at once"));
        }
        let opened = match self.open(stream, start) {
            Ok(opened) => Some(opened),
            Err(reason) => {
                let mut out = self.outbox.lock();
                if out.len() >= MAX_UNSENT_WITH_REFUSALS {
                    return Err(ConnectionEnd::Protocol("streams are started while their refusals are not read"));
                }
                out.error(stream, EngineError::Unavailable { reason: reason.into() });
                None
            }
        };
        self.advance(stream, PartialBody { n_left, silent: Duration::ZERO, opened });
        Ok(())
    }

    /// Opens a stream and charges what it holds. Errors: the reason to refuse it.
    fn open(&mut self, stream: u32, start: &Start<'_>) -> Result<Opened, &'static str> {
        const TOO_MANY: &str = "the node has too many streams";
        if self.refuses_new {
            return Err("the node is stopping");
        }
        if self.open.len() >= MAX_STREAMS + loads::MAX_STREAMS {
            return Err(TOO_MANY);
        }
        let limits = &self.node.stream_limits;
        let place = match start.work {
            // These have a limit of their own.
            StreamWork::Loads => None,
            StreamWork::Generate | StreamWork::Embed => Some(limits.stream().ok_or(TOO_MANY)?),
        };
        let charge = if start.piece.len() < start.body_bytes {
            Some(limits.body(start.body_bytes).ok_or("the node receives too many long requests")?)
        } else {
            None
        };
        let control = StreamControl::new(start);
        self.open.insert(stream, Arc::clone(&control));
        Ok(Opened {
            body: RequestBody { bytes: start.piece.to_vec(), charge },
            place,
            work: start.work,
            span: stream_span(start.work, start.traceparent),
            control,
        })
    }

    /// Ends streams whose body does not come. Their numbers stay, in case the rest comes late.
    fn age_bodies(&mut self, passed: Duration) {
        for (stream, partial) in &mut self.partial {
            partial.silent += passed;
            if partial.silent >= DEADLINES.read && partial.opened.take().is_some() {
                self.open.remove(stream);
                tracing::info!("a stream is ended: the rest of its request did not come before the deadline");
                let error = EngineError::lost("the rest of the request did not come in time");
                self.outbox.lock().error(*stream, error);
            }
        }
    }

    fn add(&mut self, stream: u32, piece: &[u8]) -> Result<(), ConnectionEnd> {
        let Some(mut partial) = self.partial.remove(&stream) else {
            return Err(ConnectionEnd::Protocol("a piece of a body that is complete or was never begun"));
        };
        let n_left = partial.n_left.checked_sub(piece.len());
        partial.n_left = n_left.ok_or(ConnectionEnd::Protocol("a body that is longer than it said"))?;
        partial.silent = Duration::ZERO;
        if let Some(opened) = &mut partial.opened {
            opened.body.bytes.extend_from_slice(piece);
        }
        self.advance(stream, partial);
        Ok(())
    }

    /// Runs a stream once its body is complete.
    fn advance(&mut self, stream: u32, partial: PartialBody) {
        match partial {
            PartialBody { n_left: 0, opened: Some(opened), .. } => self.run(stream, opened),
            PartialBody { n_left: 0, opened: None, .. } => {}
            partial => drop(self.partial.insert(stream, partial)),
        }
    }

    fn run(&mut self, stream: u32, opened: Opened) {
        let Opened { body, place, work, span, control } = opened;
        let begun = tokio::spawn(begin(self.node.clone(), work, body).instrument(span.clone()));
        self.running.push(StreamRun {
            stream,
            control,
            outbox: self.outbox.clone(),
            span,
            phase: RunPhase::Beginning(AbortOnDropHandle::new(begun)),
            held: None,
            shortage: None,
            _place: place,
        });
    }
}
