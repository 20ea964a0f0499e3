//! One request for text, watched from its arrival to its end.

mod record;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Instant, SystemTime};

use baton_link::trace::{self, TARGET};
use baton_planner::cost::Prediction;
use baton_planner::policy::PolicyName;
use baton_planner::reason::{RouteKind, RouteReason};
use baton_schemas::draft::DrafterLoss;
use baton_schemas::handoff::HandoffReport;
use baton_schemas::sequence::{CachedTokens, DraftTotals};
use opentelemetry::Context;
use tracing::Span;
use tracing::field::Empty;

use super::current_requests::{CurrentEntry, CurrentRequest};
use super::{DirectPrediction, Observer, RequestOutcome, UNKNOWN_MODEL, UpstreamPrefill};
use crate::admission::EngineWork;
use crate::arrived_drafts::{ArrivedDrafts, ChoiceDrafts};
use crate::error::{RequestError, RequestErrorKind};
use crate::observe::metrics::requests::{AdmissionOutcome, AdmissionWait};
use crate::reply_event::{EventKind, ReplyEvent};
use crate::targets::upstreams::StartedReply;
use crate::token_gaps::TokenGaps;
use crate::usage::RequestUsage;

/// Travels with a request. Dropping it ends the request. If choices are still open and [`RequestWatch::failed`] was not
/// called, the client has disconnected.
pub struct RequestWatch {
    observer: Arc<Observer>,
    span: Span,
    request_id: String,
    /// The usage of its key.
    pub usage: RequestUsage,
    /// The public name, or [`UNKNOWN_MODEL`].
    model: String,
    arrived_at: SystemTime,
    arrived: Instant,
    admitted: Option<Instant>,
    taken: Option<TakenRoute>,
    moved_to: Option<String>,
    n_choices: u32,
    n_open_choices: u32,
    error: Option<RequestErrorKind>,
    /// The error is the client's: the engine began nothing.
    is_refused: bool,
    cached: CachedTokens,
    restore_ms: f64,
    n_generated: Arc<AtomicU32>,
    slot: Option<Instant>,
    work: Arc<EngineWork>,
    first_token: Option<Instant>,
    handoff: Option<HandoffReport>,
    /// The guesses of ended choices.
    drafts: DraftTotals,
    /// The guesses of each choice that has not ended.
    open_drafts: Vec<ChoiceDrafts>,
    /// Draft nodes that ended choices have lost.
    lost_drafters: Vec<DrafterLoss>,
    upstream_prefill: Option<UpstreamPrefill>,
    /// Shows the request while it runs; `None` only until [`RequestWatch::begin`] returns.
    current: Option<CurrentEntry>,
}

/// A route as it was planned.
pub struct PlannedRoute {
    pub n_prompt: u32,
    pub kind: RouteKind,
    pub reason: RouteReason,
    /// The policy that decided; `None` for an upstream.
    pub policy: Option<PolicyName>,
    /// The node or the upstream that generates.
    pub decode: String,
    /// The node, or the prefill servers of an upstream, that compute the prompt, if another one generates.
    pub prefill: Option<String>,
    /// The predicted times, if rates were known.
    pub prediction: Option<Prediction>,
    /// From the plan to the first token, predicted for the direct route, ms.
    pub direct_ttft_ms: Option<f64>,
    /// The machine that alone is predicted to be done first, if rates were known.
    pub best_direct: Option<DirectPrediction>,
    /// True if a node of the route is simulated: then the times are.
    pub simulated: bool,
}

impl PlannedRoute {
    /// A prefill server of the upstream computed the prompt of a choice. Choices may have different servers.
    fn add_prefill(&mut self, server: &str) {
        match &mut self.prefill {
            Some(names) if names.split(", ").any(|name| name == server) => {}
            Some(names) => *names = format!("{names}, {server}"),
            None => self.prefill = Some(server.to_owned()),
        }
    }
}

/// A route that the request took, and when.
struct TakenRoute {
    route: PlannedRoute,
    at: Instant,
}

