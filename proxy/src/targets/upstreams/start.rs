//! Starts a request on an upstream. Tries other upstreams until the first piece of a reply has come.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use baton_engines::trace::TARGET;
use baton_engines::upstream::{ChoiceRequest, PreparedChoice, TextDelta, TextStream, UpstreamError, UpstreamFailure};
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
    type Prepared = PreparedChoice;

    fn request_id(&self) -> &str {
        self.request_id
    }

    fn n_permits(&self) -> u32 {
        self.choices.end - self.choices.start
    }

    /// Prepares the first of the choices.
    fn prepare(&self, upstream: &ServingUpstream) -> Result<PreparedChoice, UpstreamError> {
        if self.request.n as usize > upstream.server.client.settings().max_concurrent {
            return Err(UpstreamError::Unsupported { field: "n" });
        }
        self.prepare_choice(upstream, self.choices.start)
    }

    /// Requests the choices, and waits for the first piece of each.
    async fn ask(
        &self,
        upstream: &ServingUpstream,
        prepared: PreparedChoice,
        permits: Vec<UpstreamPermit>,
    ) -> Result<Vec<StartedChoice>, UpstreamError> {
        let mut prepared = Some(prepared);
        let calls = self.choices.clone().map(|choice| match prepared.take() {
            Some(first) => Ok((choice, first)),
            None => Ok((choice, self.prepare_choice(upstream, choice)?)),
        });
        let calls = calls.collect::<Result<Vec<_>, UpstreamError>>()?;
        let choices = calls.into_iter().zip(permits);
        let choices = choices.map(|((choice, call), permit)| self.ask_for_choice(upstream, choice, call, permit));
        try_join_all(choices).await
    }
}

impl GenerateQuestion<'_> {
    fn prepare_choice(
        &self,
        ServingUpstream { server, model }: &ServingUpstream,
        choice: u32,
    ) -> Result<PreparedChoice, UpstreamError> {
        server.client.prepare(&ChoiceRequest { request: self.request, choice, model })
    }

    async fn ask_for_choice(
        &self,
        ServingUpstream { server, .. }: &ServingUpstream,
        choice: u32,
        call: PreparedChoice,
        permit: UpstreamPermit,
    ) -> Result<StartedChoice, UpstreamError> {
        let asked = Instant::now();
        // The client chose the first part, and a server that uses the id as a key must not get it twice.
        let request_id = format!("{}-{choice}-{:08x}", self.request_id, rand::random::<u32>());
        let span =
            tracing::info_span!(target: TARGET, "upstream", otel.kind = "client", choice, server = server.name());
        let mut reply = server.client.generate(call, &request_id, permit).instrument(span.clone()).await?;
        if let Some(Err(failure)) = reply.prefill {
            server.fallbacks.count(failure);
        }
        let cut =
            || UpstreamError::Failed { failure: UpstreamFailure::CutShort, detail: "there was no reply".to_owned() };
        let first = reply.deltas.next().await.unwrap_or_else(|| Err(cut()))?;
        Ok(StartedChoice { first, rest: reply.deltas, server: Arc::clone(server), asked, span })
    }
}
