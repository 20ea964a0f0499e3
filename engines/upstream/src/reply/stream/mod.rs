//! A reply while it arrives: bytes to lines, lines to events, events to deltas. Each step has a deadline and a limit.

mod event_data;

use std::collections::VecDeque;
use std::fmt::Display;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use baton_link::awake::WaitTimer;
use baton_link::lines::LineBuffer;
use baton_schemas::EngineError;
use bytes::Bytes;
use futures::stream::Fuse;
use futures::{Stream, StreamExt};
use tokio::time::Instant;

pub(crate) use self::event_data::Framing;
use self::event_data::{EventData, ReplyLine};
use crate::reply::delta::DeltaReader;
use crate::reply::foreign::without_mark;
use crate::{TextDelta, TextStream, UpstreamDeadlines, UpstreamError, UpstreamFailure};

/// Bytes of one reply. A million tokens with their framing are fewer.
const MAX_REPLY_BYTES: usize = 256 << 20;

/// Lines or pieces without a delta that are read before others have their turn: a small packed reply can be millions of them.
const MAX_STEPS: usize = 256;

/// The most time that so many steps count as: more shows that this process was stopped.
const MAX_STEPS_TIME: Duration = Duration::from_millis(500);

/// The largest reply in one piece: a short reply, a list of models, an error, a prefill server's answer.
pub(crate) const MAX_WHOLE_BYTES: usize = 4 << 20;

/// How one reply is read.
pub(crate) struct ReplyReading {
    pub(crate) framing: Framing,
    pub(crate) deadlines: UpstreamDeadlines,
    /// The first delta's deadline.
    pub(crate) first_due: Instant,
    pub(crate) reader: Box<dyn DeltaReader>,
}

/// The deltas of a reply. Dropping the stream drops its body, which tells the upstream to stop. `finish` takes the body of
/// a complete reply, of which only the end is left. `hold` lives as long as the stream.
pub(crate) fn deltas<B, E>(
    body: B,
    reading: ReplyReading,
    hold: impl Send + Sync + 'static,
    finish: fn(B),
) -> TextStream
where
    B: Stream<Item = Result<Bytes, E>> + Send + Unpin + 'static,
    E: Display + 'static,
{
    let left = reading.first_due.saturating_duration_since(Instant::now());
    let deltas = ReplyDeltas {
        body: Some(body.fuse()),
        finish,
        lines: match reading.framing {
            Framing::ServerSentEvents => LineBuffer::of_events(),
            Framing::JsonLines | Framing::Whole => LineBuffer::default(),
        },
        data: EventData::default(),
        whole: Vec::new(),
        is_blank: true,
        reading,
        n_bytes: 0,
        has_begun: false,
        silence: Duration::ZERO,
        left,
        timer: WaitTimer::new(),
        read: Vec::new(),
        ready: VecDeque::new(),
        _hold: Box::new(hold),
    };
    deltas.boxed()
}

struct ReplyDeltas<B> {
    /// `None` once the reply has ended.
    body: Option<Fuse<B>>,
    finish: fn(B),
    reading: ReplyReading,
    lines: LineBuffer,
    data: EventData,
    /// The bytes of a body that is one event.
    whole: Vec<u8>,
    /// All that has come is blank.
    is_blank: bool,
    n_bytes: usize,
    /// There was a delta.
    has_begun: bool,
    /// Time waited since the last line, or since the last piece of a whole reply. Only waits count, so a slow client makes
    /// no upstream late.
    silence: Duration,
    /// Time that is left to wait for the next delta.
    left: Duration,
    timer: WaitTimer,
    /// The deltas of the event that is being read.
    read: Vec<TextDelta>,
    /// The deltas that were not taken yet.
    ready: VecDeque<TextDelta>,
    _hold: Box<dyn Send + Sync>,
}

/// A step in the reading of a reply.
enum ReplyStep {
    /// More bytes have come.
    Piece,
    /// A line was read, perhaps with deltas.
    Line,
    /// The last event, or the end of the body.
    End,
    /// The body broke off.
    Cut(EngineError),
}

