//! One stream of a connection: from its request to its last frame.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use baton_schemas::EngineError;
use baton_schemas::embed::EmbedEvent;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::streams::{MAX_CREDIT, NodeFrameWriter, UnwritableFrame};
use futures::task::AtomicWaker;
use tokio::task::JoinError;
use tokio::time::{Instant, Sleep};
use tokio_util::task::AbortOnDropHandle;
use tracing::Span;

use super::super::connection::DEADLINES;
use super::work::{WorkEvent, WorkStream};
use crate::awake;

/// Events of one stream that are taken before the other streams have their turn.
const MAX_EVENTS_PER_TURN: usize = 16;

/// The frames that wait for the connection. All streams of a connection run in its task, so the lock is always free.
#[derive(Clone, Default)]
pub(super) struct Outbox(Arc<Mutex<NodeFrameWriter>>);

impl Outbox {
    pub(super) fn lock(&self) -> MutexGuard<'_, NodeFrameWriter> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the connection can do to a stream.
#[derive(Debug, Default)]
pub(super) struct StreamControl {
    credit: AtomicU32,
    is_cancelled: AtomicBool,
    waker: AtomicWaker,
}

impl StreamControl {
    pub(super) fn new(credit: u32) -> Arc<StreamControl> {
        Arc::new(StreamControl { credit: AtomicU32::new(credit), ..StreamControl::default() })
    }

    /// Adds credit. Returns false if the sum is out of range.
    pub(super) fn grant(&self, credit: u32) -> bool {
        let sum = self.credit.load(Ordering::Relaxed).saturating_add(credit);
        self.credit.store(sum.min(MAX_CREDIT), Ordering::Relaxed);
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

    /// Takes one credit, which the stream has: it is polled only then.
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
    /// Runs while the stream has no credit.
    pub(super) reader_deadline: Option<Pin<Box<Sleep>>>,
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
            if run.control.is_cancelled.load(Ordering::Relaxed) || ready!(run.poll_event(context)).is_last() {
                return Poll::Ready(run.stream);
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

/// Whether a stream goes on.
enum Turn {
    GoesOn,
    WasLast,
}

impl Turn {
    fn is_last(&self) -> bool {
        matches!(self, Turn::WasLast)
    }
}

impl StreamRun {
    /// Writes the next event.
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Turn> {
        let events = match &mut self.phase {
            RunPhase::Running(events) => events,
            RunPhase::Beginning(begun) => {
                match ready!(Pin::new(begun).poll(context)).unwrap_or_else(|error| Err(begin_failed(&error))) {
                    Ok(events) => {
                        self.phase = RunPhase::Running(events);
                        self.outbox.lock().accepted(self.stream);
                        return Poll::Ready(Turn::GoesOn);
                    }
                    Err(error) => return Poll::Ready(self.fail(error)),
                }
            }
        };
        if !self.control.has_credit() {
            ready!(self.poll_reader_deadline(context));
            tracing::info!("a stream is ended: its reader took too little of it before the deadline");
            return Poll::Ready(self.fail(EngineError::lost("the reader granted no credit in time")));
        }
        self.reader_deadline = None;
        match ready!(events.poll_next(context)) {
            Some(Ok(event)) => Poll::Ready(self.write(&event).unwrap_or_else(|error| self.fail(unwritable(&error)))),
            Some(Err(error)) => Poll::Ready(self.fail(error)),
            None => {
                match self.phase {
                    RunPhase::Running(WorkStream::Loads(_)) => self.outbox.lock().end(self.stream),
                    _ => self.outbox.lock().error(self.stream, EngineError::lost("the engine's stream ended early")),
                }
                Poll::Ready(Turn::WasLast)
            }
        }
    }

    fn write(&self, event: &WorkEvent) -> Result<Turn, UnwritableFrame> {
        let mut out = self.outbox.lock();
        match event {
            WorkEvent::Sequence(SequenceEvent::Token(token)) => out.token(self.stream, token)?,
            WorkEvent::Embed(EmbedEvent::Vector(vector)) => out.vector(self.stream, vector)?,
            WorkEvent::Load(load) => out.event(self.stream, load)?,
            WorkEvent::Sequence(event @ (SequenceEvent::Started { .. } | SequenceEvent::Handoff(_))) => {
                out.event(self.stream, event)?;
                return Ok(Turn::GoesOn);
            }
            WorkEvent::Sequence(event @ SequenceEvent::Finished { .. }) => {
                out.event(self.stream, event)?;
                return Ok(Turn::WasLast);
            }
            WorkEvent::Embed(event @ EmbedEvent::Finished { .. }) => {
                out.event(self.stream, event)?;
                return Ok(Turn::WasLast);
            }
        }
        self.control.take_credit();
        Ok(Turn::GoesOn)
    }

    fn fail(&self, error: EngineError) -> Turn {
        self.outbox.lock().error(self.stream, error);
        Turn::WasLast
    }

    /// Waits until the reader has granted no credit for too long. Time in which this process was stopped does not count.
    fn poll_reader_deadline(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let fresh = || Box::pin(tokio::time::sleep(DEADLINES.read));
        loop {
            let deadline = self.reader_deadline.get_or_insert_with(fresh);
            ready!(deadline.as_mut().poll(context));
            if !awake::has_overslept(deadline.deadline()) {
                return Poll::Ready(());
            }
            deadline.as_mut().reset(Instant::now() + DEADLINES.read);
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
