//! A reply while it arrives: bytes to lines, lines to events, events to deltas. Each step has a deadline and a limit.

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
use serde::de::IgnoredAny;
use tokio::time::Instant;

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

/// How a reply is divided into events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    /// Server-sent events that end with `[DONE]`.
    ServerSentEvents,
    /// An event in each line.
    JsonLines,
    /// One event, which is the whole body.
    Whole,
}

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
                        Some(Ok(step)) if self.data.begun.is_empty() => step,
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

/// What a line of a reply holds.
enum ReplyLine<'a> {
    /// No data: a comment that keeps the connection alive, a name or an id of an event.
    None,
    /// The end of an event.
    Blank,
    Json(&'a [u8]),
    End,
}

/// The longest data of an event in several lines.
const MAX_DATA_BYTES: usize = 1 << 20;

/// The data of one event, by the standard of server-sent events (WHATWG HTML, section 9.2.6): the data of all of its lines.
///
/// Nearly all events have one line, which is read at once: a whole JSON text cannot go on in another line.
#[derive(Default)]
struct EventData {
    /// Data whose JSON is unfinished.
    begun: Vec<u8>,
    /// A line was read, so a byte order mark is no longer one.
    is_past_mark: bool,
}

impl EventData {
    fn line_of<'l>(&mut self, line: &'l [u8], framing: Framing) -> ReplyLine<'l> {
        let line = if std::mem::replace(&mut self.is_past_mark, true) { line } else { without_mark(line) };
        if framing != Framing::ServerSentEvents {
            return if line.trim_ascii().is_empty() { ReplyLine::None } else { ReplyLine::Json(line) };
        }
        if line.is_empty() {
            return ReplyLine::Blank;
        }
        let Some(data) = line.strip_prefix(b"data:") else { return ReplyLine::None };
        match data.trim_ascii() {
            b"" => ReplyLine::None,
            b"[DONE]" => ReplyLine::End,
            json => ReplyLine::Json(json),
        }
    }

    /// Takes the data of a line.
    fn take(
        &mut self,
        json: &[u8],
        framing: Framing,
        reader: &mut Box<dyn DeltaReader>,
        out: &mut Vec<TextDelta>,
    ) -> Result<(), UpstreamError> {
        if self.begun.is_empty() {
            let read = reader.read(json, out);
            if read.is_ok() || framing != Framing::ServerSentEvents || !is_unfinished(json) {
                return read;
            }
        } else if self.begun.len() + json.len() > MAX_DATA_BYTES {
            return Err(UpstreamError::malformed("an event is too long"));
        } else {
            self.begun.push(b'\n');
        }
        self.begun.extend_from_slice(json);
        Ok(())
    }

    /// Ends the event.
    fn end(&mut self, reader: &mut Box<dyn DeltaReader>, out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        match std::mem::take(&mut self.begun) {
            begun if begun.is_empty() => Ok(()),
            begun => reader.read(&begun, out),
        }
    }
}

/// Whether a body that is called JSON is an event stream: such servers exist. No JSON begins like a line of one.
fn is_event_stream(beginning: &[u8]) -> bool {
    let first = without_mark(beginning.trim_ascii_start()).first();
    first.is_some_and(|first| matches!(first, b'd' | b'e' | b'i' | b'r' | b':'))
}

