//! One request for vectors, watched from its arrival to its end.

use std::sync::Arc;
use std::time::Instant;

use baton_engines::trace::{self, TARGET};
use tracing::Span;
use tracing::field::Empty;

use super::{Observer, Outcome};
use crate::error::RequestError;
use crate::observe::metrics::EmbedSummary;
use crate::request::embed::Embedded;
use crate::request::generate::Caller;

/// Lives as long as the request. Dropped before it is told how that ended, the client has left.
pub struct EmbedWatch {
    observer: Arc<Observer>,
    span: Span,
    arrived: Instant,
    model: String,
    outcome: Outcome,
    error: Option<&'static str>,
    n_vectors: u64,
    n_tokens: u64,
}

impl EmbedWatch {
    /// A request has arrived.
    pub fn begin(observer: &Arc<Observer>, caller: &Caller) -> EmbedWatch {
        let span = tracing::info_span!(
            target: TARGET,
            parent: None,
            "request",
            otel.kind = "server",
            request_id = caller.request_id.as_str(),
            model = Empty,
            n_prompt = Empty,
            error = Empty,
        );
        trace::continue_from(&span, caller.trace.clone());
        EmbedWatch {
            observer: Arc::clone(observer),
            span,
            arrived: Instant::now(),
            model: super::UNKNOWN_MODEL.to_owned(),
            outcome: Outcome::Cancelled,
            error: None,
            n_vectors: 0,
            n_tokens: 0,
        }
    }

    /// The request's part of its trace, of which what it asks nodes and upstreams for is a part.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// It is for this model, by its public name.
    pub fn is_for(&mut self, model: &str) {
        self.span.record("model", model);
        model.clone_into(&mut self.model);
    }

    /// Its vectors are complete.
    pub fn done(&mut self, embedded: &Embedded) {
        self.outcome = Outcome::Done;
        self.span.record("n_prompt", embedded.n_tokens);
        (self.n_vectors, self.n_tokens) = (embedded.vectors.len() as u64, embedded.n_tokens.into());
    }

    /// It ends with an error.
    pub fn failed(&mut self, error: &RequestError) {
        (self.outcome, self.error) = (Outcome::Failed, Some(error.kind()));
        self.span.record("error", error.kind());
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
