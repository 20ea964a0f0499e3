//! Starts a request on an upstream. Tries other upstreams until the first piece of a reply has come.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use baton_engines::trace::TARGET;
use baton_engines::upstream::{ChoiceRequest, TextDelta, TextStream, UpstreamError, UpstreamFailure};
use baton_planner::reason::RouteReason;
use baton_schemas::GenerateRequest;
use futures::StreamExt;
use futures::future::try_join_all;
use tracing::{Instrument, Span};

use super::image_support::refuse_images;
use super::retry::{UpstreamQuestion, first_answer};
use super::server::UpstreamPermit;
use super::{ServedByUpstreams, ServingUpstream, UpstreamServer};
use crate::error::RequestError;

/// A reply that an upstream has begun.
pub struct StartedReply {
    /// The upstream.
    pub server: Arc<UpstreamServer>,
    /// The reason for this upstream.
    pub reason: RouteReason,
    /// When the request was sent.
    pub asked: Instant,
    /// One stream per choice that was asked for.
    pub choices: Vec<StartedChoice>,
}

/// One choice whose first piece has come.
pub struct StartedChoice {
    /// The first piece.
    pub first: TextDelta,
    /// The pieces after it.
    pub rest: TextStream,
    /// The upstream, for noting a failure of the stream.
    pub server: Arc<UpstreamServer>,
    /// When the request was sent.
    pub asked: Instant,
    /// The span of the whole reply; the upstream gets its id.
    pub span: Span,
}

/// Starts these choices of a request, together and on one upstream. Dropping the future cancels them.
///
/// Errors: the request is wrong, or no upstream answers; then the last upstream's error.
pub async fn start(
    serving: &ServedByUpstreams,
    request: &GenerateRequest,
    choices: Range<u32>,
    request_id: &str,
) -> Result<StartedReply, RequestError> {
    refuse_images(request.images())?;
    let found = first_answer(serving, &GenerateQuestion { request, choices, request_id }).await?;
    let choices: Vec<StartedChoice> = found.answer;
    let asked = choices.first().map_or_else(Instant::now, |choice| choice.asked);
    Ok(StartedReply { server: found.server, reason: found.reason, asked, choices })
}

struct GenerateQuestion<'a> {
    request: &'a GenerateRequest,
    choices: Range<u32>,
    request_id: &'a str,
}

impl UpstreamQuestion for GenerateQuestion<'_> {
    type Answer = Vec<StartedChoice>;

    fn request_id(&self) -> &str {
        self.request_id
    }

    fn n_permits(&self) -> u32 {
        self.choices.end - self.choices.start
    }

    fn check(&self, ServingUpstream { server, model }: &ServingUpstream) -> Result<(), UpstreamError> {
        let GenerateQuestion { request, request_id, .. } = *self;
        server.client.check(&ChoiceRequest { request, choice: 0, model, request_id })?;
        match request.n as usize > server.client.settings().max_concurrent {
            true => Err(UpstreamError::Unsupported { field: "n" }),
            false => Ok(()),
        }
    }

    /// Requests the choices, and waits for the first piece of each.
    async fn ask(
        &self,
        upstream: &ServingUpstream,
        permits: Vec<UpstreamPermit>,
    ) -> Result<Vec<StartedChoice>, UpstreamError> {
        let choices =
            self.choices.clone().zip(permits).map(|(choice, permit)| self.ask_for_choice(upstream, choice, permit));
        try_join_all(choices).await
    }
}

impl GenerateQuestion<'_> {
    async fn ask_for_choice(
        &self,
        ServingUpstream { server, model }: &ServingUpstream,
        choice: u32,
        permit: UpstreamPermit,
    ) -> Result<StartedChoice, UpstreamError> {
        let asked = Instant::now();
        // The client chose the first part, and a server that uses the id as a key must not get it twice.
        let request_id = &format!("{}-{choice}-{:08x}", self.request_id, rand::random::<u32>());
        let request = ChoiceRequest { request: self.request, choice, model, request_id };
        let span =
            tracing::info_span!(target: TARGET, "upstream", otel.kind = "client", choice, server = server.name());
        let mut reply = server.client.generate(&request, permit).instrument(span.clone()).await?;
        if let Some(Err(failure)) = reply.prefill {
            server.fallbacks.count(failure);
        }
        let cut =
            || UpstreamError::Failed { failure: UpstreamFailure::CutShort, detail: "there was no reply".to_owned() };
        let first = reply.deltas.next().await.unwrap_or_else(|| Err(cut()))?;
        Ok(StartedChoice { first, rest: reply.deltas, server: Arc::clone(server), asked, span })
    }
}
