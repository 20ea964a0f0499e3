//! The metrics of `/metrics`, in the text format of Prometheus (OpenMetrics 1.0).
//!
//! Counts and histograms of requests are kept here and filled by the [`RequestWatch`](crate::observe::RequestWatch);
//! states (slots, queues, breakers, rates) come from the [`snapshot`](crate::observe::snapshot) at each scrape. Names are
//! those of the field: `time_to_first_token_seconds`, `inter_token_latency_seconds`, `e2e_request_latency_seconds`.
//!
//! Labels come only from the configuration and from words of this program, so clients cannot add any. A model that is not
//! served is `unknown`, a path that is not a route is `other`.

pub mod requests;
mod states;
mod usage;

use prometheus_client::encoding::text::{encode_eof, encode_registry};

use super::Observer;
use crate::observe::snapshot::EndpointState;

pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All metrics, as text.
pub fn text(observer: &Observer, state: &EndpointState) -> String {
    let mut text = String::new();
    let written = encode_registry(&mut text, observer.metrics.registry())
        .and_then(|()| encode_registry(&mut text, &usage::process(observer.started)))
        .and_then(|()| encode_registry(&mut text, &usage::registry(&observer.usage.state())))
        .and_then(|()| encode_registry(&mut text, &states::registry(state)))
        .and_then(|()| encode_eof(&mut text));
    if let Err(error) = written {
        tracing::error!(%error, "metrics could not be written; the scrape is incomplete");
    }
    text
}

#[cfg(test)]
mod tests;
