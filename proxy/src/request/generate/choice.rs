//! Turns one choice from an engine into events: tokens become text, up to a stop string or the end of the sequence.

use baton_link::SequenceStream;
use baton_reply::ChoiceReply;
use baton_schemas::sequence::{SequenceEvent, Timings};
use baton_schemas::{EngineError, FinishReason};
use futures::{Stream, StreamExt};

use crate::choice_clock::ChoiceClock;
use crate::error::RequestError;
use crate::reply_event::{EventKind, ReplyEvent};

/// Writes the events of one choice. At a stop string the stream ends early, and `stopped` gets the number of tokens.
pub(super) fn token_events(
    choice: u32,
    mut events: SequenceStream,
    mut reply: ChoiceReply,
    mut clock: ChoiceClock,
    stopped: impl Fn(u32) + Send,
) -> impl Stream<Item = Result<ReplyEvent, RequestError>> + Send {
    async_stream::try_stream! {
        loop {
            match events.next().await.unwrap_or_else(|| Err(EngineError::lost("no last event")))? {
                SequenceEvent::Started(cached) => {
                    clock.started(cached.n_cached);
                    yield EventKind::Started(cached).of(choice);
                }
                // Only counts of requests say so.
                SequenceEvent::PrefillBegun => {}
                SequenceEvent::Handoff(report) => {
                    clock.n_computed = clock.n_computed.saturating_sub(report.n_tokens);
                    yield EventKind::Handoff { report }.of(choice);
                }
                SequenceEvent::Token(token) => {
                    clock.token_with(token.drafts);
                    let step = reply.feed(token);
                    for part in step.parts {
                        yield EventKind::from(part).of(choice);
                    }
                    if step.stopped {
                        // Dropping the stream stops the engine before it sends its own timings.
                        stopped(clock.n_tokens);
                        if let Some(tokens) = reply.take_context() {
                            yield EventKind::Context { tokens }.of(choice);
                        }
                        yield finished(&reply, FinishReason::Stop, &clock, clock.timings()).of(choice);
                        break;
                    }
                }
                SequenceEvent::Finished { reason, timings } => {
                    let rest = reply.finish(reason);
                    let reason = if rest.stopped { FinishReason::Stop } else { reason };
                    for part in rest.parts {
                        yield EventKind::from(part).of(choice);
                    }
                    if let Some(tokens) = reply.take_context() {
                        yield EventKind::Context { tokens }.of(choice);
                    }
                    yield finished(&reply, reason, &clock, timings).of(choice);
                    break;
                }
            }
        }
    }
}

/// Writes the last event of a choice.
fn finished(reply: &ChoiceReply, reason: FinishReason, clock: &ChoiceClock, timings: Timings) -> EventKind {
    EventKind::Finished {
        reason: reply.reason(reason),
        stop: reply.stop_string(),
        n_completion: clock.n_tokens,
        n_reasoning: reply.n_reasoning(),
        timings,
    }
}
