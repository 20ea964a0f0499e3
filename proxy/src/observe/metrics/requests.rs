//! Counts and histograms of requests.
//!
//! To add one: a field of [`RequestMetrics`] with its name here, and its value in [`RequestSummary`] or
//! [`RouteSummary`], which the [`RequestWatch`](crate::observe::RequestWatch) fills in.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use baton_planner::reason::{RouteKind, RouteReason};
use baton_schemas::draft::{DraftTotals, DrafterKind, DrafterLoss};
use baton_schemas::handoff::HandoffReport;
use prometheus_client::encoding::{EncodeLabel, EncodeLabelSet, LabelSetEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::error::RequestErrorKind;
use crate::observe::{RequestOutcome, TokenSources};

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

/// The labels of a model's series: its name, and words of this program.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ModelLabels {
    model: Arc<str>,
    words: [Option<LabelWord>; 2],
}

/// Hashed ten times for each request, so the labels' names, which are the same within a family, are left out.
impl Hash for ModelLabels {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(self.model.as_bytes());
        self.words.iter().flatten().for_each(|(_name, value)| state.write(value.as_bytes()));
    }
}

/// The name of a label, and its value.
type LabelWord = (&'static str, &'static str);

impl ModelLabels {
    fn of(model: &str) -> ModelLabels {
        ModelLabels { model: model.into(), words: [None; 2] }
    }

    /// The same with another label.
    fn with(&self, name: &'static str, word: &'static str) -> ModelLabels {
        let mut labels = self.clone();
        if let Some(free) = labels.words.iter_mut().find(|free| free.is_none()) {
            *free = Some((name, word));
        }
        labels
    }
}

impl EncodeLabelSet for ModelLabels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        ("model", &*self.model).encode(encoder.encode_label())?;
        self.words.iter().flatten().try_for_each(|word| word.encode(encoder.encode_label()))
    }
}

/// The labels of the replies of a route.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReplyLabels {
    path: String,
    status: u16,
}

type Histograms = Family<ModelLabels, Histogram, Buckets>;
type Counters = Family<ModelLabels, Counter>;

/// The families, each with its labels. See the module.
pub struct RequestMetrics {
    registry: Registry,
    http_requests: Family<ReplyLabels, Counter>,
    requests: Counters,
    errors: Counters,
    routes: Counters,
    prompt_tokens: Counters,
    sources: Counters,
    generated_tokens: Counters,
    draft_tokens: Counters,
    lost_drafters: Counters,
    ttft: Histograms,
    itl: Histograms,
    e2e: Histograms,
    admission: Histograms,
    queue: Histograms,
    prediction: Histograms,
    completion: Histograms,
    handoffs: Counters,
    kv_bytes: Counters,
    during_prefill: Histograms,
    after_prefill: Histograms,
    embed_requests: Counters,
    embed_errors: Counters,
    embed_tokens: Counters,
    embed_vectors: Counters,
    embed_latency: Histograms,
}

/// A request at its end. Times in seconds.
pub struct RequestSummary<'a> {
    /// The model's public name, or `unknown`.
    pub model: &'a str,
    /// How it ended.
    pub outcome: RequestOutcome,
    /// Why it failed, if it did.
    pub error: Option<RequestErrorKind>,
    /// Its wait to be admitted.
    pub admission: AdmissionWait,
    /// Its route, if one was chosen.
    pub route: Option<RouteSummary>,
    /// From arrival to the end.
    pub e2e: f64,
}

/// A request's wait to be admitted.
pub struct AdmissionWait {
    /// How the wait ended.
    pub outcome: AdmissionOutcome,
    /// From arrival, seconds.
    pub seconds: f64,
}

/// How a request's wait to be admitted ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum AdmissionOutcome {
    Admitted,
    /// It was refused, for its own fault or for lack of room.
    Refused,
    /// Its client left.
    Cancelled,
}

impl AdmissionOutcome {
    /// The word for metrics.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A request for vectors at its end. Times in seconds.
pub struct EmbedSummary<'a> {
    /// The model's public name, or `unknown`.
    pub model: &'a str,
    /// How it ended.
    pub outcome: RequestOutcome,
    /// Why it failed, if it did.
    pub error: Option<RequestErrorKind>,
    /// Vectors sent.
    pub n_vectors: u64,
    /// Tokens of their texts.
    pub n_tokens: u64,
    /// From arrival to the end.
    pub e2e: f64,
}

