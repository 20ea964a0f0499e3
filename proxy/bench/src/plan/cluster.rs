//! A cluster of simulated machines in this process, with the planning, learning and failover of a real endpoint.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use baton_engines::sim::link::{LinkEnd, LinkSpeed, SimLink};
use baton_engines::sim::{SimConfig, SimEngine, SimTier};
use baton_link::{Engine, SequenceStream};
use baton_planner::cost::{Prediction, Route};
use baton_planner::policy::Policy;
use baton_proxy::request::failover::{PoisonMark, Resilient};
use baton_proxy::request::plan::{PlanRequest, plan};
use baton_proxy::serve::CommandFailure;
use baton_proxy::targets::models::{self, ServedModel};
use baton_proxy::targets::nodes::{Health, Node};
use baton_schemas::CacheScope;
use baton_schemas::handoff::HandoffReport;
use baton_schemas::node::Role;
use baton_schemas::sequence::{CachedTokens, SequenceEvent};
use baton_schemas::{EngineError, SequenceRequest, Token};
use baton_tryout::machines::{DGX_SPARK, KV_BYTES_PER_TOKEN, M3_ULTRA, MachineSpec, link, sharing_cost};
use futures::StreamExt;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::time::Instant;

/// Time for calibration, far more than it needs.
const CALIBRATION: Duration = Duration::from_secs(60);

/// The pause between measurements, so that the nodes' reported loads are up to date.
pub(super) const PAUSE: Duration = Duration::from_millis(300);

/// Bytes of KV that simulated chunks carry per token. Their transfer takes as long as that of the model's real KV.
const CARRIED_BYTES: u32 = 4;

/// The longest context of a simulated sequence.
const N_CTX: u32 = 65_536;

/// The machines and links of a simulated cluster.
#[derive(Debug, Clone)]
pub(super) struct ClusterSpec {
    /// The machine that computes prompts. Its name differs from the decode machine's.
    pub prefill: MachineSpec,
    /// If true, the prefill machine generates, too.
    pub prefill_decodes: bool,
    /// The machine that pulls KV and generates.
    pub decode: MachineSpec,
    /// The link between them.
    pub link: LinkSpeed,
    /// The store of each machine, in memory and on disk.
    pub store: [SimTier; 2],
    /// Sequences that each machine decodes together.
    pub n_slots: u32,
    /// The context length at which decode rates are taken.
    pub n_context: u32,
    /// Milliseconds of a prefill step beside its tokens.
    pub prefill_step_ms: f64,
}

impl ClusterSpec {
    /// A DGX Spark that also generates, and an M3 Ultra, at 10 Gb/s. Decode rates are taken at `n_context`.
    pub(super) fn spark_and_mac(n_context: u32) -> ClusterSpec {
        ClusterSpec {
            prefill: DGX_SPARK,
            prefill_decodes: true,
            decode: M3_ULTRA,
            link: link(10.0),
            store: Default::default(),
            n_slots: 4,
            n_context,
            prefill_step_ms: 0.0,
        }
    }
}

pub(super) struct Cluster {
    pub model: Arc<ServedModel>,
    pub engines: Vec<Arc<SimEngine>>,
    prompts: std::sync::Mutex<StdRng>,
}

/// A request's times, in seconds since it was sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct StreamTimes {
    pub ttft: f64,
    pub completion: f64,
}

/// A planned request's route, and what came of it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PlannedRequest {
    pub route: Route,
    pub prediction: Option<Prediction>,
    pub times: StreamTimes,
    /// The prompt tokens that its node had.
    pub cached: CachedTokens,
    pub handoff: Option<HandoffReport>,
    pub reply: Vec<Token>,
}

impl Cluster {
    pub(super) async fn calibrated(spec: &ClusterSpec) -> Result<Cluster, CommandFailure> {
        let config = |machine: &MachineSpec| SimConfig {
            n_slots: spec.n_slots,
            n_ctx: N_CTX,
            prefill_tps: machine.prefill_tps,
            prefill_step_ms: spec.prefill_step_ms,
            decode_tps: machine.decode_tps(spec.n_context),
            decode_sharing_cost: sharing_cost(spec.n_context),
            chunk_tokens: 512,
            kv_bytes_per_token: KV_BYTES_PER_TOKEN,
            kv_bytes_carried: Some(CARRIED_BYTES),
            store: spec.store,
            ..SimConfig::default()
        };
        let url = "sim://prefill".to_owned();
        let prefill = Arc::new(SimEngine::new(config(&spec.prefill)));
        let puller = SimLink::new([LinkEnd { url: url.clone(), engine: Arc::clone(&prefill), speed: spec.link }]);
        let decode = Arc::new(SimEngine::with_puller(config(&spec.decode), Some(Arc::new(puller))));
        let role = if spec.prefill_decodes { Role::Both } else { Role::Prefill };
        let prefill_node = node(spec.prefill.name, Some(url), &prefill, role).await?;
        let decode_node = node(spec.decode.name, None, &decode, Role::Decode).await?;
        let mut decoders = vec![decode_node];
        // Both lists share the node, and so its measurements.
        decoders.extend(spec.prefill_decodes.then(|| Arc::clone(&prefill_node)));
        let name = OnceLock::from("llama-3.1-8b".to_owned());
        let model = Arc::new(ServedModel::new(name, Vec::new(), decoders, vec![prefill_node]));
        models::keep_calibrated(&model);
        tokio::time::sleep(CALIBRATION).await;
        Ok(Cluster { engines: vec![prefill, decode], ..Cluster::of(model) })
    }

