//! Counts and histograms of requests.

use std::fmt;

use baton_schemas::handoff::HandoffTimings;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::Labels;
use crate::observe::Outcome;

/// Seconds until a first token: from a cached prompt to a very long one on a slow machine.
const TTFT_BUCKETS: [f64; 14] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0];

/// Seconds between two tokens: 1,000 to a half a second.
const ITL_BUCKETS: [f64; 12] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0];

/// Seconds of a whole request.
const E2E_BUCKETS: [f64; 11] = [0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];

/// Seconds of waiting, and of transfers.
const WAIT_BUCKETS: [f64; 11] = [0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0, 60.0];

/// Actual ÷ predicted: 1 is right.
const RATIO_BUCKETS: [f64; 12] = [0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0];

/// A histogram's buckets, for families that make one per set of labels.
#[derive(Clone)]
struct Buckets(&'static [f64]);

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}

type Histograms = Family<Labels, Histogram, Buckets>;
type Counters = Family<Labels, Counter>;

/// See the module.
pub struct RequestMetrics {
    registry: Registry,
    http_requests: Counters,
    requests: Counters,
    errors: Counters,
    routes: Counters,
    prompt_tokens: Counters,
    cached_tokens: Counters,
    generated_tokens: Counters,
    ttft: Histograms,
    itl: Histograms,
    e2e: Histograms,
    queue: Histograms,
    prediction: Histograms,
    completion: Histograms,
    handoffs: Counters,
    kv_bytes: Counters,
    hidden: Histograms,
    unhidden: Histograms,
    embed_requests: Counters,
    embed_errors: Counters,
    embed_tokens: Counters,
    embed_vectors: Counters,
    embed_latency: Histograms,
}

/// A request at its end. Times in seconds.
pub struct Summary<'a> {
    /// Its public name, or `unknown`.
    pub model: &'a str,
    /// How it ended.
    pub outcome: Outcome,
    /// Why it failed.
    pub error: Option<&'static str>,
    /// What came of it, if it had a route.
    pub routed: Option<Routed>,
    /// From arrival to the end.
    pub e2e: f64,
}

/// A request for vectors at its end. Times in seconds.
pub struct EmbedSummary<'a> {
    /// Its model's public name, or `unknown`.
    pub model: &'a str,
    /// How it ended.
    pub outcome: Outcome,
    /// Why it failed.
    pub error: Option<&'static str>,
    /// Vectors sent.
    pub n_vectors: u64,
    /// Tokens of their texts.
    pub n_tokens: u64,
    /// From arrival to the end.
    pub e2e: f64,
}

/// What came of a request that had a route. Times in seconds.
pub struct Routed {
    /// `direct`, `handoff` or `upstream`.
    pub route: &'static str,
    /// Why this route.
    pub reason: &'static str,
    /// Tokens of the prompt.
    pub n_prompt: u32,
    /// Those of them that were cached.
    pub n_cached: u32,
    /// Tokens generated.
    pub n_completion: u32,
    /// From arrival to the engine's slot.
    pub queued: Option<f64>,
    /// From arrival to the first token.
    pub ttft: Option<f64>,
    /// Actual ÷ predicted time from the plan to the first token.
    pub prediction_ratio: Option<f64>,
    /// Actual ÷ predicted time from the plan to the last of the tokens that there were. Of complete replies.
    pub completion_ratio: Option<f64>,
    /// What came of its handoff.
    pub handoff: Option<HandoffTimings>,
}

impl RequestMetrics {
    /// The registry these are in.
    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// A reply's head was made: the route's pattern, never the path itself, and the status.
    pub fn replied(&self, route: &str, status: u16) {
        let labels = vec![("path", route.to_owned()), ("status", status.to_string())];
        self.http_requests.get_or_create(&labels).inc();
    }

    /// Where the gaps between a request's tokens are noted.
    pub fn inter_token_latency(&self, model: &str) -> Histogram {
        self.itl.get_or_create_owned(&of_model(model))
    }

    /// A request has ended.
    pub fn ended(&self, request: &Summary<'_>) {
        let model = of_model(request.model);
        let with = |name, value: &str| [&model[..], &[(name, value.to_owned())]].concat();
        self.requests.get_or_create(&with("outcome", request.outcome.as_str())).inc();
        if let Some(error) = request.error {
            self.errors.get_or_create(&with("reason", error)).inc();
        }
        let Some(routed) = &request.routed else { return };
        let by_route = with("route", routed.route);
        self.routes.get_or_create(&[&by_route[..], &[("reason", routed.reason.to_owned())]].concat()).inc();
        self.prompt_tokens.get_or_create(&model).inc_by(routed.n_prompt.into());
        self.cached_tokens.get_or_create(&model).inc_by(routed.n_cached.into());
        self.generated_tokens.get_or_create(&model).inc_by(routed.n_completion.into());
        self.e2e.get_or_create(&by_route).observe(request.e2e);
        for (family, labels, value) in [
            (&self.queue, &model, routed.queued),
            (&self.ttft, &by_route, routed.ttft),
            (&self.prediction, &by_route, routed.prediction_ratio),
            (&self.completion, &by_route, routed.completion_ratio),
        ] {
            if let Some(value) = value {
                family.get_or_create(labels).observe(value);
            }
        }
        if let Some(handoff) = &routed.handoff {
            let result = handoff.failure.map_or("done", |failure| failure.as_str());
            self.handoffs.get_or_create(&with("result", result)).inc();
            self.kv_bytes.get_or_create(&model).inc_by(handoff.n_bytes);
            self.hidden.get_or_create(&model).observe(handoff.hidden_ms() / 1e3);
            self.unhidden.get_or_create(&model).observe(handoff.unhidden_ms / 1e3);
        }
    }