impl RequestWatch {
    /// A request with `n_choices` choices has arrived, perhaps as a part of its client's trace. `usage` is still that of no model.
    pub fn begin(
        observer: &Arc<Observer>,
        request_id: &str,
        usage: RequestUsage,
        trace: Option<Context>,
        n_choices: u32,
    ) -> RequestWatch {
        let span = tracing::info_span!(
            target: TARGET,
            parent: None,
            "request",
            otel.kind = "server",
            request_id,
            model = Empty,
            decode = Empty,
            prefill = Empty,
            reason = Empty,
            n_prompt = Empty,
            n_cached = Empty,
            n_completion = Empty,
            outcome = Empty,
            error = Empty,
        );
        trace::continue_from(&span, trace);
        let mut watch = RequestWatch {
            observer: Arc::clone(observer),
            span,
            request_id: request_id.to_owned(),
            usage,
            model: UNKNOWN_MODEL.to_owned(),
            arrived_at: SystemTime::now(),
            arrived: Instant::now(),
            admitted: None,
            taken: None,
            moved_to: None,
            n_choices,
            n_open_choices: n_choices,
            error: None,
            is_refused: false,
            cached: CachedTokens::default(),
            restore_ms: 0.0,
            n_generated: Arc::default(),
            slot: None,
            work: Arc::default(),
            first_token: None,
            handoff: None,
            drafts: DraftTotals::default(),
            open_drafts: (0..n_choices).map(|_| ChoiceDrafts::default()).collect(),
            lost_drafters: Vec::new(),
            upstream_prefill: None,
            current: None,
        };
        watch.current = Some(observer.current.enter(watch.now()));
        watch
    }

    fn now(&self) -> CurrentRequest {
        let (n_generated, work) = (Arc::clone(&self.n_generated), Arc::clone(&self.work));
        CurrentRequest { record: self.record(None), arrived: self.arrived, n_generated, work }
    }

    /// Shows a change of the request's phase.
    fn publish(&self) {
        if let Some(current) = &self.current {
            current.update(self.now());
        }
    }

    /// The span of the whole request, in the client's trace if the request names one.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// The model's public name is known.
    pub fn is_for(&mut self, model: &str) {
        model.clone_into(&mut self.model);
        self.usage.is_for(model);
        self.publish();
    }

    /// Counts the sequences that engines work for.
    pub fn work(&self) -> &Arc<EngineWork> {
        &self.work
    }

    /// The request is admitted. `n_generated` will count its tokens.
    pub fn admitted(&mut self, n_generated: Arc<AtomicU32>) {
        self.n_generated = n_generated;
        self.admitted = Some(Instant::now());
        self.publish();
    }

    fn admission(&self) -> AdmissionWait {
        let (outcome, ended) = match (self.admitted, self.error) {
            (Some(admitted), _) => (AdmissionOutcome::Admitted, admitted),
            (None, Some(_)) => (AdmissionOutcome::Refused, Instant::now()),
            (None, None) => (AdmissionOutcome::Cancelled, Instant::now()),
        };
        AdmissionWait { outcome, seconds: ended.saturating_duration_since(self.arrived).as_secs_f64() }
    }

    fn n_completion(&self) -> u32 {
        self.n_generated.load(Ordering::Relaxed)
    }

    /// Where the clock of a choice notes its guesses, which count even if nobody hears the end.
    pub(crate) fn drafts_of(&self, choice: u32) -> ChoiceDrafts {
        self.open_drafts.get(choice as usize).cloned().unwrap_or_default()
    }

    /// The guesses of all choices until now, and the draft nodes that they have lost.
    fn drafts(&self) -> (DraftTotals, Vec<DrafterLoss>) {
        let open: Vec<ArrivedDrafts> = self.open_drafts.iter().map(|drafts| *drafts.lock()).collect();
        let totals = open.iter().fold(self.drafts, |totals, drafts| totals.plus(drafts.totals()));
        let lost = self.lost_drafters.iter().copied().chain(open.iter().filter_map(ArrivedDrafts::lost));
        (totals, lost.collect())
    }

    /// Notes the gaps between its tokens.
    pub fn inter_token_latency(&self) -> TokenGaps {
        let histogram = self.observer.metrics.inter_token_latency(&self.model);
        TokenGaps { histogram, recent: Arc::clone(&self.observer.history.tokens) }
    }

    /// A route was chosen. It replaces an earlier one that could not be taken.
    pub fn planned(&mut self, route: PlannedRoute) {
        self.taken = Some(TakenRoute { route, at: Instant::now() });
        self.publish();
    }

