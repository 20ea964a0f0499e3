//! Starts a request on an upstream. Tries other upstreams until the first piece of a reply has come.

use std::sync::Arc;
use std::time::Instant;

use baton_link::trace::TARGET;
use baton_planner::cost::Prediction;
use baton_planner::reason::RouteReason;
use baton_schemas::GenerateRequest;
use baton_upstream::{
    ChoiceRequest, PrefillFailure, PreparedChoice, StrictGap, TextDelta, TextStream, UpstreamError, UpstreamFailure,
};
use futures::StreamExt;
use futures::future::try_join_all;
use tokio::time;
use tracing::{Instrument, Span};

use super::image_support::seeing;
use super::planning::check_capable;
use super::prefill_servers::{PrefillFallback, Transfer};
use super::retry::{UpstreamQuestion, first_answer};
use super::sent_choice::SentChoice;
use super::token_limit::{is_overflow, may_exceed_context, n_left};
use super::{ServedByUpstreams, ServingUpstream, UpstreamServer};
use crate::admission::{Place, RequestPlaces};
use crate::error::RequestError;
use crate::targets::text_prefixes::PromptOutline;

/// A reply that an upstream has begun.
pub struct StartedReply {
    /// The upstream.
    pub server: Arc<UpstreamServer>,
    /// The reason for this upstream.
    pub reason: RouteReason,
    /// The predicted times, if they were known.
    pub prediction: Option<Prediction>,
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
    /// The prefill server's work, if the reply begins with its KV.
    pub transfer: Option<Transfer>,
    /// The upstream, for noting a failure of the stream.
    pub server: Arc<UpstreamServer>,
    /// For learning from its times.
    pub sent: Box<SentChoice>,
    /// Why the upstream may not hold the schema that the client's dialect promises.
    pub gap: Option<StrictGap>,
    /// Tokens that the model's context has room for, if the upstream says so.
    pub n_ctx: Option<u32>,
    /// When the request was sent.
    pub asked: Instant,
    /// The span of the whole reply; the upstream gets its id.
    pub span: Span,
}

/// The choices of a request that start together.
pub struct FirstChoices<'a> {
    pub request: &'a GenerateRequest,
    /// The prompt's size and beginnings, by which the upstream is planned.
    pub prompt: &'a Arc<PromptOutline>,
    /// The first of them.
    pub choice: u32,
    /// The most of them.
    pub n_most: u32,
    pub request_id: &'a str,
    /// Why a promised schema is no strict one.
    pub gap: Option<StrictGap>,
    /// They have their places at an upstream, and are about to be requested.
    pub admitted: &'a (dyn Fn() + Send + Sync),
}

/// Starts the first choices of a request on one upstream: one, and those for which it has free places then. Waits for the
/// place of the first one. Dropping the future cancels them.
///
/// Errors: the request is wrong, no upstream sees its images, no upstream has a place in time, or none answers; then the last upstream's error.
pub async fn start(
    serving: &ServedByUpstreams,
    places: &RequestPlaces,
    choices: &FirstChoices<'_>,
) -> Result<StartedReply, RequestError> {
    let serving = seeing(serving, choices.request, choices.request_id).await?;
    let found = first_answer(&serving, places, choices).await?;
    let choices: Vec<StartedChoice> = found.answer;
    let asked = choices.first().map_or_else(Instant::now, |choice| choice.asked);
    Ok(StartedReply { server: found.server, reason: found.reason, prediction: found.prediction, asked, choices })
}

impl UpstreamQuestion for FirstChoices<'_> {
    type Answer = Vec<StartedChoice>;
    type Prepared = PreparedChoice;

    fn request_id(&self) -> &str {
        self.request_id
    }

    fn n_places(&self) -> usize {
        self.n_most as usize
    }

    fn prompt(&self) -> Option<&PromptOutline> {
        Some(self.prompt)
    }

    fn admitted(&self, _upstream: &ServingUpstream) {
        (self.admitted)();
    }

    /// Prepares the first of the choices.
    fn prepare(&self, upstream: &ServingUpstream) -> Result<PreparedChoice, UpstreamError> {
        if self.request.n as usize > upstream.server.client.settings().max_concurrent {
            return Err(UpstreamError::Unsupported { field: "n" });
        }
        check_capable(upstream, self.prompt)?;
        self.prepare_choice(upstream, self.choice, None)
    }

    /// Requests the choices, and waits for the first piece of each. Whatever is tried meanwhile, it ends in time.
    async fn ask(
        &self,
        upstream: &ServingUpstream,
        prepared: PreparedChoice,
        held: Vec<Place>,
    ) -> Result<Vec<StartedChoice>, UpstreamError> {
        let due = time::Instant::now() + upstream.server.client.settings().deadlines.first;
        let held: Vec<_> = held.into_iter().map(Arc::new).collect();
        let answer = self.ask_in_time(upstream, prepared, &held, due).await;
        let is_made_strict = self.gap.is_none() && upstream.server.client.settings().kind.needs_strict(self.request);
        match answer {
            // Perhaps a server's strict mode takes less than OpenAI's guide says, and no client asked for it.
            Err(error @ UpstreamError::Refused(_)) if is_made_strict && !is_overflow(&error) => {
                let (request_id, server) = (self.request_id, upstream.server.name());
                tracing::debug!(request_id, upstream = server, %error, "a strict schema was refused; sent without strict");
                let loose = FirstChoices { gap: Some(StrictGap::Refused), ..*self };
                loose.ask_in_time(upstream, loose.prepare_choice(upstream, self.choice, None)?, &held, due).await
            }
            answer => answer,
        }
    }
}