    /// A request for vectors has ended.
    pub fn embedded(&self, request: &EmbedSummary<'_>) {
        let model = of_model(request.model);
        let with = |name, value: &str| [&model[..], &[(name, value.to_owned())]].concat();
        self.embed_requests.get_or_create(&with("outcome", request.outcome.as_str())).inc();
        if let Some(error) = request.error {
            self.embed_errors.get_or_create(&with("reason", error)).inc();
        }
        if request.outcome == Outcome::Done {
            self.embed_tokens.get_or_create(&model).inc_by(request.n_tokens);
            self.embed_vectors.get_or_create(&model).inc_by(request.n_vectors);
            self.embed_latency.get_or_create(&model).observe(request.e2e);
        }
    }
}

fn of_model(model: &str) -> Labels {
    vec![("model", model.to_owned())]
}

impl Default for RequestMetrics {
    fn default() -> RequestMetrics {
        let mut registry = Registry::with_prefix("baton");
        let mut counters = |name: &str, help: &str| {
            let family = Counters::default();
            registry.register(name, help, family.clone());
            family
        };
        let http_requests = counters("http_requests", "Replies by route and status");
        let requests = counters("requests", "Generation requests by how they ended");
        let errors = counters("request_errors", "Generation requests that were refused or failed, by reason");
        let routes = counters("route_decisions", "Routes taken, by reason");
        let prompt_tokens = counters("prompt_tokens", "Tokens of prompts");
        let cached_tokens = counters("prompt_tokens_cached", "Tokens of prompts whose KV was cached");
        let generated_tokens = counters("generation_tokens", "Tokens generated");
        let handoffs = counters("handoffs", "Handoffs by result");
        let kv_bytes = counters("handoff_kv_bytes", "Bytes of KV moved between nodes");
        let embed_requests = counters("embedding_requests", "Requests for vectors by how they ended");
        let embed_errors = counters("embedding_request_errors", "Requests for vectors that failed, by reason");
        let embed_tokens = counters("embedding_tokens", "Tokens of embedded texts");
        let embed_vectors = counters("embedding_vectors", "Vectors computed");
        let mut histograms = |name: &str, help: &str, unit: Option<Unit>, buckets: &'static [f64]| {
            let family = Histograms::new_with_constructor(Buckets(buckets));
            match unit {
                Some(unit) => registry.register_with_unit(name, help, unit, family.clone()),
                None => registry.register(name, help, family.clone()),
            }
            family
        };
        let s = Some(Unit::Seconds);
        let ttft = histograms("time_to_first_token", "From arrival to the first token", s.clone(), &TTFT_BUCKETS);
        let itl = histograms("inter_token_latency", "Gaps between tokens of a choice", s.clone(), &ITL_BUCKETS);
        let e2e = histograms("e2e_request_latency", "From arrival to the end", s.clone(), &E2E_BUCKETS);
        let queue = histograms("request_queue_time", "From arrival to an engine's slot", s.clone(), &WAIT_BUCKETS);
        let help = "Actual divided by predicted time to first token";
        let prediction = histograms("ttft_prediction_ratio", help, None, &RATIO_BUCKETS);
        let help = "Actual divided by predicted time to the last token";
        let completion = histograms("completion_prediction_ratio", help, None, &RATIO_BUCKETS);
        let help = "KV transfer that ran beside the prefill";
        let hidden = histograms("handoff_hidden", help, s.clone(), &WAIT_BUCKETS);
        let help = "KV transfer that the client waited for";
        let unhidden = histograms("handoff_unhidden", help, s.clone(), &WAIT_BUCKETS);
        let help = "From arrival to the last vector";
        let embed_latency = histograms("embedding_request_latency", help, s, &E2E_BUCKETS);
        RequestMetrics {
            registry,
            http_requests,
            requests,
            errors,
            routes,
            prompt_tokens,
            cached_tokens,
            generated_tokens,
            ttft,
            itl,
            e2e,
            queue,
            prediction,
            completion,
            handoffs,
            kv_bytes,
            hidden,
            unhidden,
            embed_requests,
            embed_errors,
            embed_tokens,
            embed_vectors,
            embed_latency,
        }
    }
}

impl fmt::Debug for RequestMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RequestMetrics")
    }
}