fn is_unfinished(json: &[u8]) -> bool {
    serde_json::from_slice::<IgnoredAny>(json).is_err_and(|error| error.is_eof())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ApiCall, ApiPath, UpstreamKind};

    /// The outcome of a reply of one word, in whose stream this line follows every half a second.
    async fn after_a_word(kind: UpstreamKind, word: &'static str, line: &'static str) -> (usize, String, f64) {
        let seconds = Duration::from_secs;
        let deadlines = UpstreamDeadlines { connect: seconds(1), first: seconds(30), idle: seconds(10) };
        let endless = futures::stream::unfold((), move |()| async move {
            tokio::time::sleep(Duration::from_millis(500)).await;
            Some((Ok(Bytes::from_static(line.as_bytes())), ()))
        });
        let word = Ok::<_, String>(Bytes::from_static(word.as_bytes()));
        let pieces = Box::pin(futures::stream::iter([word]).chain(endless));
        let reading = ReplyReading {
            framing: kind.protocol().framing(),
            deadlines,
            first_due: Instant::now() + deadlines.first,
            reader: kind.protocol().delta_reader(&ApiCall::new(ApiPath::Api("x"), [])),
        };
        let began = Instant::now();
        let hour = tokio::time::sleep(seconds(3_600));
        let mut reply = Box::pin(deltas(pieces, reading, (), drop).take(1_000).take_until(hour));
        let mut n_deltas = 0;
        while let Some(delta) = reply.next().await {
            match delta {
                Ok(_) => n_deltas += 1,
                Err(error) => return (n_deltas, error.to_string(), began.elapsed().as_secs_f64()),
            }
        }
        (n_deltas, String::new(), began.elapsed().as_secs_f64())
    }

    #[tokio::test(start_paused = true)]
    async fn a_reply_that_brings_nothing_new_ends() {
        let word = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"}}]}\n\n";
        let thought = "data: {\"choices\":[{\"index\":0,\"delta\":{\"reasoning_content\":\"hm\"}}]}\n\n";
        let empty = "data: {\"choices\":[{\"index\":0,\"delta\":{}}]}\n\n";
        let openai = UpstreamKind::OpenAi;
        let ollama_word = "{\"message\":{\"content\":\"hi\"},\"done\":false}\n";
        let ollama_empty = "{\"message\":{\"content\":\"\"},\"done\":false}\n";
        for (kind, word, line) in
            [(openai, word, empty), (openai, word, ": alive\n\n"), (UpstreamKind::Ollama, ollama_word, ollama_empty)]
        {
            let (n_deltas, error, seconds) = after_a_word(kind, word, line).await;
            assert!(n_deltas == 1 && error.contains("nothing new"), "{line}: {n_deltas} {error}");
            assert!((30.0..31.0).contains(&seconds), "{line}: {seconds}");
        }
        for line in [word, thought] {
            let (n_deltas, error, _) = after_a_word(openai, word, line).await;
            assert_eq!((n_deltas, error.as_str()), (1_000, ""), "{line}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_whole_reply_may_neither_stall_nor_trickle() {
        let seconds = Duration::from_secs;
        let deadlines = UpstreamDeadlines { connect: seconds(1), first: seconds(30), idle: seconds(10) };
        for (pause, error, due) in [(60, "stalled", 10), (5, "stalled", 30)] {
            let space = move |()| async move {
                tokio::time::sleep(seconds(pause)).await;
                Some((Ok::<_, String>(Bytes::from_static(b" ")), ()))
            };
            let reading = ReplyReading {
                framing: Framing::Whole,
                deadlines,
                first_due: Instant::now() + deadlines.first,
                reader: UpstreamKind::OpenAi.protocol().delta_reader(&ApiCall::new(ApiPath::Api("x"), [])),
            };
            let began = Instant::now();
            let read: Vec<_> = deltas(Box::pin(futures::stream::unfold((), space)), reading, (), drop).collect().await;
            let [Err(found)] = &read[..] else { panic!("{read:?}") };
            assert!(found.to_string().contains(error), "{found}");
            assert_eq!(began.elapsed().as_secs(), due);
        }
    }

    #[tokio::test]
    async fn an_event_stream_that_is_called_json_is_read() {
        let second = Duration::from_secs(1);
        let events =
            "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
        let whole = "{\"choices\":[{\"message\":{\"content\":\"hi\"},\"finish_reason\":\"stop\"}]}";
        for (before, body) in [
            ("", events),
            (" \n", events),
            ("\u{FEFF}", events),
            (": alive\n\n", events),
            ("event: x\n", events),
            ("", whole),
            (" \n", whole),
        ] {
            let reading = ReplyReading {
                framing: Framing::Whole,
                deadlines: UpstreamDeadlines { connect: second, first: second, idle: second },
                first_due: Instant::now() + second,
                reader: UpstreamKind::OpenAi.protocol().delta_reader(&ApiCall::new(ApiPath::Api("x"), [])),
            };
            let body = format!("{before}{body}");
            let pieces = body.as_bytes().chunks(7).map(|piece| Ok::<_, String>(Bytes::copy_from_slice(piece)));
            let pieces: Vec<_> = pieces.collect();
            let read: Vec<_> = deltas(futures::stream::iter(pieces), reading, (), drop).collect().await;
            let [Ok(TextDelta::Text { text, .. }), Ok(TextDelta::Finished(_))] = &read[..] else {
                panic!("{body}: {read:?}")
            };
            assert_eq!(text, "hi");
        }
    }

    #[tokio::test]
    async fn a_flood_of_blank_lines_ends_by_the_deadline_and_not_by_its_size() {
        let deadlines = UpstreamDeadlines {
            connect: Duration::from_secs(1),
            first: Duration::from_millis(50),
            idle: Duration::from_millis(10),
        };
        let blank = Bytes::from(vec![b'\n'; 64 << 10]);
        let flood = futures::stream::repeat_with(move || Ok::<_, String>(blank.clone()));
        let reading = ReplyReading {
            framing: Framing::ServerSentEvents,
            deadlines,
            first_due: Instant::now() + deadlines.first,
            reader: UpstreamKind::OpenAi.protocol().delta_reader(&ApiCall::new(ApiPath::Api("x"), [])),
        };
        let read: Vec<_> = deltas(flood, reading, (), drop).collect().await;
        let [Err(error)] = &read[..] else { panic!("{read:?}") };
        assert!(error.to_string().contains("nothing new"), "{error}");
    }

    #[tokio::test]
    async fn a_complete_body_needs_no_end_of_its_last_line() {
        let second = Duration::from_secs(1);
        let ended = "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"},\"finish_reason\":\"stop\"}]}";
        let done = format!("{ended}\n\ndata: [DONE]");
        let ollama = "{\"message\":{\"content\":\"hi\"},\"done\":true,\"done_reason\":\"stop\"}";
        for (kind, reply, is_whole) in [
            (UpstreamKind::OpenAi, ended, true),
            (UpstreamKind::OpenAi, &done, true),
            (UpstreamKind::OpenAi, &done[..done.len() - 2], true),
            (UpstreamKind::OpenAi, &ended[..ended.len() - 2], false),
            (UpstreamKind::Ollama, ollama, true),
            (UpstreamKind::Ollama, &ollama[..ollama.len() - 2], false),
        ] {
            let reading = ReplyReading {
                framing: kind.protocol().framing(),
                deadlines: UpstreamDeadlines { connect: second, first: second, idle: second },
                first_due: Instant::now() + second,
                reader: kind.protocol().delta_reader(&ApiCall::new(ApiPath::Api("x"), [])),
            };
            let pieces = [Ok::<_, String>(Bytes::copy_from_slice(reply.as_bytes()))];
            let read: Vec<_> = deltas(futures::stream::iter(pieces), reading, (), drop).collect().await;
            match (&read[..], is_whole) {
                ([Ok(TextDelta::Text { text, .. }), Ok(TextDelta::Finished(_))], true) => assert_eq!(text, "hi"),
                ([Err(error)], false) => assert!(error.to_string().contains("cut inside a line"), "{error}"),
                _ => panic!("{reply}: {read:?}"),
            }
        }
    }

    #[tokio::test]
    async fn a_reply_ends_with_its_last_event_and_not_with_its_body() {
        let kind = UpstreamKind::OpenAi;
        let second = Duration::from_secs(1);
        let reply =
            "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
        // Cut at every place, and with an end that never comes.
        for cut in 0..reply.len() {
            let pieces =
                [&reply[..cut], &reply[cut..]].map(|piece| Ok::<_, String>(Bytes::from_static(piece.as_bytes())));
            let pieces = futures::stream::iter(pieces).chain(futures::stream::pending());
            let reading = ReplyReading {
                framing: kind.protocol().framing(),
                deadlines: UpstreamDeadlines { connect: second, first: second, idle: second },
                first_due: Instant::now() + second,
                reader: kind.protocol().delta_reader(&ApiCall::new(ApiPath::Api("x"), [])),
            };
            let read: Vec<_> = deltas(pieces, reading, (), drop).collect().await;
            let [Ok(TextDelta::Text { text, .. }), Ok(TextDelta::Finished(_))] = &read[..] else { panic!("{read:?}") };
            assert_eq!(text, "hi", "{cut}");
        }
    }
}