/// The call for one choice.
struct ChoiceCall {
    choice: u32,
    /// The tokens that it was limited to, if the model's context has no room for more.
    n_left: Option<u32>,
    call: PreparedChoice,
}

impl FirstChoices<'_> {
    /// Requests the choices until `due`, limited to what the model's context has room for if that shows to be needed.
    async fn ask_in_time(
        &self,
        upstream: &ServingUpstream,
        prepared: PreparedChoice,
        held: &[Arc<Place>],
        due: time::Instant,
    ) -> Result<Vec<StartedChoice>, UpstreamError> {
        let is_counted = may_exceed_context(upstream, self.request);
        let left = if is_counted { self.n_left(upstream, &prepared, due).await? } else { None };
        let calls = self.calls(upstream, held.len(), Some(prepared), left)?;
        let error = match self.ask_for_choices(upstream, calls, held, due).await {
            Err(error) if is_overflow(&error) && !is_counted => error,
            answer => return answer,
        };
        let call = self.prepare_choice(upstream, self.choice, None)?;
        let Some(left) = self.n_left(upstream, &call, due).await? else { return Err(error) };
        let calls = self.calls(upstream, held.len(), None, Some(left))?;
        self.ask_for_choices(upstream, calls, held, due).await
    }

    async fn n_left(
        &self,
        upstream: &ServingUpstream,
        call: &PreparedChoice,
        due: time::Instant,
    ) -> Result<Option<u32>, UpstreamError> {
        n_left(upstream, self.request, call, self.request_id, half_way_to(due)).await
    }

    /// The calls for so many choices. `prepared` is the first one without a limit.
    fn calls(
        &self,
        upstream: &ServingUpstream,
        n: usize,
        prepared: Option<PreparedChoice>,
        n_left: Option<u32>,
    ) -> Result<Vec<ChoiceCall>, UpstreamError> {
        let mut prepared = prepared.filter(|_| n_left.is_none());
        let calls = (self.choice..).take(n).map(|choice| match prepared.take() {
            Some(call) => Ok(ChoiceCall { choice, n_left, call }),
            None => Ok(ChoiceCall { choice, n_left, call: self.prepare_choice(upstream, choice, n_left)? }),
        });
        calls.collect()
    }

    async fn ask_for_choices(
        &self,
        upstream: &ServingUpstream,
        calls: Vec<ChoiceCall>,
        held: &[Arc<Place>],
        due: time::Instant,
    ) -> Result<Vec<StartedChoice>, UpstreamError> {
        let choices = calls.into_iter().zip(held);
        try_join_all(choices.map(|(call, place)| self.ask_for_choice(upstream, call, place, due))).await
    }

    fn prepare_choice(
        &self,
        ServingUpstream { server, model }: &ServingUpstream,
        choice: u32,
        n_left: Option<u32>,
    ) -> Result<PreparedChoice, UpstreamError> {
        server.client.prepare(&ChoiceRequest { request: self.request, choice, model, n_left, gap: self.gap })
    }

    async fn ask_for_choice(
        &self,
        upstream: &ServingUpstream,
        call: ChoiceCall,
        place: &Arc<Place>,
        due: time::Instant,
    ) -> Result<StartedChoice, UpstreamError> {
        let server = &upstream.server;
        let asked = Instant::now();
        let span = tracing::info_span!(
            target: TARGET,
            "upstream",
            otel.kind = "client",
            choice = call.choice,
            server = server.name()
        );
        let is_whole = call.call.comes_whole();
        let sent = SentChoice::begin(server, &upstream.model, self.prompt, call.choice, is_whole);
        let mut sent = Box::new(sent);
        let begun = self.begin(upstream, call, place, due).instrument(span.clone()).await?;
        sent.begun();
        let BegunReply { first, rest, transfer } = begun;
        let n_ctx = server.n_ctx(&upstream.model);
        let gap = self.gap.filter(|_| server.client.settings().kind.needs_strict(self.request));
        Ok(StartedChoice { first, rest, transfer, server: Arc::clone(server), sent, gap, n_ctx, asked, span })
    }

    /// Requests a choice, with the KV of a prefill server if there is one. If the upstream fails with that, it is asked
    /// once more without it. Each step gets half of the time that is left, the last one all of it.
    async fn begin(
        &self,
        upstream: &ServingUpstream,
        ChoiceCall { choice, n_left, mut call }: ChoiceCall,
        place: &Arc<Place>,
        due: time::Instant,
    ) -> Result<BegunReply, UpstreamError> {
        let server = &upstream.server;
        // The client chose the first part, and a server that uses the id as a key must not get it twice.
        let new_id = || format!("{}-{choice}-{:08x}", self.request_id, rand::random::<u32>());
        let request_id = new_id();
        let transfer = server.prefill.compute(&server.client, &mut call, &request_id, half_way_to(due)).await;
        let Some(transfer) = transfer else { return first_piece(server, call, &request_id, place, due).await };
        let error = match first_piece(server, call, &request_id, place, half_way_to(due)).await {
            Ok(begun) => {
                transfer.arrived();
                return Ok(BegunReply { transfer: Some(transfer), ..begun });
            }
            Err(error) => error,
        };
        let Some(failure) = failure_with_kv(&error) else { return Err(error) };
        // The upstream's own message may quote the prompt.
        tracing::debug!(request_id, upstream = server.name(), %error, "the upstream's error");
        tracing::warn!(
            request_id,
            upstream = server.name(),
            prefill = transfer.server.name,
            reason = error.as_str(),
            "an upstream failed with the KV of a prefill server; it is asked once more without"
        );
        let call = self.prepare_choice(upstream, choice, n_left)?;
        let begun = first_piece(server, call, &new_id(), place, due).await;
        match &begun {
            Ok(_) => {
                transfer.lost(failure);
                server.prefill.fallbacks.count(PrefillFallback::Failed(failure));
            }
            // Waiting for the KV left no time to compute the prompt. The next request must not wait for it.
            Err(UpstreamError::Failed { failure: UpstreamFailure::TimedOut, .. })
                if failure == PrefillFailure::KvTimedOut =>
            {
                transfer.lost(failure);
            }
            Err(_) => {}
        }
        begun
    }
}