impl<B, E> Stream for ReplyDeltas<B>
where
    B: Stream<Item = Result<Bytes, E>> + Unpin,
    E: Display,
{
    type Item = Result<TextDelta, UpstreamError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let began = Instant::now();
        for _ in 0..MAX_STEPS {
            if let Some(delta) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(delta)));
            }
            if this.body.is_none() {
                return Poll::Ready(None);
            }
            let step = match this.read_line() {
                Some(step) => step,
                None => ready!(this.poll_piece(cx)),
            };
            if let Err(error) = step.and_then(|step| this.take(step)) {
                this.body = None;
                return Poll::Ready(Some(Err(error)));
            }
        }
        // A flood of lines never has to be waited for.
        this.left = this.left.saturating_sub(began.elapsed().min(MAX_STEPS_TIME));
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl<B, E> ReplyDeltas<B>
where
    B: Stream<Item = Result<Bytes, E>> + Unpin,
    E: Display,
{
    /// Reads a line that has come; `None` if there is no whole one.
    fn read_line(&mut self) -> Option<Result<ReplyStep, UpstreamError>> {
        let line = match self.lines.next_line() {
            Ok(line) => line?,
            Err(error) => return Some(Ok(ReplyStep::Cut(error))),
        };
        self.silence = Duration::ZERO;
        let ReplyReading { framing, reader, .. } = &mut self.reading;
        Some(match self.data.line_of(line, *framing) {
            ReplyLine::None => Ok(ReplyStep::Line),
            ReplyLine::Blank => self.data.end(reader, &mut self.read).map(|()| ReplyStep::Line),
            ReplyLine::Json(json) => self.data.take(json, *framing, reader, &mut self.read).map(|()| ReplyStep::Line),
            ReplyLine::End => Ok(ReplyStep::End),
        })
    }

    /// Waits for more bytes. Errors: they are late, or too many.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<ReplyStep, UpstreamError>> {
        loop {
            let polled = self.body.as_mut().map_or(Poll::Ready(None), |body| body.poll_next_unpin(cx));
            // However long this process was stopped, a wait counts as its limit at most.
            let waited = self.timer.waited();
            self.silence += waited;
            self.left = self.left.saturating_sub(waited);
            let step = match polled {
                Poll::Ready(Some(Ok(piece))) => {
                    self.n_bytes = self.n_bytes.saturating_add(piece.len());
                    if self.reading.framing == Framing::Whole && self.is_blank && is_event_stream(&piece) {
                        self.reading.framing = Framing::ServerSentEvents;
                        self.lines = LineBuffer::of_events();
                    }
                    self.is_blank &= piece.trim_ascii().is_empty();
                    let is_whole = self.reading.framing == Framing::Whole;
                    let max_bytes = if is_whole { MAX_WHOLE_BYTES } else { MAX_REPLY_BYTES };
                    if self.n_bytes > max_bytes {
                        return Poll::Ready(Err(UpstreamError::malformed("the reply is too long")));
                    }
                    if is_whole {
                        self.silence = Duration::ZERO;
                        self.whole.extend_from_slice(&piece);
                    } else {
                        self.lines.push(piece);
                    }
                    ReplyStep::Piece
                }
                Poll::Ready(Some(Err(error))) => ReplyStep::Cut(EngineError::lost(error)),
                // Some servers end without the last line's end. The reader knows whether the reply is complete.
                Poll::Ready(None) if !self.lines.rest().is_empty() => {
                    self.lines.push(Bytes::from_static(b"\n"));
                    match self.read_line() {
                        Some(Ok(step)) if !self.data.is_begun() => step,
                        _ => ReplyStep::Cut(EngineError::lost("the stream was cut inside a line")),
                    }
                }
                Poll::Ready(None) if self.reading.framing == Framing::Whole => {
                    let read = self.reading.reader.read(&self.whole, &mut self.read);
                    return Poll::Ready(read.map(|()| ReplyStep::End));
                }
                // Some servers end without `[DONE]`, or the blank line after an event.
                Poll::Ready(None) => {
                    let read = self.data.end(&mut self.reading.reader, &mut self.read);
                    return Poll::Ready(read.map(|()| ReplyStep::End));
                }
                Poll::Pending => {
                    let idle = self.reading.deadlines.idle.saturating_sub(self.silence);
                    // A server sends the head of a whole reply when it has the rest, or keeps it alive with white space.
                    let has_begun = self.has_begun || self.reading.framing == Framing::Whole;
                    let limit = if has_begun { self.left.min(idle) } else { self.left };
                    if limit.is_zero() {
                        let what = if has_begun { "the reply stalled" } else { "there was no reply in time" };
                        return Poll::Ready(Err(UpstreamError::failed(UpstreamFailure::TimedOut, what)));
                    }
                    ready!(self.timer.poll_wait(cx, limit));
                    continue;
                }
            };
            return Poll::Ready(Ok(step));
        }
    }

    /// Takes over what a step brought.
    fn take(&mut self, step: ReplyStep) -> Result<(), UpstreamError> {
        let cut_short = match step {
            ReplyStep::Piece => return Ok(()),
            ReplyStep::Line if self.read.is_empty() => {
                return match self.left.is_zero() {
                    true => Err(UpstreamError::failed(UpstreamFailure::TimedOut, "the reply brings nothing new")),
                    false => Ok(()),
                };
            }
            ReplyStep::Line => {
                let UpstreamDeadlines { first, idle, .. } = self.reading.deadlines;
                self.left = first.max(idle);
                self.has_begun = true;
                self.ready.extend(self.read.drain(..));
                return Ok(());
            }
            ReplyStep::End => None,
            ReplyStep::Cut(error) => Some(error),
        };
        let end = self.reading.reader.end(&mut self.read).ok_or_else(|| match &cut_short {
            Some(error) => cut(error),
            None => UpstreamError::failed(UpstreamFailure::CutShort, "the reply ended before it was complete"),
        })?;
        self.ready.extend(self.read.drain(..));
        self.ready.push_back(TextDelta::Finished(end));
        if let (Some(body), None) = (self.body.take(), cut_short) {
            (self.finish)(body.into_inner());
        }
        Ok(())
    }
}

fn cut(error: &EngineError) -> UpstreamError {
    let detail = match error {
        EngineError::Lost { detail } => detail.clone(),
        other => other.to_string(),
    };
    UpstreamError::failed(UpstreamFailure::CutShort, detail)
}

/// Returns true if a body that is called JSON is an event stream: such servers exist. No JSON begins like a line of one.
fn is_event_stream(beginning: &[u8]) -> bool {
    let first = without_mark(beginning.trim_ascii_start()).first();
    first.is_some_and(|first| matches!(first, b'd' | b'e' | b'i' | b'r' | b':'))
}

#[cfg(test)]
mod tests;
