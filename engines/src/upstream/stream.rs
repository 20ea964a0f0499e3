//! A reply as it comes: bytes to lines, lines to events, events to deltas, each with its deadline and its bound.

use std::time::Duration;

use baton_schemas::EngineError;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use tokio::time::{Instant, timeout_at};

use super::{Deadlines, ReplyReader, TextDelta, TextStream, UpstreamError};
use crate::lines::ByteLines;

/// Bytes of one reply. A million tokens with their framing are fewer.
const MAX_REPLY_BYTES: usize = 256 << 20;

/// How long the head of a stream that is complete is waited on for its end, so that the connection can be used again.
const TAIL_TIME: Duration = Duration::from_millis(200);

/// What of an upstream a reply's stream depends on.
pub(super) struct Reading {
    pub(super) is_sse: bool,
    pub(super) deadlines: Deadlines,
    /// When the first delta has to be there.
    pub(super) first_due: Instant,
    pub(super) reader: Box<dyn ReplyReader>,
}

/// The deltas of a reply. Dropping the stream closes the connection, which tells the upstream to stop.
pub(super) fn deltas<S>(chunks: S, reading: Reading) -> TextStream
where
    S: Stream<Item = reqwest::Result<Bytes>> + Send + 'static,
{
    let Reading { is_sse, deadlines, first_due, mut reader } = reading;
    let deltas = async_stream::try_stream! {
        let (mut lines, mut n_bytes, mut has_begun) = (ByteLines::new(chunks), 0_usize, false);
        let mut out = Vec::new();
        loop {
            let due = if has_begun { Instant::now() + deadlines.idle } else { first_due };
            let line = timeout_at(due, lines.next()).await.map_err(|_| {
                let what = if has_begun { "the reply stalled" } else { "there was no reply in time" };
                UpstreamError::failed("timed_out", what)
            })?;
            let event = match line {
                Ok(Some(line)) => {
                    n_bytes = n_bytes.saturating_add(line.len() + 1);
                    if n_bytes > MAX_REPLY_BYTES {
                        Err(UpstreamError::malformed("the reply is endless"))?;
                    }
                    event_of(&line, is_sse)
                }
                // Some servers end without a last mark, or cut the last line's end off: what counts is whether the
                // reply is complete.
                Ok(None) => Event::End,
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
                Event::None => {}
                Event::Json(json) => {
                    reader.read(&json, &mut out)?;
                    for delta in out.drain(..) {
                        has_begun = true;
                        yield delta;
                    }
                }
                Event::End => {
                    let end = reader.end(&mut out);
                    for delta in out.drain(..) {
                        yield delta;
                    }
                    let end = end.ok_or_else(|| UpstreamError::failed("cut_short", "the reply ended without its end"))?;
                    // What follows is nothing but the end of the body.
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
    UpstreamError::failed("cut_short", detail)
}

/// What a line says.
enum Event {
    /// Nothing: a comment that keeps the connection alive, a name or an id of an event, an empty line.
    None,
    Json(Bytes),
    End,
}

fn event_of(line: &Bytes, is_sse: bool) -> Event {
    let line = line.strip_suffix(b"\r").map_or_else(|| line.clone(), |shorter| line.slice_ref(shorter));
    if !is_sse {
        return if line.trim_ascii().is_empty() { Event::None } else { Event::Json(line) };
    }
    // Servers of this dialect write each event's data in one line.
    let Some(data) = line.strip_prefix(b"data:") else { return Event::None };
    match data.trim_ascii() {
        b"" => Event::None,
        b"[DONE]" => Event::End,
        json => Event::Json(line.slice_ref(json)),
    }
}