/// The failure of a prefill server's KV that this error of the upstream shows, if the same request succeeds without the KV.
/// `None`: the KV is not the cause.
fn failure_with_kv(error: &UpstreamError) -> Option<PrefillFailure> {
    let UpstreamError::Failed { failure, .. } = error else { return None };
    match failure {
        // As vLLM reports that it could not fetch the KV.
        UpstreamFailure::ServerError => Some(PrefillFailure::KvLost),
        UpstreamFailure::TimedOut => Some(PrefillFailure::KvTimedOut),
        UpstreamFailure::GatewayError => Some(PrefillFailure::GatewayError),
        UpstreamFailure::Unreachable
        | UpstreamFailure::NoResources
        | UpstreamFailure::CutShort
        | UpstreamFailure::Interrupted
        | UpstreamFailure::Malformed
        | UpstreamFailure::Redirected
        | UpstreamFailure::Unauthorized
        | UpstreamFailure::ModelMissing => None,
    }
}

fn half_way_to(due: time::Instant) -> time::Instant {
    let now = time::Instant::now();
    now + due.saturating_duration_since(now) / 2
}

/// A reply whose first piece has come.
struct BegunReply {
    first: TextDelta,
    rest: TextStream,
    transfer: Option<Transfer>,
}

async fn first_piece(
    server: &UpstreamServer,
    call: PreparedChoice,
    request_id: &str,
    place: &Arc<Place>,
    due: time::Instant,
) -> Result<BegunReply, UpstreamError> {
    let mut rest = server.client.generate(call, request_id, due, Arc::clone(place)).await?;
    let cut = || UpstreamError::Failed { failure: UpstreamFailure::CutShort, detail: "there was no reply".to_owned() };
    let first = rest.next().await.unwrap_or_else(|| Err(cut()))?;
    Ok(BegunReply { first, rest, transfer: None })
}
