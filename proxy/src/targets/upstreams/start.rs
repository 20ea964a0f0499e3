//! Finds an upstream that begins to answer: others are tried until a first piece has come.

use std::sync::Arc;
use std::time::Instant;

use baton_engines::trace::TARGET;
use baton_engines::upstream::{Asked, TextDelta, TextStream, UpstreamError};
use baton_planner::reason::RouteReason;
use baton_schemas::GenerateRequest;
use futures::StreamExt;
use futures::future::try_join_all;
use tracing::{Instrument, Span};

use super::asking::{Question, first_answer};
use super::member::Place;
use super::sight::check_sight;
use super::{Member, ServedByUpstreams};
use crate::error::RequestError;

/// A request that an upstream has begun to answer.
pub struct Started {
    /// Which one.
    pub member: Arc<Member>,
    /// Why this one.
    pub reason: RouteReason,
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
    check_sight(request.images())?;
    let (member, reason, choices) = first_answer(serving, &Generating { request, request_id }).await?;
    let asked = choices.first().map_or_else(Instant::now, |choice: &TextChoice| choice.asked);
    Ok(Started { member, reason, asked, choices })
}

struct Generating<'a> {
    request: &'a GenerateRequest,
    request_id: &'a str,
}

impl Question for Generating<'_> {
    type Answer = Vec<TextChoice>;

    fn request_id(&self) -> &str {
        self.request_id
    }

    fn n_places(&self) -> u32 {
        self.request.n
    }

    fn fits(&self, member: &Member, model: &str) -> Result<(), UpstreamError> {
        fits(member, model, self.request, self.request_id)
    }

    async fn ask(
        &self,
        member: &Arc<Member>,
        model: &str,
        places: Vec<Place>,
    ) -> Result<Vec<TextChoice>, UpstreamError> {
        ask(member, model, self.request, self.request_id, places).await
    }
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
