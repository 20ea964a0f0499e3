//! One request for vectors, watched from its arrival to its end.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use baton_link::trace::{self, TARGET};
use opentelemetry::Context;
use tracing::Span;
use tracing::field::Empty;

use super::current_requests::{CurrentEntry, CurrentRequest};
use super::{Observer, RequestOutcome, RouteRecord};
use crate::admission::EngineWork;
use crate::error::{RequestError, RequestErrorKind};
use crate::observe::metrics::requests::EmbedSummary;
use crate::usage::RequestUsage;

/// Travels with a request for vectors. If it is dropped before [`done`](Self::done) or [`failed`](Self::failed), the client
/// has disconnected.
pub struct EmbedWatch {
    observer: Arc<Observer>,
    span: Span,
    request_id: String,
    arrived_at: SystemTime,
    arrived: Instant,
    model: String,
    /// The usage of its key.
    pub usage: RequestUsage,
    /// The node or the upstream that was asked last; empty before the first one.
    asked: String,
    work: Arc<EngineWork>,
    /// Shows the request while it runs; `None` only until [`EmbedWatch::begin`] returns.
    current: Option<CurrentEntry>,
    outcome: RequestOutcome,
    error: Option<RequestErrorKind>,
    n_vectors: u64,
    n_tokens: u64,
}

impl EmbedWatch {
    /// A request has arrived, perhaps as a part of its client's trace. `usage` is still that of no model.
    pub fn begin(
        observer: &Arc<Observer>,
        request_id: &str,
        usage: RequestUsage,
        trace: Option<Context>,
    ) -> EmbedWatch {
        let span = tracing::info_span!(
            target: TARGET,
            parent: None,
            "request",
            otel.kind = "server",
            request_id,
            model = Empty,
            n_prompt = Empty,
            error = Empty,
        );
        trace::continue_from(&span, trace);
        let mut watch = EmbedWatch {
            observer: Arc::clone(observer),
            span,
            request_id: request_id.to_owned(),
            arrived_at: SystemTime::now(),
            arrived: Instant::now(),
            model: super::UNKNOWN_MODEL.to_owned(),
            usage,
            asked: String::new(),
            work: Arc::default(),
            current: None,
            outcome: RequestOutcome::Cancelled,
            error: None,
            n_vectors: 0,
            n_tokens: 0,
        };
        watch.current = Some(observer.current.enter(watch.now()));
        watch
    }

    fn now(&self) -> CurrentRequest {
        let (n_generated, work) = (Arc::default(), Arc::clone(&self.work));
        CurrentRequest { record: self.record(None), arrived: self.arrived, n_generated, work }
    }

    fn publish(&self) {
        if let Some(current) = &self.current {
            current.update(self.now());
        }
    }

    fn record(&self, outcome: Option<RequestOutcome>) -> RouteRecord {
        RouteRecord {
            at_ms: self.arrived_at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64),
            request_id: self.request_id.clone(),
            model: self.model.clone(),
            decode: self.asked.clone(),
            n_prompt: u32::try_from(self.n_tokens).unwrap_or(u32::MAX),
            n_vectors: Some(self.n_vectors),
            e2e_ms: self.arrived.elapsed().as_secs_f64() * 1e3,
            outcome,
            error: self.error.map(|error| error.as_str().to_owned()),
            ..RouteRecord::default()
        }
    }

    /// Counts the work for the request.
    pub fn work(&self) -> &Arc<EngineWork> {
        &self.work
    }

    /// This node or upstream computes the next vectors.
    pub fn asks(&mut self, target: &str) {
        target.clone_into(&mut self.asked);
        self.publish();
    }

    /// The request's span. Calls to nodes and upstreams belong into it.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// The model's public name is known.
    pub fn is_for(&mut self, model: &str) {
        self.span.record("model", model);
        model.clone_into(&mut self.model);
        self.usage.is_for(model);
        self.publish();
    }

    /// All vectors are computed.
    pub fn done(&mut self, n_vectors: u64, n_tokens: u32) {
        self.outcome = RequestOutcome::Done;
        self.span.record("n_prompt", n_tokens);
        self.n_vectors = n_vectors;
        self.n_tokens = n_tokens.into();
    }

    /// The request ends with an error.
    pub fn failed(&mut self, error: &RequestError) {
        let is_refused = self.asked.is_empty() || error.is_the_clients();
        self.outcome = if is_refused { RequestOutcome::Refused } else { RequestOutcome::Failed };
        self.error = Some(error.kind());
        self.span.record("error", error.kind().as_str());
    }
}

impl Drop for EmbedWatch {
    fn drop(&mut self) {
        self.observer.metrics.embedded(&EmbedSummary {
            model: &self.model,
            outcome: self.outcome,
            error: self.error,
            n_vectors: self.n_vectors,
            n_tokens: self.n_tokens,
            e2e: self.arrived.elapsed().as_secs_f64(),
        });
        self.observer.journal.push(self.record(Some(self.outcome)));
    }
}
