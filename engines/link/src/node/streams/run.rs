//! One stream of a connection: from its request to its last frame.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use baton_schemas::EngineError;
use baton_schemas::embed::EmbedEvent;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::streams::{MAX_CREDIT, NodeFrameWriter, StartFrame, StreamWork, ToldTokens, UnwritableFrame};
use futures::task::AtomicWaker;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinError;
use tokio::time::{Instant, Sleep};
use tokio_util::task::AbortOnDropHandle;
use tracing::Span;

use super::super::connection::DEADLINES;
use super::work::{WorkEvent, WorkStream};
use crate::awake;

/// Events of one stream that are taken before the other streams have their turn.
const MAX_EVENTS_PER_TURN: usize = 16;

/// Streams send nothing while more bytes than this wait for the socket: their tokens wait in the engine.
pub(super) const MAX_UNSENT_BYTES: usize = 256 << 10;

/// The credit that the reader of a stream without credit grants until the deadline, or more. Without this minimum a
/// reader that grants a token at a time would keep its slot for weeks.
const MIN_GRANT: u32 = 32;

/// The frames that wait for the connection. All streams of a connection run in its task, so the lock is always free.
#[derive(Clone, Default)]
pub(super) struct Outbox(Arc<SharedOutbox>);

#[derive(Default)]
struct SharedOutbox {
    frames: Mutex<NodeFrameWriter>,
    /// A stream waits until fewer bytes are here.
    is_awaited: AtomicBool,
}

impl Outbox {
    pub(super) fn lock(&self) -> MutexGuard<'_, NodeFrameWriter> {
        self.0.frames.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if streams have to wait. Then [`Outbox::has_room_again`] says when to wake them.
    fn is_full(&self) -> bool {
        let is_full = self.lock().len() >= MAX_UNSENT_BYTES;
        if is_full {
            self.0.is_awaited.store(true, Ordering::Relaxed);
        }
        is_full
    }

    /// Returns true once there is room again for streams that have waited for it.
    pub(super) fn has_room_again(&self) -> bool {
        self.lock().len() < MAX_UNSENT_BYTES && self.0.is_awaited.swap(false, Ordering::Relaxed)
    }
}

/// The connection's hold on a stream: credit, and its end.
#[derive(Debug, Default)]
pub(super) struct StreamControl {
    credit: AtomicU32,
    /// All credit that was granted after the first, modulo 2^32.
    n_granted: AtomicU32,
    /// What the reader grants at least, once the stream has no credit.
    min_grant: u32,
    is_cancelled: AtomicBool,
    waker: AtomicWaker,
    /// Where tokens go that are told to a stream of drafts. Closed, if more came than may wait.
    told: Option<Mutex<Option<mpsc::Sender<ToldTokens>>>>,
}

impl StreamControl {
    /// `told`: where tokens go that are told to a stream of drafts.
    pub(super) fn new(start: &StartFrame<'_>, told: Option<mpsc::Sender<ToldTokens>>) -> Arc<StreamControl> {
        let min_grant = match start.work {
            StreamWork::Generate => MIN_GRANT,
            // Vectors are large, so their reader may grant few.
            StreamWork::Embed | StreamWork::Loads | StreamWork::Draft => (start.credit / 2).clamp(1, MIN_GRANT),
        };
        let told = told.map(|told| Mutex::new(Some(told)));
        Arc::new(StreamControl { credit: AtomicU32::new(start.credit), min_grant, told, ..StreamControl::default() })
    }

    /// Passes told tokens on. If more come than may wait, the stream ends. Returns false if it is no stream of drafts.
    pub(super) fn tell(&self, tokens: ToldTokens) -> bool {
        let Some(told) = &self.told else { return false };
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.as_ref().is_some_and(|sender| sender.try_send(tokens).is_err()) {
            *told = None;
        }
        true
    }

