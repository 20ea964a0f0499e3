//! Finds an upstream that begins to answer: the least busy one first, and each once, until a first piece has come.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engines::trace::TARGET;
use baton_engines::upstream::{Asked, TextDelta, TextStream, UpstreamError};
use baton_schemas::{EngineError, GenerateRequest};
use futures::StreamExt;
use futures::future::try_join_all;
use tokio::time::timeout;
use tracing::{Instrument, Span};

use super::member::Place;
use super::{Member, ServedByUpstreams};
use crate::error::RequestError;

/// How long a request waits for a place at an upstream. It was admitted already: this is the time of some replies.
const MAX_WAIT: Duration = Duration::from_secs(120);

/// Before upstreams whose connections broke are tried a second time: they may have closed idle ones just then.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// When to come back to upstreams that have failed.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A request that an upstream has begun to answer.
pub struct Started {
    /// Which one.
    pub member: Arc<Member>,
    /// Why this one, in one word.
    pub reason: &'static str,
    /// When it was asked.
    pub asked: Instant,
    /// One stream per choice.
    pub choices: Vec<TextChoice>,
}

/// One choice whose first piece has come.
pub struct TextChoice {
    /// That piece.
    pub first: TextDelta,
    /// What follows.
    pub rest: TextStream,
    /// Told how it went on.
    pub member: Arc<Member>,
    /// When it was asked for.
    pub asked: Instant,
    /// Of the whole reply; what is sent to the upstream names it.
    pub span: Span,
}

/// Starts a request. Dropping the future cancels it.
///
/// Errors: the request is wrong; or no upstream answers, and then the last one's reason.
pub async fn start(
    serving: &ServedByUpstreams,
    request: &GenerateRequest,
    request_id: &str,
) -> Result<Started, RequestError> {
    let (mut tried, mut is_second_round, mut last) = (Vec::new(), false, None);
    loop {
        let Some((i, reason)) = choose(serving, &tried) else {
            if let Some(error) = last.take() {
                let is_unsupported = matches!(error, UpstreamError::Unsupported { .. });
                if is_unsupported && tried.len() < serving.members.len() {
                    return Err(all_busy(serving));
                }
                if is_second_round || !is_broken_connection(&error) {
                    return Err(told(error));
                }
                (is_second_round, last) = (true, Some(error));
                tried.clear();
                tokio::time::sleep(RETRY_PAUSE).await;
                continue;
            }
            return Err(all_busy(serving));
        };
        tried.push(i);
        let (member, model) = &serving.members[i];
        let outcome = match fits(member, model, request, request_id) {
            Err(error) => Err(error),
            Ok(()) => match timeout(MAX_WAIT, member.places(request.n)).await {
                // Nothing was sent: this says nothing of the upstream.
                Err(_) => {
                    last = Some(UpstreamError::Busy { retry_after: None });
                    continue;
                }
                Ok(places) => ask(member, model, request, request_id, places).await,
            },
        };
        let failure = match outcome {
            Ok(choices) => {
                member.breaker.succeeded();
                let asked = choices.first().map_or_else(Instant::now, |choice| choice.asked);
                return Ok(Started { member: Arc::clone(member), reason, asked, choices });
            }
            Err(error) => error,
        };
        match &failure {
            UpstreamError::Unsupported { .. } => {}
            // It would be refused everywhere.
            UpstreamError::Refused(_) => {
                member.breaker.succeeded();
                return Err(told(failure));
            }
            UpstreamError::Busy { retry_after } => {
                member.breaker.succeeded();
                member.is_busy(*retry_after);
            }
            // It answers, and others of its models may be there.
            UpstreamError::Failed { reason: "model_missing", .. } => {
                member.breaker.succeeded();
                tracing::warn!(request_id, upstream = member.name(), error = %failure, "an upstream lacks a model");
            }
            UpstreamError::Failed { reason, .. } => {
                member.breaker.failed(reason);
                tracing::warn!(request_id, upstream = member.name(), error = %failure, "an upstream failed");
            }
        }
        // That one does not take it is the answer only if none does: another may be well soon.
        if last.is_none() || !matches!(failure, UpstreamError::Unsupported { .. }) {
            last = Some(failure);
        }
    }
}

