//! A reply while it arrives: bytes to lines, lines to events, events to deltas. Each step has a deadline and a limit.

use std::time::Duration;

use baton_schemas::EngineError;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use tokio::time::Instant;

use super::delta::DeltaReader;
use super::{TextDelta, TextStream, UpstreamDeadlines, UpstreamError, UpstreamFailure};
use crate::awake;
use crate::lines::ByteLines;

/// Bytes of one reply. A million tokens with their framing are fewer.
const MAX_REPLY_BYTES: usize = 256 << 20;

/// How long to wait for the end of a complete reply's body, so that the connection can be used again.
const TAIL_TIME: Duration = Duration::from_millis(200);

/// How a reply is divided into events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    /// Server-sent events that end with `[DONE]`.
    ServerSentEvents,
    /// An event in each line.
    JsonLines,
}

/// How one reply is read.
pub(super) struct ReplyReading {
    pub(super) framing: Framing,
    pub(super) deadlines: UpstreamDeadlines,
    /// The first delta's deadline.
    pub(super) first_due: Instant,
    pub(super) reader: Box<dyn DeltaReader>,
}

/// The deltas of a reply. Dropping the stream closes the connection, which tells the upstream to stop.
pub(super) fn deltas<S>(chunks: S, reading: ReplyReading) -> TextStream
where
    S: Stream<Item = reqwest::Result<Bytes>> + Send + 'static,
{
    let ReplyReading { framing, deadlines, first_due, mut reader } = reading;
    let deltas = async_stream::try_stream! {
        let mut lines = ByteLines::new(chunks);
        let mut n_bytes = 0_usize;
        let mut has_begun = false;
        let mut out = Vec::new();
        loop {
            let due = if has_begun { Instant::now() + deadlines.idle } else { first_due };
            let left = due.saturating_duration_since(Instant::now());
            let line = awake::timeout(left, lines.next()).await.map_err(|_| {
                let what = if has_begun { "the reply stalled" } else { "there was no reply in time" };
                UpstreamError::failed(UpstreamFailure::TimedOut, what)
            })?;
            let event = match line {
                Ok(Some(line)) => {
                    n_bytes = n_bytes.saturating_add(line.len() + 1);
                    if n_bytes > MAX_REPLY_BYTES {
                        Err(UpstreamError::malformed("the reply is too long"))?;
                    }
                    event_of(&line, framing)
                }
                // Some servers end without `[DONE]`, or without the last line's end. The reader knows whether the
                // reply is complete.
                Ok(None) => ReplyLine::End,
                Err(error) => match reader.end(&mut out) {
                    Some(end) => {
                        for delta in out.drain(..) {
                            yield delta;
                        }
                        yield TextDelta::Finished(end);
                        break;
                    }
                    None => Err(cut(error))?,
                },
            };
            match event {
                ReplyLine::None => {}
                ReplyLine::Json(json) => {
                    reader.read(&json, &mut out)?;
                    for delta in out.drain(..) {
                        has_begun = true;
                        yield delta;
                    }
                }
                ReplyLine::End => {
                    let end = reader.end(&mut out);
                    for delta in out.drain(..) {
                        yield delta;
                    }
                    let end = end.ok_or_else(|| {
                        UpstreamError::failed(UpstreamFailure::CutShort, "the reply ended before it was complete")
                    })?;
                    // Only the end of the body follows.
                    let tail = async { while let Ok(Some(_)) = lines.next().await {} };
                    let _ = tokio::time::timeout(TAIL_TIME, tail).await;
                    yield TextDelta::Finished(end);
                    break;
                }
            }
        }
    };
    deltas.boxed()
}

fn cut(error: EngineError) -> UpstreamError {
    let detail = match error {
        EngineError::Lost { detail } => detail,
        other => other.to_string(),
    };
    UpstreamError::failed(UpstreamFailure::CutShort, detail)
}

/// What a line of a reply holds.
enum ReplyLine {
    /// No data: a comment that keeps the connection alive, a name or an id of an event, an empty line.
    None,
    Json(Bytes),
    End,
}

fn event_of(line: &Bytes, framing: Framing) -> ReplyLine {
    let line = line.strip_suffix(b"\r").map_or_else(|| line.clone(), |shorter| line.slice_ref(shorter));
    if framing == Framing::JsonLines {
        return if line.trim_ascii().is_empty() { ReplyLine::None } else { ReplyLine::Json(line) };
    }
    // Servers of this dialect write each event's data in one line.
    let Some(data) = line.strip_prefix(b"data:") else { return ReplyLine::None };
    match data.trim_ascii() {
        b"" => ReplyLine::None,
        b"[DONE]" => ReplyLine::End,
        json => ReplyLine::Json(line.slice_ref(json)),
    }
}