/// A request's route at its end. Times in seconds.
pub struct RouteSummary {
    pub kind: RouteKind,
    pub reason: RouteReason,
    /// Tokens of the prompt.
    pub n_prompt: u32,
    /// The same, by the source of their KV.
    pub sources: TokenSources,
    /// Tokens generated.
    pub n_completion: u32,
    /// From arrival to the engine's slot.
    pub queued: Option<f64>,
    /// From arrival to the first token.
    pub ttft: Option<f64>,
    /// Actual ÷ predicted time from the plan to the first token.
    pub prediction_ratio: Option<f64>,
    /// Actual ÷ predicted time from the plan to the last token. Complete replies only.
    pub completion_ratio: Option<f64>,
    /// Its handoff, if it had one.
    pub handoff: Option<HandoffReport>,
    /// Tokens that were guessed and verified.
    pub drafts: DraftTotals,
    /// Draft nodes that its choices have lost.
    pub lost_drafters: Vec<DrafterLoss>,
}

impl RequestMetrics {
    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Counts a reply by its route's pattern, never by the path itself, and its status.
    pub fn replied(&self, route: &str, status: u16) {
        self.http_requests.get_or_create(&ReplyLabels { path: route.to_owned(), status }).inc();
    }

    /// The histogram of the gaps between a model's tokens.
    pub fn inter_token_latency(&self, model: &str) -> Histogram {
        self.itl.get_or_create_owned(&ModelLabels::of(model))
    }

    /// Counts a request at its end.
    pub fn ended(&self, request: &RequestSummary<'_>) {
        let model = ModelLabels::of(request.model);
        self.requests.get_or_create(&model.with("outcome", request.outcome.as_str())).inc();
        if let Some(error) = request.error {
            self.errors.get_or_create(&model.with("reason", error.as_str())).inc();
        }
        let admission = &request.admission;
        self.admission.get_or_create(&model.with("outcome", admission.outcome.as_str())).observe(admission.seconds);
        let Some(route) = &request.route else { return };
        let by_route = model.with("route", route.kind.as_str());
        self.routes.get_or_create(&by_route.with("reason", route.reason.as_str())).inc();
        self.prompt_tokens.get_or_create(&model).inc_by(route.n_prompt.into());
        for (source, n_tokens) in route.sources.each() {
            self.sources.get_or_create(&model.with("source", source.as_str())).inc_by(n_tokens.into());
        }
        self.generated_tokens.get_or_create(&model).inc_by(route.n_completion.into());
        for drafter in DrafterKind::ALL {
            let drafts = route.drafts.of(drafter);
            let model = model.with("drafter", drafter.as_str());
            let rejected = drafts.n.saturating_sub(drafts.n_accepted);
            for (result, n) in [("accepted", drafts.n_accepted), ("rejected", rejected)] {
                if n > 0 {
                    self.draft_tokens.get_or_create(&model.with("result", result)).inc_by(n.into());
                }
            }
        }
        for loss in &route.lost_drafters {
            self.lost_drafters.get_or_create(&model.with("reason", loss.as_str())).inc();
        }
        self.e2e.get_or_create(&by_route).observe(request.e2e);
        for (family, labels, value) in [
            (&self.queue, &model, route.queued),
            (&self.ttft, &by_route, route.ttft),
            (&self.prediction, &by_route, route.prediction_ratio),
            (&self.completion, &by_route, route.completion_ratio),
        ] {
            if let Some(value) = value {
                family.get_or_create(labels).observe(value);
            }
        }
        if let Some(handoff) = &route.handoff {
            let result = handoff.failure.map_or("done", |failure| failure.as_str());
            self.handoffs.get_or_create(&model.with("result", result)).inc();
            self.kv_bytes.get_or_create(&model).inc_by(handoff.n_bytes);
            self.during_prefill.get_or_create(&model).observe(handoff.during_prefill_ms / 1e3);
            self.after_prefill.get_or_create(&model).observe(handoff.after_prefill_ms / 1e3);
        }
    }