/// The upstream to try next, and why: of those that are well the one with the most room for its size, taking turns among
/// equals; and one that has just failed, or is silent, only if there is no other. One that computes a reply and does
/// nothing beside it is silent, too: it is not left out.
fn choose(serving: &ServedByUpstreams, tried: &[usize]) -> Option<(usize, &'static str)> {
    let n = serving.members.len();
    let load = |member: &Member| member.n_claimed() * 1_000 / member.client.settings().max_concurrent.max(1);
    let open = (0..n).map(|i| (i + serving.turn) % n).filter(|i| {
        let (member, _) = &serving.members[*i];
        !tried.contains(i) && member.busy_for().is_none()
    });
    let best = open.min_by_key(|i| {
        let (member, _) = &serving.members[*i];
        (!member.breaker.would_pass(), member.is_silent(), load(member))
    })?;
    serving.members[best].0.breaker.try_pass();
    let reason = match n {
        1 => "only_upstream",
        _ if tried.is_empty() => "least_running",
        _ => "next_upstream",
    };
    Some((best, reason))
}

/// Whether an upstream can be asked for that at all.
fn fits(member: &Member, model: &str, request: &GenerateRequest, request_id: &str) -> Result<(), UpstreamError> {
    member.client.check(&Asked { request, choice: 0, model, request_id })?;
    if request.n as usize > member.client.settings().max_concurrent {
        return Err(UpstreamError::Unsupported { field: "n", kind: member.client.settings().kind.as_str() });
    }
    Ok(())
}

/// Asks one upstream for all choices, and waits for the first piece of each.
async fn ask(
    member: &Arc<Member>,
    model: &str,
    request: &GenerateRequest,
    request_id: &str,
    places: Vec<Place>,
) -> Result<Vec<TextChoice>, UpstreamError> {
    let choices = (0..).zip(places).map(|(choice, place)| async move {
        let since = Instant::now();
        // The client chose the first part. Servers that name their work after it must not find two of one name.
        let request_id = &format!("{request_id}-{choice}-{:08x}", rand::random::<u32>());
        let asked = Asked { request, choice, model, request_id };
        let span =
            tracing::info_span!(target: TARGET, "upstream", otel.kind = "client", choice, server = member.name());
        let mut reply = member.client.generate(&asked, place).instrument(span.clone()).await?;
        if let Some(Err(reason)) = reply.prefill {
            member.fallbacks.count(reason);
        }
        let cut = || UpstreamError::Failed { reason: "cut_short", detail: "there was no reply".into() };
        let first = reply.deltas.next().await.unwrap_or_else(|| Err(cut()))?;
        Ok(TextChoice { first, rest: reply.deltas, member: Arc::clone(member), asked: since, span })
    });
    try_join_all(choices).await
}

fn is_broken_connection(error: &UpstreamError) -> bool {
    matches!(error, UpstreamError::Failed { reason: "unreachable" | "cut_short", .. })
}

fn all_busy(serving: &ServedByUpstreams) -> RequestError {
    let soonest = serving.members.iter().filter_map(|(member, _)| member.busy_for()).min();
    told(UpstreamError::Busy { retry_after: soonest })
}

/// An upstream's failure as its client may see it.
pub(super) fn told(error: UpstreamError) -> RequestError {
    match error {
        UpstreamError::Unsupported { field, .. } => RequestError::InvalidField {
            field,
            problem: "the upstream that serves this model does not take it".to_owned(),
        },
        UpstreamError::Refused(error) => RequestError::Engine(error),
        UpstreamError::Busy { retry_after } => RequestError::Unavailable {
            reason: "the upstream that serves it is busy".to_owned(),
            retry_after: retry_after.unwrap_or(RETRY_AFTER),
        },
        UpstreamError::Failed { reason, .. } => {
            let reason = match reason {
                "unauthorized" => "the upstream that serves it refused this server",
                "model_missing" => "the upstream that serves it does not have it",
                "timed_out" => "the upstream that serves it did not answer in time",
                _ => "the upstream that serves it does not answer",
            };
            RequestError::Unavailable { reason: reason.to_owned(), retry_after: RETRY_AFTER }
        }
    }
}

/// A failure in the middle of a reply: nobody else can go on with it.
pub(super) fn broken(error: UpstreamError) -> RequestError {
    match error {
        UpstreamError::Failed { reason, detail } => EngineError::lost(format_args!("{reason}: {detail}")).into(),
        error => told(error),
    }
}