    /// No further tokens are told: a stream of drafts ends.
    pub(super) fn end_telling(&self) {
        self.told.iter().for_each(|told| drop(told.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }

    /// Lets the stream run again.
    pub(super) fn wake(&self) {
        self.waker.wake();
    }

    /// Adds credit. Returns false if the sum is out of range.
    pub(super) fn grant(&self, credit: u32) -> bool {
        let sum = self.credit.load(Ordering::Relaxed).saturating_add(credit);
        self.credit.store(sum.min(MAX_CREDIT), Ordering::Relaxed);
        self.n_granted.fetch_add(credit, Ordering::Relaxed);
        self.waker.wake();
        sum <= MAX_CREDIT
    }

    /// Ends the stream without another frame.
    pub(super) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        self.waker.wake();
    }

    fn has_credit(&self) -> bool {
        self.credit.load(Ordering::Relaxed) > 0
    }

    /// Takes one credit, which the stream has.
    fn take_credit(&self) {
        let credit = self.credit.load(Ordering::Relaxed);
        self.credit.store(credit.saturating_sub(1), Ordering::Relaxed);
    }
}

/// A running stream. As a future it writes frames whenever its engine has events, and returns its number at its end.
/// Dropping it cancels the request.
pub(super) struct StreamRun {
    pub(super) stream: u32,
    pub(super) control: Arc<StreamControl>,
    pub(super) outbox: Outbox,
    pub(super) span: Span,
    pub(super) phase: RunPhase,
    /// The next event, for which there is no credit.
    pub(super) held: Option<WorkEvent>,
    /// Since when the reader owes credit.
    pub(super) shortage: Option<Shortage>,
    /// Counts as one of the node's streams.
    pub(super) _place: Option<OwnedSemaphorePermit>,
}

/// An event had to wait for credit.
pub(super) struct Shortage {
    /// By then the reader has granted [`StreamControl::min_grant`].
    deadline: Pin<Box<Sleep>>,
    /// [`StreamControl::n_granted`] when it began.
    n_granted: u32,
}

impl Shortage {
    fn new(n_granted: u32) -> Shortage {
        Shortage { deadline: Box::pin(tokio::time::sleep(DEADLINES.read)), n_granted }
    }
}

/// The phase of a stream.
pub(super) enum RunPhase {
    /// The request is read and given to the engine, in a task of its own because that may take long.
    Beginning(AbortOnDropHandle<Result<WorkStream, EngineError>>),
    /// The engine has accepted it.
    Running(WorkStream),
}

impl Future for StreamRun {
    type Output = u32;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<u32> {
        let run = &mut *self;
        run.control.waker.register(context.waker());
        let span = run.span.clone();
        let _entered = span.enter();
        for _ in 0..MAX_EVENTS_PER_TURN {
            if run.control.is_cancelled.load(Ordering::Relaxed) {
                return Poll::Ready(run.stream);
            }
            if run.outbox.is_full() {
                return Poll::Pending;
            }
            if ready!(run.poll_event(context)).is_last() {
                return Poll::Ready(run.stream);
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

/// The next step of a stream.
enum StreamTurn {
    GoesOn,
    WasLast,
}

impl StreamTurn {
    fn is_last(&self) -> bool {
        matches!(self, StreamTurn::WasLast)
    }
}

impl StreamRun {
    /// Writes the next event.
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<StreamTurn> {
        let events = match &mut self.phase {
            RunPhase::Running(events) => events,
            RunPhase::Beginning(begun) => {
                match ready!(Pin::new(begun).poll(context)).unwrap_or_else(|error| Err(begin_failed(&error))) {
                    Ok(events) => {
                        self.phase = RunPhase::Running(events);
                        self.outbox.lock().accepted(self.stream);
                        return Poll::Ready(StreamTurn::GoesOn);
                    }
                    Err(error) => return Poll::Ready(self.fail(error)),
                }
            }
        };
        if self.control.has_credit()
            && let Some(event) = self.held.take()
        {
            return Poll::Ready(self.write_or_fail(&event));
        }
        // A token waits for credit, and so does its engine. Of loads, only the last one waits.
        let waits = self.held.is_some() && !matches!(events, WorkStream::Loads(_));
        let next = if waits { Poll::Pending } else { events.poll_next(context) };
        let next = match next {
            Poll::Ready(next) => next,
            Poll::Pending => {
                if self.held.is_some() {
                    ready!(self.poll_reader_deadline(context));
                    tracing::info!("a stream is ended: its reader took too little of it before the deadline");
                    return Poll::Ready(self.fail(EngineError::lost("the reader granted too little credit in time")));
                }
                return Poll::Pending;
            }
        };
        match next {
            Some(Ok(event)) if event.takes_credit() && !self.control.has_credit() => {
                self.held = Some(event);
                Poll::Ready(StreamTurn::GoesOn)
            }
            Some(Ok(event)) => Poll::Ready(self.write_or_fail(&event)),
            Some(Err(error)) => Poll::Ready(self.fail(error)),
            None => {
                match self.phase {
                    RunPhase::Running(WorkStream::Loads(_) | WorkStream::Drafts(_)) => {
                        self.outbox.lock().end(self.stream)
                    }
                    _ => self.outbox.lock().error(self.stream, EngineError::lost("the engine's stream ended early")),
                }
                Poll::Ready(StreamTurn::WasLast)
            }
        }
    }

    fn write_or_fail(&self, event: &WorkEvent) -> StreamTurn {
        self.write(event).unwrap_or_else(|error| self.fail(unwritable(&error)))
    }

    fn write(&self, event: &WorkEvent) -> Result<StreamTurn, UnwritableFrame> {
        let mut out = self.outbox.lock();
        match event {
            WorkEvent::Sequence(SequenceEvent::Token(token)) => out.token(self.stream, token)?,
            WorkEvent::Embed(EmbedEvent::Vector(vector)) => out.vector(self.stream, vector)?,
            WorkEvent::Load(load) => out.event(self.stream, load)?,
            WorkEvent::Drafted(drafted) => {
                out.drafted(self.stream, drafted)?;
                return Ok(StreamTurn::GoesOn);
            }
            WorkEvent::Sequence(
                event @ (SequenceEvent::Started { .. } | SequenceEvent::PrefillBegun | SequenceEvent::Handoff(_)),
            ) => {
                out.event(self.stream, event)?;
                return Ok(StreamTurn::GoesOn);
            }
            WorkEvent::Sequence(event @ SequenceEvent::Finished { .. }) => {
                out.event(self.stream, event)?;
                return Ok(StreamTurn::WasLast);
            }
            WorkEvent::Embed(event @ EmbedEvent::Begun) => {
                out.event(self.stream, event)?;
                return Ok(StreamTurn::GoesOn);
            }
            WorkEvent::Embed(event @ EmbedEvent::Finished { .. }) => {
                out.event(self.stream, event)?;
                return Ok(StreamTurn::WasLast);
            }
        }
        self.control.take_credit();
        Ok(StreamTurn::GoesOn)
    }

    fn fail(&self, error: EngineError) -> StreamTurn {
        self.outbox.lock().error(self.stream, error);
        StreamTurn::WasLast
    }

    /// Waits until the reader has granted too little credit for too long. Time in which this process was stopped does
    /// not count.
    fn poll_reader_deadline(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let n_granted = self.control.n_granted.load(Ordering::Relaxed);
        let shortage = self.shortage.get_or_insert_with(|| Shortage::new(n_granted));
        if n_granted.wrapping_sub(shortage.n_granted) >= self.control.min_grant {
            *shortage = Shortage::new(n_granted);
        }
        loop {
            ready!(shortage.deadline.as_mut().poll(context));
            if !awake::has_overslept(shortage.deadline.deadline()) {
                return Poll::Ready(());
            }
            shortage.deadline.as_mut().reset(Instant::now() + DEADLINES.read);
        }
    }
}

fn begin_failed(error: &JoinError) -> EngineError {
    EngineError::internal(format!("the request could not be begun: {error}"))
}

fn unwritable(error: &UnwritableFrame) -> EngineError {
    match error {
        UnwritableFrame::NotFinite => EngineError::NotFinite,
        UnwritableFrame::TooLong { .. } | UnwritableFrame::Json => {
            EngineError::internal(format!("an event cannot be sent: {error}"))
        }
    }
}
