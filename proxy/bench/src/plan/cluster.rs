//! A pool of simulated machines in this process, with the planning, learning and failover of a real endpoint.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use baton_engines::sim::link::{LinkEnd, LinkSpeed, SimLink};
use baton_engines::sim::{SimConfig, SimEngine};
use baton_engines::{Engine, SequenceStream};
use baton_planner::cost::{Prediction, Route};
use baton_planner::policy::Policy;
use baton_proxy::request::failover::Resilient;
use baton_proxy::request::plan::{PlanRequest, plan};
use baton_proxy::serve::CommandFailure;
use baton_proxy::targets::models::{self, ServedModel};
use baton_proxy::targets::nodes::{Health, Node};
use baton_schemas::CacheScope;
use baton_schemas::node::Role;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::{EngineError, SequenceRequest, Token};
use futures::StreamExt;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::time::Instant;

use super::machines::{KV_BYTES_PER_TOKEN, MachineSpec, sharing_cost};

/// Time for calibration: far more than it takes.
const CALIBRATION: Duration = Duration::from_secs(60);

/// Between measurements, so that the nodes' loads are fresh.
pub(super) const PAUSE: Duration = Duration::from_millis(300);

/// Bytes of KV that simulated chunks carry per token. Their way takes the time of the model's real KV.
const CARRIED_BYTES: u32 = 4;

/// Longest context of a simulated sequence.
const N_CTX: u32 = 32_768;

/// The machines and links of a simulated cluster.
#[derive(Debug, Clone)]
pub(super) struct ClusterSpec {
    /// The first computes prompts for the second. Told apart by name.
    pub prefill: MachineSpec,
    /// The prefill machine generates, too.
    pub prefill_decodes: bool,
    /// The second, which pulls from the first.
    pub decode: MachineSpec,
    /// The way between them.
    pub link: LinkSpeed,
    /// Sequences each machine decodes together.
    pub n_slots: u32,
    /// Context that decode rates are taken at.
    pub n_context: u32,
}

/// A link of so many gigabits per second.
pub(super) fn link(gbps: f64) -> LinkSpeed {
    LinkSpeed { bytes_per_second: gbps * 1e9 / 8.0, round_trip: Duration::from_micros(300) }
}

/// A running pool.
pub(super) struct Cluster {
    pub model: Arc<ServedModel>,
    /// Those that are simulated.
    pub engines: Vec<Arc<SimEngine>>,
    prompts: std::sync::Mutex<StdRng>,
}

/// A request's times, in seconds since it was sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RequestOutcome {
    pub ttft: f64,
    pub completion: f64,
}

/// A planned request's times and its route.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlannedRequest {
    pub route: Route,
    pub prediction: Option<Prediction>,
    pub outcome: RequestOutcome,
}

impl Cluster {
    /// A calibrated cluster.
    pub(super) async fn calibrated(spec: &ClusterSpec) -> Result<Cluster, CommandFailure> {
        let config = |machine: &MachineSpec| SimConfig {
            n_slots: spec.n_slots,
            n_ctx: N_CTX,
            prefill_tps: machine.prefill_tps,
            decode_tps: machine.decode_tps(spec.n_context),
            decode_sharing_cost: sharing_cost(spec.n_context),
            chunk_tokens: 512,
            kv_bytes_per_token: KV_BYTES_PER_TOKEN,
            kv_bytes_carried: Some(CARRIED_BYTES),
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
        // Both lists share the node and so its measurements.
        decoders.extend(spec.prefill_decodes.then(|| Arc::clone(&prefill_node)));
        let name = OnceLock::from("llama-3.1-8b".to_owned());
        let model = Arc::new(ServedModel::new(name, Vec::new(), decoders, vec![prefill_node]));
        models::keep_calibrated(&model);
        tokio::time::sleep(CALIBRATION).await;
        Ok(Cluster { engines: vec![prefill, decode], ..Cluster::of(model) })
    }

    /// A cluster of nodes that are there already.
    pub(super) fn of(model: Arc<ServedModel>) -> Cluster {
        Cluster { model, engines: Vec::new(), prompts: std::sync::Mutex::new(StdRng::seed_from_u64(1)) }
    }

    /// A prompt that no cache holds.
    pub(super) fn fresh_prompt(&self, n_tokens: u32) -> Vec<Token> {
        let mut rng = self.prompts.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        (0..n_tokens).map(|_| rng.random_range(0..256)).collect()
    }

    /// Every route of this pool, the barred ones left out.
    pub(super) fn routes(&self) -> Vec<Route> {
        let decoders = || 0..self.model.decode.len();
        let direct = decoders().map(|decode| Route { decode, prefill: None });
        let handoffs = decoders().flat_map(|decode| (0..self.model.prefill.len()).map(move |p| (decode, p)));
        let handoffs = handoffs.filter(|&(d, p)| !Arc::ptr_eq(&self.model.decode[d], &self.model.prefill[p]));
        direct.chain(handoffs.map(|(decode, p)| Route { decode, prefill: Some(p) })).collect()
    }

    /// Puts the KV of a prompt's front into every node, as an earlier turn would have.
    pub(super) async fn prime(&self, front: &[Token]) -> Result<(), CommandFailure> {
        if front.is_empty() {
            return Ok(());
        }
        // Handoffs first: a decode node that has the front already would not have the prefill node compute it.
        for route in self.routes().into_iter().rev() {
            // With one token more: a sequence's last prompt token is decoded.
            self.run_fixed(route, [front, &[0]].concat(), 1).await?;
        }
        for node in self.model.decode.iter().chain(&self.model.prefill) {
            node.remember(CacheScope::SHARED, front);
        }
        Ok(())
    }

    /// Runs a request on a route whatever a plan would say, and learns nothing from it.
    pub(super) async fn run_fixed(
        &self,
        route: Route,
        prompt: Vec<Token>,
        n_output: u32,
    ) -> Result<RequestOutcome, CommandFailure> {
        let mut request = request(prompt, n_output);
        request.kv_source = route.prefill.and_then(|p| self.model.prefill[p].kv_source());
        let began = Instant::now();
        let deltas = self.model.decode[route.decode].engine.generate(request).await?;
        watch_stream(began, deltas).await
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
            tokens: &request.prompt,
            n_replayed: 0,
            scope: request.cache_scope,
            max_tokens: request.max_tokens,
            policy,
            projector: None,
            exclude: &[],
            exclude_prefill: &[],
        };
        let plan = plan(&self.model, &ask).map_err(|error| CommandFailure(error.to_string()))?;
        let (route, prediction) = (plan.route, plan.prediction);
        let began = Instant::now();
        let deltas = Resilient::begin(plan, request, tracing::Span::none()).await?.into_deltas();
        let outcome = watch_stream(began, deltas).await?;
        Ok(PlannedRequest { route, prediction, outcome })
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

/// Follows a stream to its end.
async fn watch_stream(began: Instant, mut deltas: SequenceStream) -> Result<RequestOutcome, CommandFailure> {
    let mut ttft = None;
    loop {
        match deltas.next().await.unwrap_or_else(|| Err(EngineError::lost("no last delta")))? {
            SequenceEvent::Token(_) => {
                ttft.get_or_insert_with(|| began.elapsed().as_secs_f64());
            }
            SequenceEvent::Finished { .. } => {
                let completion = began.elapsed().as_secs_f64();
                return Ok(RequestOutcome { ttft: ttft.unwrap_or(completion), completion });
            }
            SequenceEvent::Started { .. } | SequenceEvent::Handoff(_) => {}
        }
    }
}