    /// A cluster of existing nodes.
    pub(super) fn of(model: Arc<ServedModel>) -> Cluster {
        Cluster { model, engines: Vec::new(), prompts: std::sync::Mutex::new(StdRng::seed_from_u64(1)) }
    }

    /// A prompt that no cache holds.
    pub(super) fn fresh_prompt(&self, n_tokens: u32) -> Vec<Token> {
        let mut rng = self.prompts.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        (0..n_tokens).map(|_| rng.random_range(0..256)).collect()
    }

    /// All routes of this cluster except barred ones.
    pub(super) fn routes(&self) -> Vec<Route> {
        let decoders = || 0..self.model.decode.len();
        let direct = decoders().map(|decode| Route { decode, prefill: None });
        let handoffs = decoders().flat_map(|decode| (0..self.model.prefill.len()).map(move |p| (decode, p)));
        let handoffs = handoffs.filter(|&(d, p)| !Arc::ptr_eq(&self.model.decode[d], &self.model.prefill[p]));
        direct.chain(handoffs.map(|(decode, p)| Route { decode, prefill: Some(p) })).collect()
    }

    /// Puts the KV of a prompt's start into every node, as an earlier turn would.
    pub(super) async fn prime(&self, front: &[Token]) -> Result<(), CommandFailure> {
        if front.is_empty() {
            return Ok(());
        }
        // Handoffs first: a decode node that already has the start would not let the prefill node compute it.
        for route in self.routes().into_iter().rev() {
            // One more token, because the last prompt token is decoded.
            self.run_fixed(route, [front, &[0]].concat(), 1).await?;
        }
        for node in self.model.decode.iter().chain(&self.model.prefill) {
            node.remember(CacheScope::SHARED, front);
        }
        Ok(())
    }

    /// Runs a request on a given route and learns nothing from it.
    pub(super) async fn run_fixed(
        &self,
        route: Route,
        prompt: Vec<Token>,
        n_output: u32,
    ) -> Result<StreamTimes, CommandFailure> {
        let mut request = request(prompt, n_output);
        request.kv_source = route.prefill.and_then(|p| self.model.prefill[p].kv_source());
        let began = Instant::now();
        let events = self.model.decode[route.decode].engine.generate(request).await?;
        Ok(watch_stream(began, events).await?.times)
    }

    /// Plans a request and runs it, as the endpoint would.
    pub(super) async fn run_planned(
        &self,
        policy: Option<&'static dyn Policy>,
        prompt: Vec<Token>,
        n_output: u32,
    ) -> Result<PlannedRequest, CommandFailure> {
        let request = request(prompt, n_output);
        let ask = PlanRequest {
            seat: None,
            tokens: &request.prompt,
            n_replayed: 0,
            scope: request.cache_scope,
            lossless_kv: false,
            max_tokens: request.max_tokens,
            policy,
            projector: None,
            exclude: &[],
            exclude_prefill: &[],
            may_wake: false,
        };
        let plan = plan(&self.model, &ask).map_err(|error| CommandFailure(error.to_string()))?;
        let route = plan.route;
        let prediction = plan.prediction;
        let began = Instant::now();
        let events = Resilient::begin(plan, request, PoisonMark::default(), tracing::Span::none()).await?.into_events();
        let WatchedStream { times, cached, handoff, reply } = watch_stream(began, events).await?;
        Ok(PlannedRequest { route, prediction, times, cached, handoff, reply })
    }
}

async fn node(
    name: &str,
    url: Option<String>,
    engine: &Arc<SimEngine>,
    role: Role,
) -> Result<Arc<Node>, CommandFailure> {
    let mut info = engine.info().await?;
    info.role = role;
    let health = Health::new(name);
    health.note_answer(Arc::new(info));
    Ok(Node::new(name.to_owned(), url, Arc::clone(engine) as Arc<dyn Engine>, health))
}

fn request(prompt: Vec<Token>, n_output: u32) -> SequenceRequest {
    SequenceRequest { prompt, max_tokens: Some(n_output), ignore_eos: true, ..SequenceRequest::default() }
}

/// A stream that was read to its end.
struct WatchedStream {
    times: StreamTimes,
    cached: CachedTokens,
    handoff: Option<HandoffReport>,
    reply: Vec<Token>,
}

/// Reads a stream to its end.
async fn watch_stream(began: Instant, mut events: SequenceStream) -> Result<WatchedStream, CommandFailure> {
    let (mut ttft, mut cached, mut handoff, mut reply) = (None, CachedTokens::default(), None, Vec::new());
    loop {
        match events.next().await.unwrap_or_else(|| Err(EngineError::lost("no last event")))? {
            SequenceEvent::Token(token) => {
                ttft.get_or_insert_with(|| began.elapsed().as_secs_f64());
                reply.push(token.id);
            }
            SequenceEvent::Finished { .. } => {
                let completion = began.elapsed().as_secs_f64();
                let times = StreamTimes { ttft: ttft.unwrap_or(completion), completion };
                return Ok(WatchedStream { times, cached, handoff, reply });
            }
            SequenceEvent::Started(there) => cached = there,
            SequenceEvent::Handoff(report) => handoff = Some(report),
            SequenceEvent::PrefillBegun => {}
        }
    }
}
