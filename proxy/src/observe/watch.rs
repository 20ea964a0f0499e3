//! One request, watched from its arrival to its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use baton_engines::trace::{self, TARGET};
use baton_planner::policy::PolicyName;
use baton_planner::reason::{RouteKind, RouteReason};
use baton_schemas::handoff::HandoffReport;
use prometheus_client::metrics::histogram::Histogram;
use tracing::Span;
use tracing::field::Empty;

use super::{Observer, Outcome, RouteRecord, UNKNOWN_MODEL};
use crate::error::{RequestError, RequestErrorKind};
use crate::observe::metrics::{RequestSummary, RouteSummary};
use crate::reply_event::{EventKind, ReplyEvent};

/// Travels with a request. Dropping it is its end: without [`RequestWatch::failed`] and with choices still open, the
/// client has left.
pub struct RequestWatch {
    observer: Arc<Observer>,
    at: SystemTime,
    arrived: Instant,
    request_id: String,
    model: String,
    planned: Option<Planned>,
    n_open: u32,
    n_choices: u32,
    error: Option<RequestErrorKind>,
    /// The error is the client's: the engine took none of it.
    is_refused: bool,
    n_cached: u32,
    meter: Arc<AtomicU32>,
    slot: Option<Instant>,
    first_token: Option<Instant>,
    handoff: Option<HandoffReport>,
    span: Span,
}

/// A route as it was chosen, for the journal and the metrics.
pub struct PlannedRoute {
    /// Which kind of route.
    pub kind: RouteKind,
    /// Tokens of the prompt.
    pub n_prompt: u32,
    /// The node that generates, or the upstream.
    pub decode: String,
    /// The node that computes the prompt, if that is another.
    pub prefill: Option<String>,
    /// The policy that chose it; `None` for an upstream.
    pub policy: Option<PolicyName>,
    /// Why it was chosen.
    pub reason: RouteReason,
    /// Predicted time to the first token.
    pub predicted_ttft_ms: Option<f64>,
    /// Predicted time between two tokens.
    pub predicted_step_ms: Option<f64>,
    /// Predicted time to the first token of the best direct route.
    pub direct_ttft_ms: Option<f64>,
}

struct Planned {
    at: Instant,
    route: PlannedRoute,
}

impl RequestWatch {
    /// A request with so many choices has arrived.
    pub fn begin(
        observer: &Arc<Observer>,
        request_id: &str,
        trace: Option<opentelemetry::Context>,
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
        RequestWatch {
            observer: Arc::clone(observer),
            at: SystemTime::now(),
            arrived: Instant::now(),
            request_id: request_id.to_owned(),
            model: UNKNOWN_MODEL.to_owned(),
            planned: None,
            n_open: n_choices,
            n_choices,
            error: None,
            is_refused: false,
            n_cached: 0,
            meter: Arc::default(),
            slot: None,
            first_token: None,
            handoff: None,
            span,
        }
    }

    /// Of the whole request, in the client's trace if it names one.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// It is for this model, by its public name.
    pub fn is_for(&mut self, model: &str) {
        model.clone_into(&mut self.model);
    }

    /// Where its tokens are counted.
    pub fn meter(&mut self, meter: Arc<AtomicU32>) {
        self.meter = meter;
    }

    fn n_completion(&self) -> u32 {
        self.meter.load(Ordering::Relaxed)
    }

    /// Where the gaps between its tokens are noted.
    pub fn inter_token_latency(&self) -> Histogram {
        self.observer.metrics.inter_token_latency(&self.model)
    }

    /// A route was chosen. A later one replaces it, if no node took the request on this one.
    pub fn planned(&mut self, route: PlannedRoute) {
        self.planned = Some(Planned { at: Instant::now(), route });
    }

    /// The first choice left its planned route. The predictions were not for the new one.
    pub fn rerouted(&mut self, now: PlannedRoute) {
        let Some(Planned { route, .. }) = &mut self.planned else { return };
        (route.kind, route.reason, route.decode, route.prefill) = (now.kind, now.reason, now.decode, now.prefill);
        route.predicted_ttft_ms = None;
    }

    /// An upstream answers that was asked at this time. The prompt's length is an estimate until it reports usage.
    pub fn upstream(&mut self, name: &str, reason: RouteReason, n_prompt: u32, asked: Instant) {
        self.slot = Some(asked);
        let route = PlannedRoute {
            kind: RouteKind::Upstream,
            n_prompt,
            decode: name.to_owned(),
            prefill: None,
            policy: None,
            reason,
            predicted_ttft_ms: None,
            predicted_step_ms: None,
            direct_ttft_ms: None,
        };
        self.planned = Some(Planned { at: asked, route });
    }

