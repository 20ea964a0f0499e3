//! From accepted choices to one stream of events, which holds everything that the request was let in with until its end.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use baton_engines::SequenceStream;
use baton_reply::tools::{Part, ReplyForm};
use baton_reply::{ChoiceReply, ReplyPart};
use baton_schemas::generate::Sampling;
use baton_schemas::handoff::HandoffReport;
use baton_schemas::sequence::{SequenceEvent, Timings};
use baton_schemas::{EngineError, FinishReason, GenerateRequest, Token};
use futures::stream::SelectAll;
use futures::{Stream, StreamExt};
use tokio::sync::watch;

use super::clock::Clock;
use crate::error::RequestError;
use crate::observe::RequestWatch;
use crate::reply_event::{EventKind, ReplyEvent};
use crate::request::admission::Permit;
use crate::request::plan::Plan;
use crate::targets::model_loading::Stay;
use crate::targets::nodes::ServedModel;
use crate::targets::upstreams::{TextChoice, text_events};

/// An accepted request: what is known before its first token, and the events that follow.
///
/// Dropping it cancels all its sequences and gives its permit back.
pub struct Generation {
    /// Tokens in the rendered prompt.
    pub n_prompt: u32,
    /// One line on where this request runs and why, for `x-baton-route`.
    pub route: String,
    /// How tokens are drawn, with the model's defaults where the client chose nothing.
    pub sampling: Sampling,
    /// Events of all choices, interleaved. Ends after every choice has finished, or with an error.
    pub events: EventStream,
}

/// See [`Generation::events`].
pub type EventStream = Pin<Box<dyn Stream<Item = Result<ReplyEvent, RequestError>> + Send>>;

/// What is known once engines have accepted every choice.
pub(super) struct Accepted {
    pub(super) n_prompt: u32,
    pub(super) route: String,
    pub(super) choices: Choices,
    /// The plan that its first choice is on, as long as nothing has come of it.
    pub(super) plan: Option<watch::Receiver<Plan>>,
    /// Holds the model in memory.
    pub(super) stay: Option<Stay>,
    /// How long the model was waited for.
    pub(super) waited: Duration,
}

/// The choices of one request.
pub(super) enum Choices {
    /// From an engine: tokens.
    Tokens {
        form: Box<ReplyForm>,
        model: Arc<ServedModel>,
        /// New tokens in each at most.
        max_tokens: Option<u32>,
        /// The prompt, if its tokens and those of the reply are to be told.
        context: Option<Vec<Token>>,
        deltas: Vec<SequenceStream>,
    },
    /// From an upstream: text.
    Text(Vec<TextChoice>),
}

/// Turns the choices' deltas into events. The permit and the watch live as long as the stream.
pub(super) fn hold(
    permit: Permit,
    mut watch: RequestWatch,
    accepted: Accepted,
    request: &GenerateRequest,
) -> EventStream {
    let Accepted { n_prompt, choices, mut plan, stay, waited, .. } = accepted;
    let clock = || Clock::start(n_prompt, watch.inter_token_latency(), permit.meter());
    let mut merged: SelectAll<_> = match choices {
        Choices::Tokens { form, model, max_tokens, context, deltas } => {
            let streams = (0..).zip(deltas).map(|(i, deltas)| {
                let model = Arc::clone(&model);
                // A sequence that is left before its end does not know that its reply is complete.
                let stopped = move |n_tokens| model.routes.learn_output(max_tokens, n_tokens);
                let reply = ChoiceReply::new(&form, &request.stop).after(context.clone());
                choice_events(i, deltas, (reply, stopped), clock()).boxed()
            });
            streams.collect()
        }
        Choices::Text(choices) => {
            (0..).zip(choices).map(|(i, choice)| text_events(i, choice, request, clock(), n_prompt).boxed()).collect()
        }
    };
    Box::pin(async_stream::stream! {
        let _stay = stay;
        while let Some(mut event) = merged.next().await {
            match &mut event {
                Ok(event) => {
                    if let EventKind::Finished { timings, .. } = &mut event.kind {
                        timings.queue_ms += waited.as_secs_f64() * 1e3;
                    }
                    if let EventKind::Usage { n_estimated, n_prompt, .. } = &event.kind {
                        permit.charge_prompt(n_prompt.saturating_sub(*n_estimated));
                    }
                    watch.event(event);
                }
                Err(error) => watch.failed(error),
            }
            let failed = event.is_err();
            if let Some(route) = plan.as_mut().and_then(|plan| rerouted(plan, &event, &mut watch)) {
                yield Ok(EventKind::Rerouted { route }.of(0));
            }
            if event.as_ref().map_or(true, |event| event.kind.is_result()) {
                plan = None;
            }
            yield event;
            if failed {
                break;
            }
        }
    })
}

/// The route, if it is not what was said of it.
fn rerouted(
    plan: &mut watch::Receiver<Plan>,
    event: &Result<ReplyEvent, RequestError>,
    watch: &mut RequestWatch,
) -> Option<String> {
    // Without a sender the stream is over, and its last plan stands.
    let has_changed = plan.has_changed().unwrap_or(false);
    let now = plan.borrow_and_update();
    if has_changed {
        watch.rerouted(&now);
    }
    match event {
        Ok(ReplyEvent {
            kind: EventKind::Handoff { timings: HandoffReport { failure: Some(failure), .. } }, ..
        }) => Some(format!("{}; failure={}", *now, failure.as_str())),
        _ => has_changed.then(|| now.to_string()),
    }
}

/// One choice: tokens to text, up to a stop string or the engine's own end.
fn choice_events(
    choice: u32,
    mut deltas: SequenceStream,
    (mut reply, stopped): (ChoiceReply, impl Fn(u32) + Send),
    mut clock: Clock,
) -> impl Stream<Item = Result<ReplyEvent, RequestError>> + Send {
    async_stream::try_stream! {
        loop {
            match deltas.next().await.unwrap_or_else(|| Err(EngineError::lost("no last delta")))? {
                SequenceEvent::Started { n_cached } => {
                    clock.started(n_cached);
                    yield EventKind::Started { n_cached }.of(choice);
                }
                SequenceEvent::Handoff(timings) => {
                    clock.n_computed = clock.n_computed.saturating_sub(timings.n_tokens);
                    yield EventKind::Handoff { timings }.of(choice);
                }
                SequenceEvent::Token(token) => {
                    clock.token();
                    let step = reply.feed(token);
                    for part in step.parts {
                        yield part_event(part).of(choice);
                    }
                    if step.stopped {
                        // The engine's own account comes with the last delta, which is not waited for: dropping the
                        // stream is what stops the engine.
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
                        yield part_event(part).of(choice);
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

fn part_event(ReplyPart { part, tokens }: ReplyPart) -> EventKind {
    match part {
        Part::Text(text) => EventKind::Text { text, tokens },
        Part::Reasoning(text) => EventKind::Reasoning { text },
        Part::Call(call) => EventKind::ToolCall { call },
    }
}

/// The end of a choice whose sequence ended for this reason.
fn finished(reply: &ChoiceReply, reason: FinishReason, clock: &Clock, timings: Timings) -> EventKind {
    EventKind::Finished {
        reason: reply.reason(reason),
        stop: reply.stop_string(),
        n_completion: clock.n_tokens,
        n_reasoning: reply.n_reasoning(),
        timings,
    }
}
