//! One request for vectors, watched from its arrival to its end.

use std::sync::Arc;
use std::time::Instant;

use baton_link::trace::{self, TARGET};
use opentelemetry::Context;
use tracing::Span;
use tracing::field::Empty;

use super::{Observer, RequestOutcome};
use crate::error::{RequestError, RequestErrorKind};
use crate::observe::metrics::requests::EmbedSummary;

/// Travels with a request for vectors. If it is dropped before [`done`](Self::done) or [`failed`](Self::failed), the client
/// has disconnected.
pub struct EmbedWatch {
    observer: Arc<Observer>,
    span: Span,
    arrived: Instant,
    model: String,
    outcome: RequestOutcome,
    error: Option<RequestErrorKind>,
    n_vectors: u64,
    n_tokens: u64,
}

impl EmbedWatch {
    /// A request has arrived, perhaps as a part of its client's trace.
    pub fn begin(observer: &Arc<Observer>, request_id: &str, trace: Option<Context>) -> EmbedWatch {
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
        EmbedWatch {
            observer: Arc::clone(observer),
            span,
            arrived: Instant::now(),
            model: super::UNKNOWN_MODEL.to_owned(),
            outcome: RequestOutcome::Cancelled,
            error: None,
            n_vectors: 0,
            n_tokens: 0,
        }
    }

    /// The request's span. Calls to nodes and upstreams belong into it.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// The model's public name is known.
    pub fn is_for(&mut self, model: &str) {
        self.span.record("model", model);
        model.clone_into(&mut self.model);
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
        self.outcome = RequestOutcome::Failed;
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
    }
}