    /// A step of its reply is about to be sent.
    pub fn event(&mut self, event: &ReplyEvent) {
        match &event.kind {
            EventKind::Started { n_cached } => {
                self.slot.get_or_insert_with(Instant::now);
                // The other choices find the prompt that choice 0 computed.
                if event.choice == 0 {
                    self.n_cached = *n_cached;
                }
            }
            EventKind::Handoff { timings } => self.handoff = Some(*timings),
            EventKind::Rerouted { .. } | EventKind::Context { .. } => {}
            EventKind::Usage { n_prompt, n_cached, .. } => {
                self.n_cached = *n_cached;
                if let Some(planned) = &mut self.planned {
                    planned.route.n_prompt = *n_prompt;
                }
            }
            EventKind::Text { .. } | EventKind::Reasoning { .. } | EventKind::ToolCall { .. } => {
                self.first_token.get_or_insert_with(Instant::now);
            }
            EventKind::Finished { .. } => {
                if self.n_completion() > 0 {
                    self.first_token.get_or_insert_with(Instant::now);
                }
                self.n_open = self.n_open.saturating_sub(1);
            }
        }
    }

    /// It ends with an error.
    pub fn failed(&mut self, error: &RequestError) {
        self.error = Some(error.kind());
        self.is_refused = self.first_token.is_none() && error.is_the_clients();
    }

    fn outcome(&self) -> Outcome {
        match (&self.error, &self.planned) {
            (Some(_), None) => Outcome::Refused,
            (Some(_), Some(_)) if self.is_refused => Outcome::Refused,
            (Some(_), Some(_)) => Outcome::Failed,
            (None, _) if self.n_open == 0 => Outcome::Done,
            (None, _) => Outcome::Cancelled,
        }
    }

    fn route_summary(&self) -> Option<RouteSummary> {
        let planned = self.planned.as_ref()?;
        let since = |from: Instant, to: Option<Instant>| to.map(|to| to.saturating_duration_since(from).as_secs_f64());
        let route = &planned.route;
        let predicted = route.predicted_ttft_ms.map(|ms| ms / 1e3).filter(|seconds| *seconds > 0.0);
        Some(RouteSummary {
            kind: route.kind,
            reason: route.reason,
            n_prompt: route.n_prompt,
            n_cached: self.n_cached,
            n_completion: self.n_completion(),
            queued: since(self.arrived, self.slot),
            ttft: since(self.arrived, self.first_token),
            prediction_ratio: since(planned.at, self.first_token).zip(predicted).map(|(was, said)| was / said),
            completion_ratio: self.completion_ratio(planned),
            handoff: self.handoff,
        })
    }

    /// Of a complete reply: how long it took by how long its tokens were predicted to.
    fn completion_ratio(&self, planned: &Planned) -> Option<f64> {
        // Several choices share steps, and what they say comes in one stream.
        if self.outcome() != Outcome::Done || self.n_choices != 1 || self.n_completion() == 0 {
            return None;
        }
        let (ttft_ms, step_ms) = planned.route.predicted_ttft_ms.zip(planned.route.predicted_step_ms)?;
        let predicted_ms = ttft_ms + f64::from(self.n_completion() - 1) * step_ms;
        (predicted_ms > 0.0).then(|| planned.at.elapsed().as_secs_f64() * 1e3 / predicted_ms)
    }

    fn record(&mut self, outcome: Outcome) -> Option<RouteRecord> {
        let Planned { at, route } = self.planned.take()?;
        Some(RouteRecord {
            at_ms: self.at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64),
            request_id: std::mem::take(&mut self.request_id),
            model: self.model.clone(),
            decode: route.decode,
            prefill: route.prefill,
            policy: route.policy.map_or(route.kind.as_str(), PolicyName::as_str).to_owned(),
            reason: route.reason.to_string(),
            n_prompt: route.n_prompt,
            n_cached: self.n_cached,
            n_completion: self.n_completion(),
            before_plan_ms: millis(self.arrived, at),
            predicted_ttft_ms: route.predicted_ttft_ms,
            predicted_direct_ttft_ms: route.direct_ttft_ms,
            ttft_ms: self.first_token.map(|first| millis(at, first)),
            e2e_ms: millis(self.arrived, Instant::now()),
            handoff: self.handoff,
            outcome,
        })
    }
}

impl Drop for RequestWatch {
    fn drop(&mut self) {
        let outcome = self.outcome();
        self.observer.metrics.ended(&RequestSummary {
            model: &self.model,
            outcome,
            error: self.error,
            route: self.route_summary(),
            e2e: self.arrived.elapsed().as_secs_f64(),
        });
        let error = self.error.map_or("", RequestErrorKind::as_str);
        self.span.record("outcome", outcome.as_str());
        if self.error.is_some() {
            self.span.record("error", error);
        }
        if let Some(record) = self.record(outcome) {
            let span = &self.span;
            span.record("model", record.model.as_str()).record("decode", record.decode.as_str());
            span.record("prefill", record.prefill.as_deref()).record("reason", record.reason.as_str());
            span.record("n_prompt", record.n_prompt).record("n_cached", record.n_cached);
            span.record("n_completion", record.n_completion);
            tracing::info!(
                request_id = record.request_id,
                model = record.model,
                decode = record.decode,
                prefill = record.prefill.as_deref().unwrap_or_default(),
                reason = record.reason,
                n_prompt = record.n_prompt,
                n_cached = record.n_cached,
                n_completion = record.n_completion,
                ttft_ms = record.ttft_ms.unwrap_or_default(),
                e2e_ms = record.e2e_ms,
                outcome = outcome.as_str(),
                error,
                "request ended"
            );
            self.observer.journal.push(record);
        }
    }
}

fn millis(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64() * 1e3
}