    /// The first choice is on another route than planned, whose prediction is dropped unless only the handoff is not needed.
    pub fn rerouted(&mut self, now: PlannedRoute) {
        if let Some(TakenRoute { route, .. }) = &mut self.taken {
            let prediction = now.prediction.filter(|_| now.reason == RouteReason::Cached);
            let best_direct = route.best_direct.take();
            let direct_ttft_ms = route.direct_ttft_ms;
            *route = PlannedRoute { n_prompt: route.n_prompt, direct_ttft_ms, best_direct, prediction, ..now };
        }
        self.publish();
    }

    /// The first choice, which has begun, goes on at this node.
    pub fn moved(&mut self, decode: &str) {
        let Some(TakenRoute { route, .. }) = &self.taken else { return };
        if self.moved_to.as_ref().unwrap_or(&route.decode) != decode {
            self.moved_to = Some(decode.to_owned());
            self.publish();
        }
    }

    /// An upstream has begun to answer. The prompt's length is an estimate until the upstream reports it.
    pub fn upstream(&mut self, started: &StartedReply, reason: RouteReason, n_prompt: u32) {
        let asked = started.asked;
        self.slot = Some(asked);
        let route = PlannedRoute {
            n_prompt,
            kind: RouteKind::Upstream,
            reason,
            policy: None,
            decode: started.server.name().to_owned(),
            prefill: None,
            prediction: started.prediction,
            direct_ttft_ms: None,
            best_direct: None,
            simulated: false,
        };
        self.taken = Some(TakenRoute { route, at: asked });
        self.publish();
    }

    /// An event of its reply is about to be sent.
    pub fn event(&mut self, event: &ReplyEvent) {
        match &event.kind {
            EventKind::Started(cached) => {
                self.slot.get_or_insert_with(Instant::now);
                // The other choices find the prompt that choice 0 computed.
                if event.choice == 0 {
                    self.cached = *cached;
                }
                self.publish();
            }
            EventKind::Handoff { report } => {
                self.handoff = Some(*report);
                self.publish();
            }
            EventKind::Prefilled { server, prefill_ms, n_transferred } => {
                let prefill = self.upstream_prefill.get_or_insert_default();
                prefill.prefill_ms = prefill.prefill_ms.max(*prefill_ms);
                prefill.n_transferred = prefill.n_transferred.saturating_add(*n_transferred);
                if let Some(taken) = &mut self.taken {
                    taken.route.add_prefill(server);
                }
                self.publish();
            }
            EventKind::Usage { n_prompt, n_cached, .. } => {
                self.cached = CachedTokens::in_slot(*n_cached);
                self.taken.iter_mut().for_each(|taken| taken.route.n_prompt = *n_prompt);
            }
            EventKind::Finished { timings, .. } => {
                self.restore_ms = self.restore_ms.max(timings.restore_ms);
                self.drafts = self.drafts.plus(timings.drafts);
                if let Some(open) = self.open_drafts.get_mut(event.choice as usize) {
                    *open = ChoiceDrafts::default();
                }
                self.lost_drafters.extend(timings.drafter_lost);
                if self.n_completion() > 0 {
                    self.note_first_token();
                }
                self.n_open_choices = self.n_open_choices.saturating_sub(1);
            }
            kind if kind.is_result() => self.note_first_token(),
            _ => {}
        }
    }

    fn note_first_token(&mut self) {
        if self.first_token.is_none() {
            let now = *self.first_token.insert(Instant::now());
            self.observer.history.first_token(millis(self.arrived, now));
            self.publish();
        }
    }

    /// The request ends with an error.
    pub fn failed(&mut self, error: &RequestError) {
        self.error = Some(error.kind());
        self.is_refused = self.first_token.is_none() && error.is_the_clients();
    }

    fn outcome(&self) -> RequestOutcome {
        match (&self.error, &self.taken) {
            (Some(_), taken) if taken.is_none() || self.is_refused => RequestOutcome::Refused,
            (Some(_), _) => RequestOutcome::Failed,
            (None, _) if self.n_open_choices == 0 => RequestOutcome::Done,
            (None, _) => RequestOutcome::Cancelled,
        }
    }
}

fn millis(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64() * 1e3
}