    /// Counts a request for vectors at its end.
    pub fn embedded(&self, request: &EmbedSummary<'_>) {
        let model = ModelLabels::of(request.model);
        self.embed_requests.get_or_create(&model.with("outcome", request.outcome.as_str())).inc();
        if let Some(error) = request.error {
            self.embed_errors.get_or_create(&model.with("reason", error.as_str())).inc();
        }
        if request.outcome == RequestOutcome::Done {
            self.embed_tokens.get_or_create(&model).inc_by(request.n_tokens);
            self.embed_vectors.get_or_create(&model).inc_by(request.n_vectors);
            self.embed_latency.get_or_create(&model).observe(request.e2e);
        }
    }
}

/// Registers each family under its name while [`RequestMetrics`] is built.
struct Registrar(Registry);

impl Registrar {
    fn counters<L: Clone + Hash + Eq + EncodeLabelSet + Send + Sync + fmt::Debug + 'static>(
        &mut self,
        name: &str,
        help: &str,
    ) -> Family<L, Counter> {
        let family = Family::default();
        self.0.register(name, help, family.clone());
        family
    }

    /// The unit becomes a part of the name.
    fn seconds(&mut self, name: &str, help: &str, buckets: &'static [f64]) -> Histograms {
        let family = Histograms::new_with_constructor(Buckets(buckets));
        self.0.register_with_unit(name, help, Unit::Seconds, family.clone());
        family
    }

    fn ratios(&mut self, name: &str, help: &str) -> Histograms {
        let family = Histograms::new_with_constructor(Buckets(&RATIO_BUCKETS));
        self.0.register(name, help, family.clone());
        family
    }
}

impl Default for RequestMetrics {
    fn default() -> RequestMetrics {
        let mut new = Registrar(Registry::with_prefix("baton"));
        RequestMetrics {
            http_requests: new.counters("http_requests", "Replies by route and status"),
            requests: new.counters("requests", "Generation requests by how they ended"),
            errors: new.counters("request_errors", "Generation requests that were refused or failed, by reason"),
            routes: new.counters("route_decisions", "Routes taken, by reason"),
            prompt_tokens: new.counters("prompt_tokens", "Tokens of prompts"),
            sources: new.counters("prompt_tokens_by_source", "Tokens of prompts by the source of their KV"),
            generated_tokens: new.counters("generation_tokens", "Tokens generated"),
            draft_tokens: new.counters("draft_tokens", "Guessed tokens that were verified, by drafter and result"),
            lost_drafters: new.counters("lost_draft_nodes", "Sequences that gave up their draft node, by reason"),
            handoffs: new.counters("handoffs", "Handoffs by result"),
            kv_bytes: new.counters("handoff_kv_bytes", "Bytes of KV moved between nodes"),
            embed_requests: new.counters("embedding_requests", "Requests for vectors by how they ended"),
            embed_errors: new.counters("embedding_request_errors", "Requests for vectors that failed, by reason"),
            embed_tokens: new.counters("embedding_tokens", "Tokens of embedded texts"),
            embed_vectors: new.counters("embedding_vectors", "Vectors computed"),
            ttft: new.seconds("time_to_first_token", "From arrival to the first token", &TTFT_BUCKETS),
            itl: new.seconds("inter_token_latency", "Gaps between tokens of a choice", &ITL_BUCKETS),
            e2e: new.seconds("e2e_request_latency", "From arrival to the end", &E2E_BUCKETS),
            admission: new.seconds(
                "admission_wait",
                "From arrival to admission or its refusal, with the time that loading a model on demand takes",
                &WAIT_BUCKETS,
            ),
            queue: new.seconds("request_queue_time", "From arrival to an engine's slot", &WAIT_BUCKETS),
            prediction: new.ratios("ttft_prediction_ratio", "Actual divided by predicted time to first token"),
            completion: new.ratios("completion_prediction_ratio", "Actual divided by predicted time to the last token"),
            during_prefill: new.seconds(
                "handoff_during_prefill",
                "KV transfer that ran during the prefill",
                &WAIT_BUCKETS,
            ),
            after_prefill: new.seconds(
                "handoff_after_prefill",
                "KV transfer that the client waited for",
                &WAIT_BUCKETS,
            ),
            embed_latency: new.seconds("embedding_request_latency", "From arrival to the last vector", &E2E_BUCKETS),
            registry: new.0,
        }
    }
}

impl fmt::Debug for RequestMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RequestMetrics")
    }
}
