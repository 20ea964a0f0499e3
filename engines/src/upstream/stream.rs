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
        // The time until the next delta. Only waits count, so a slow client makes no upstream late.
        let mut left = first_due.saturating_duration_since(Instant::now());
        let mut out = Vec::new();
        loop {
            let wait = if has_begun { left.min(deadlines.idle) } else { left };
            let began = Instant::now();
            let line = awake::timeout(wait, lines.next()).await.map_err(|_| {
                let what = if has_begun { "the reply stalled" } else { "there was no reply in time" };
                UpstreamError::failed(UpstreamFailure::TimedOut, what)
            })?;
            // However long this process was stopped, the wait counts as its limit.
            left = left.saturating_sub(began.elapsed().min(wait));
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
                    if !out.is_empty() {
                        left = deadlines.first.max(deadlines.idle);
                    }
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
            if left.is_zero() {
                Err(UpstreamError::failed(UpstreamFailure::TimedOut, "the reply brings nothing new"))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::{ApiCall, ApiPath, UpstreamKind};

    /// The outcome of a reply of one word, in whose stream this line follows every half a second.
    async fn after_a_word(kind: UpstreamKind, word: &'static str, line: &'static str) -> (usize, String, f64) {
        let seconds = Duration::from_secs;
        let deadlines = UpstreamDeadlines { connect: seconds(1), first: seconds(30), idle: seconds(10) };
        let endless = futures::stream::unfold((), move |()| async move {
            tokio::time::sleep(Duration::from_millis(500)).await;
            Some((Ok(Bytes::from_static(line.as_bytes())), ()))
        });
        let chunks = futures::stream::iter([Ok(Bytes::from_static(word.as_bytes()))]).chain(endless);
        let reading = ReplyReading {
            framing: kind.protocol().framing(),
            deadlines,
            first_due: Instant::now() + deadlines.first,
            reader: kind.protocol().delta_reader(&ApiCall::new(ApiPath::Api("x"), [])),
        };
        let began = Instant::now();
        let hour = tokio::time::sleep(seconds(3_600));
        let mut reply = Box::pin(deltas(chunks, reading).take(1_000).take_until(hour));
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
}
