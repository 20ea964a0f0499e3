//! Holds a started request until its last token: its permit, its model's lease, and the watch that records it.

use std::pin::Pin;
use std::sync::Arc;

use baton_reply::ChoiceReply;
use baton_schemas::GenerateRequest;
use baton_schemas::handoff::HandoffReport;
use baton_schemas::sequence::CachedTokens;
use futures::stream::{BoxStream, select_all};
use futures::{Stream, StreamExt};
use tokio::sync::watch;

use super::choice::token_events;
use super::start::{HeldModel, StartedChoices, StartedRequest};
use crate::admission::Permit;
use crate::choice_clock::ChoiceClock;
use crate::error::RequestError;
use crate::observe::RequestWatch;
use crate::reply_event::{EventKind, ReplyEvent};
use crate::request::plan::{Plan, route_words};
use crate::request::prompt_logprobs::ScoredPrompt;
use crate::targets::upstreams::{ReplyMeter, text_events};

/// See [`Generation::events`](super::Generation::events).
pub type EventStream = Pin<Box<dyn Stream<Item = Result<ReplyEvent, RequestError>> + Send>>;

/// The events of one choice, or of several.
type ChoiceStream = BoxStream<'static, Result<ReplyEvent, RequestError>>;

/// Merges the events of all choices. The permit, the lease and the watch live as long as the stream.
pub(super) fn hold(
    permit: Permit,
    mut watch: RequestWatch,
    started: StartedRequest,
    request: &GenerateRequest,
) -> EventStream {
    let StartedRequest { n_prompt, choices, prompt, mut plan, loaded, .. } = started;
    let clock = |choice| {
        let clock = ChoiceClock::start(n_prompt, watch.inter_token_latency(), permit.meter());
        clock.noting(watch.drafts_of(choice))
    };
    let mut events = merged(choices, request, n_prompt, clock);
    Box::pin(async_stream::stream! {
        let HeldModel { lease: _lease, waited } = loaded;
        // What it took to score the prompt. The first choice finds the prompt in the cache.
        let mut scored = None;
        let mut cached = CachedTokens::default();
        let mut has_begun = false;
        if let Some(ScoredPrompt { tokens, timings }) = prompt {
            scored = Some(timings);
            yield Ok(EventKind::Prompt { tokens }.of(0));
        }
        while let Some(mut event) = events.next().await {
            match &mut event {
                Ok(event) => {
                    let scored = scored.as_ref().filter(|_| event.choice == 0);
                    match &mut event.kind {
                        EventKind::Started(cached) if scored.is_some() => *cached = CachedTokens::default(),
                        EventKind::Finished { timings, .. } => {
                            timings.queue_ms += waited.as_secs_f64() * 1e3;
                            if let Some(scored) = scored {
                                timings.queue_ms += scored.queue_ms;
                                timings.prompt_n += scored.prompt_n;
                                timings.prompt_ms += scored.prompt_ms;
                            }
                        }
                        EventKind::Usage { n_estimated, n_prompt, .. } => {
                            permit.charge_prompt(n_prompt.saturating_sub(*n_estimated));
                        }
                        _ => {}
                    }
                    watch.event(event);
                }
                Err(error) => {
                    watch.failed(error);
                    watch.usage.failed(error);
                }
            }
            let failed = event.is_err();
            if let Ok(ReplyEvent { choice: 0, kind: EventKind::Started(now) }) = &event {
                cached = *now;
            }
            if let Some(plan) = &mut plan {
                if !has_begun {
                    if let Some(route) = rerouted(plan, &event, cached, &mut watch) {
                        watch.usage.rerouted();
                        yield Ok(EventKind::Rerouted { route }.of(0));
                    }
                } else if plan.has_changed().unwrap_or(false) {
                    watch.moved(&plan.borrow_and_update().decode().name);
                }
            }
            // A client that was told the end finds it in the usage, whatever happens to this process.
            let batch = event.as_ref().ok().and_then(|event| watch.usage.event(event));
            if let Some(batch) = batch {
                watch.usage.written(batch).await;
            }
            has_begun |= event.as_ref().map_or(true, |event| event.kind.is_result());
            yield event;
            if failed {
                break;
            }
        }
    })
}

fn merged(
    choices: StartedChoices,
    request: &GenerateRequest,
    n_prompt: u32,
    clock: impl Fn(u32) -> ChoiceClock,
) -> ChoiceStream {
    let mut streams: Vec<ChoiceStream> = match choices {
        StartedChoices::Tokens { form, model, max_tokens, context, choices } => {
            let streams = (0..).zip(choices).map(|(choice, started)| {
                let model = Arc::clone(&model);
                // The engine does not report the length of a sequence that was dropped at a stop string.
                let stopped = move |n_tokens| model.routes.learn_output(max_tokens, n_tokens);
                let reply = ChoiceReply::new(&form, &request.stop).after(context.clone());
                let reply = if request.reports_end() { reply.with_control_tokens() } else { reply };
                token_events(choice, started, reply, clock(choice), stopped).boxed()
            });
            streams.collect()
        }
        StartedChoices::Text { choices } => {
            let streams = (0..)
                .zip(choices)
                .map(|(i, started)| text_events(i, started, request, ReplyMeter { clock: clock(i), n_prompt }).boxed());
            streams.collect()
        }
    };
    match (streams.pop(), streams.is_empty()) {
        (Some(only), true) => only,
        (last, _) => select_all(streams.into_iter().chain(last)).boxed(),
    }
}

/// Returns the new route, if it differs from the announced one: also by what came `cached` from the store.
fn rerouted(
    plan: &mut watch::Receiver<Plan>,
    event: &Result<ReplyEvent, RequestError>,
    cached: CachedTokens,
    watch: &mut RequestWatch,
) -> Option<String> {
    // Without a sender the stream has ended, and its last plan is final.
    let has_changed = plan.has_changed().unwrap_or(false);
    let now = plan.borrow_and_update();
    if has_changed {
        watch.rerouted(now.summary(0));
    }
    let failure = match event {
        Ok(ReplyEvent { kind: EventKind::Handoff { report: HandoffReport { failure, .. } }, .. }) => *failure,
        _ => None,
    };
    let is_restored = matches!(event, Ok(ReplyEvent { choice: 0, kind: EventKind::Started(now) }) if now.stored() > 0);
    (has_changed || is_restored || failure.is_some()).then(|| route_words::after_start(&now, cached, failure))
}
