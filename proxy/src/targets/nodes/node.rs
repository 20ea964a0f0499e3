//! A node: an engine on some machine, and this endpoint's knowledge of it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use baton_engines::registry::EngineKind;
use baton_link::{Engine, awake};
use baton_planner::rates::{Curve, NodeRates};
use baton_planner::reason::{BarReason, FailureReason};
use baton_planner::snapshot::NodeView;
use baton_schemas::CacheScope;
use baton_schemas::handoff::KvSource;
use baton_schemas::held::HeldDigest;
use baton_schemas::no_handoff::NoHandoffReason;
use baton_schemas::node::{NodeInfo, NodeLoad, Phase};
use baton_schemas::{EngineError, Token};
use tokio::time::Instant;

use super::breakers::{Breakers, Task};
use super::claims::{ClaimedWork, NodeClaim, ReportedLoad};
use super::found_paths::FoundPaths;
use super::health::Health;
use super::held::{self, Holder};
use super::identity::{ModelIdentity, kv_size};
use super::load_stream::{Followed, LOAD_INTERVAL, follow};
use super::machine_waker::MachineWaker;
use super::node_state::NodeState;
use super::prefixes::{Prefixes, PromptHashes};
use super::probe;
use super::quarantine::Quarantine;
use super::state_change::{StateChange, StateReason};
use crate::admission::TargetPlaces;

/// A node that has not answered for this long is frozen or unreachable, and all calls to it end. A busy node is not
/// silent, because it answers probes on threads that do not compute.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(5);

/// An engine on some machine.
pub struct Node {
    /// Its name in `x-baton-route`, without its address.
    pub name: String,
    /// The base URL for other nodes, if they can reach it.
    pub url: Option<String>,
    /// The socket at which this endpoint's own engine pulls its KV, if it is another engine of this endpoint.
    pub socket: Option<PathBuf>,
    /// Its addresses, if it was found in the network.
    pub found: Option<FoundPaths>,
    /// Its client.
    pub engine: Arc<dyn Engine>,
    /// Its state and the reason for it.
    pub health: Arc<Health>,
    /// Its places: one for each slot of its engine.
    pub places: Arc<TargetPlaces>,
    /// Its breakers. Note outcomes with [`Node::failed`] and [`Node::succeeded`].
    pub breakers: Breakers,
    /// Its quarantine; see [`PoisonMark`](crate::request::failover::PoisonMark).
    pub quarantine: Arc<Quarantine>,
    /// How its machine is woken, if it can be.
    pub(super) waker: ArcSwapOption<MachineWaker>,
    /// The latest process that reported that it stops; 0 if none has.
    stopping: AtomicU64,
    load: Mutex<ReportedLoad>,
    last_answer: Mutex<Instant>,
    claims: Arc<ClaimedWork>,
    measurements: Arc<ClaimedWork>,
    learned: Mutex<NodeMeasurements>,
}

#[derive(Default)]
struct NodeMeasurements {
    /// The node's description at the time of the measurements.
    of: Option<Arc<NodeInfo>>,
    rates: NodeRates,
    prefixes: Prefixes,
}

impl Node {
    /// Creates a node and follows its load until it is dropped.
    pub fn new(name: String, url: Option<String>, engine: Arc<dyn Engine>, health: Arc<Health>) -> Arc<Node> {
        Node::with_paths(name, url, (None, None), engine, health)
    }

    /// The same for another engine of this endpoint, which computes prompts for its own one.
    pub fn at_socket(name: String, socket: PathBuf, engine: Arc<dyn Engine>, health: Arc<Health>) -> Arc<Node> {
        Node::with_paths(name, None, (Some(socket), None), engine, health)
    }

    /// The same for a node that was found in the network. The host in its URL stands for its addresses.
    pub fn found(
        name: String,
        url: String,
        found: FoundPaths,
        engine: Arc<dyn Engine>,
        health: Arc<Health>,
    ) -> Arc<Node> {
        Node::with_paths(name, Some(url), (None, Some(found)), engine, health)
    }

    fn with_paths(
        name: String,
        url: Option<String>,
        (socket, found): (Option<PathBuf>, Option<FoundPaths>),
        engine: Arc<dyn Engine>,
        health: Arc<Health>,
    ) -> Arc<Node> {
        let node = Arc::new(Node {
            name,
            url,
            socket,
            found,
            engine,
            health,
            places: TargetPlaces::new(0),
            breakers: Breakers::default(),
            quarantine: Arc::default(),
            waker: ArcSwapOption::empty(),
            stopping: AtomicU64::new(0),
            load: Mutex::default(),
            last_answer: Mutex::new(Instant::now()),
            claims: Arc::default(),
            measurements: Arc::default(),
            learned: Mutex::default(),
        });
        tokio::spawn(follow(Arc::downgrade(&node)));
        tokio::spawn(held::follow(Arc::downgrade(&node)));
        tokio::spawn(keep_time(Arc::downgrade(&node)));
        node
    }

    /// The node's description, if it takes requests now.
    pub fn info(&self) -> Option<Arc<NodeInfo>> {
        self.health.usable()
    }

    /// It failed at a task.
    pub fn failed(&self, task: Task, reason: FailureReason) {
        self.breakers.of(task).failed(reason);
        self.health.note_breaker_open(reason);
    }

    /// It succeeded at a task.
    pub fn succeeded(&self, task: Task) {
        self.breakers.of(task).succeeded(Instant::now());
        self.note_breaker_closed();
    }

    /// One of its breakers has closed.
    fn note_breaker_closed(&self) {
        if !self.breakers.is_any_open() {
            self.health.note_breaker_closed();
        }
    }

    /// Returns true if it answers and its breaker for the task lets requests pass.
    pub fn is_trusted(&self, task: Task) -> bool {
        self.breakers.of(task).would_pass() && !self.health.is_silent()
    }

    /// The node's latest description.
    pub fn last_info(&self) -> Option<Arc<NodeInfo>> {
        self.health.last_info()
    }

    /// Returns true if its engine is a simulator, as far as it is known.
    pub fn is_simulated(&self) -> bool {
        self.last_info().is_some_and(|info| EngineKind::is_simulated(&info.engine))
    }

    /// The number of its process, as far as it is known.
    pub fn process(&self) -> u64 {
        self.last_info().map_or(0, |info| info.process)
    }

    /// Returns true if this process reported that it stops, so that its end shows nothing about its requests.
    pub fn was_stopping(&self, process: u64) -> bool {
        process != 0 && self.stopping.load(Ordering::Relaxed) == process
    }

    /// Asks the node if this process of it has ended, although nobody stopped it. One that is frozen or cut off has not.
    pub async fn has_crashed(&self, process: u64) -> bool {
        !self.was_stopping(process) && probe::has_ended(&*self.engine, process).await
    }

    /// Notes the node's description. Forgets all measurements if the node runs another model than before.
    fn set_info(&self, info: Arc<NodeInfo>) {
        let mut learned = lock(&self.learned);
        let is_other = |was: &Arc<NodeInfo>| {
            !Arc::ptr_eq(was, &info) && !ModelIdentity::of(was).is_same(&ModelIdentity::of(&info))
        };
        if learned.of.as_ref().is_some_and(is_other) {
            *learned = NodeMeasurements::default();
        }
        learned.of = Some(info);
    }

    /// Returns true if it cannot be reached, also because it sleeps.
    pub fn is_down(&self) -> bool {
        self.health.state().is_gone()
    }

    /// Waits for a call to this node's engine while the node is alive. Errors: the call's, or that the engine is lost.
    pub async fn call<T, E: From<EngineError>>(&self, call: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        tokio::select! {
            outcome = call => outcome,
            () = self.silence() => Err(EngineError::lost("the node has stopped answering").into()),
        }
    }

    /// Returns once the node is down or has been silent for too long.
    async fn silence(&self) {
        while self.health.is_running() {
            let due = Instant::now() + LOAD_INTERVAL;
            tokio::time::sleep_until(due).await;
            // While this process was stopped it could not hear the node; `keep_time` starts the clock anew.
            if !awake::has_overslept(due) && lock(&self.last_answer).elapsed() >= SILENCE_TIMEOUT {
                return;
            }
        }
    }

    /// The node in a plan's snapshot, for a task and a prompt.
    pub fn view(&self, task: Task, prompt: &PromptHashes<'_>) -> NodeView {
        let reported = *lock(&self.load);
        let (load, (n_streams, n_backlog)) = (reported.load, reported.with_claims(&self.claims));
        let learned = lock(&self.learned);
        let info = self.planned_info();
        let to_wake = self.time_to_wake();
        let barred = match self.health.state() {
            NodeState::Unloaded => Some(BarReason::Unloaded),
            NodeState::Starting => Some(BarReason::Starting),
            NodeState::Draining => Some(BarReason::Draining),
            NodeState::Down => Some(self.health.status().refusal().map_or(BarReason::Down, BarReason::from)),
            NodeState::Asleep | NodeState::Waking => match to_wake {
                Some(Ok(_)) if info.is_some() => None,
                Some(Err(reason)) => Some(reason),
                _ => Some(BarReason::Asleep),
            },
            NodeState::Ready | NodeState::Suspect => {
                let silent = || self.health.is_silent().then_some(BarReason::Suspect);
                self.breakers.of(task).bars().map(BarReason::from).or_else(silent)
            }
        };
        // Until this endpoint has measured a rate, the node's own figure is used. It depends on no length or batch size.
        let known = |curve: Curve, reported: f64| if curve.is_known() { curve } else { Curve::constant(reported) };
        let n_slots = info.as_ref().map_or(1, |info| info.n_slots);
        NodeView {
            name: self.name.clone(),
            barred,
            only_drafts: self.last_info().is_some_and(|info| info.role.drafts()),
            wake_ms: to_wake.and_then(Result::ok).map(|time| time.as_secs_f64() * 1e3),
            n_slots,
            n_active: n_streams.min(n_slots),
            n_queued: n_streams.saturating_sub(n_slots),
            n_backlog,
            held: learned.prefixes.held(task, prompt),
            belief: learned.prefixes.promises.belief(),
            rates: NodeRates {
                prefill: known(learned.rates.prefill, load.prefill_tps),
                decode: known(learned.rates.decode, load.decode_tps),
                restore: load.restore,
            },
            kv: info.as_deref().map_or(Err(NoHandoffReason::default()), kv_size),
        }
    }

    /// Claims the node for streams whose prompt has this many tokens to compute.
    pub fn claim(&self, n_streams: u32, n_prompt_tokens: u32) -> NodeClaim {
        NodeClaim::new(&self.claims, n_streams, n_prompt_tokens)
    }

    /// Claims it for a measurement with a prompt of so many tokens. Plans leave it out, because it gives way to requests.
    pub fn claim_measurement(&self, n_prompt_tokens: u32) -> NodeClaim {
        NodeClaim::new(&self.measurements, 1, n_prompt_tokens)
    }

    /// The source from which a decode node pulls this node's KV; `None` if other nodes cannot reach this node.
    pub fn kv_source(&self) -> Option<KvSource> {
        if let Some(socket) = &self.socket {
            return Some(KvSource::at_socket(socket.clone()));
        }
        let source = KvSource::at(self.url.clone()?);
        Some(match &self.found {
            Some(found) => found.source(source),
            None => source,
        })
    }

    /// Updates the measured rates.
    pub fn learn(&self, update: impl FnOnce(&mut NodeRates)) {
        update(&mut lock(&self.learned).rates);
    }

    /// The measured rates.
    pub fn rates(&self) -> NodeRates {
        lock(&self.learned).rates
    }

    /// Notes that the node now holds the KV of these tokens.
    pub fn remember(&self, scope: CacheScope, tokens: &[Token]) {
        lock(&self.learned).prefixes.remember(scope, tokens);
    }

    /// A prompt came of which it should have held so many tokens, and held these.
    pub fn note_held(&self, n_promised: u32, n_held: u32) {
        if lock(&self.learned).prefixes.promises.note(n_promised, n_held) {
            tracing::warn!(node = self.name, "a node lacks what it says it holds, so its list counts for nothing");
        }
    }

    /// Notes that the node's caches are lost, because its process has ended.
    pub fn forget(&self) {
        lock(&self.learned).prefixes.clear();
    }

    /// The load that the node reported last.
    pub fn load(&self) -> NodeLoad {
        lock(&self.load).load
    }
}

impl Followed for Node {
    fn engine(&self) -> &Arc<dyn Engine> {
        &self.engine
    }

    fn health(&self) -> &Health {
        &self.health
    }

    fn set_load(&self, load: NodeLoad, asked: Instant) {
        if let Some(info) = self.info() {
            self.set_info(info);
        }
        *lock(&self.load) = ReportedLoad::new(load, &self.claims, &self.measurements);
        *lock(&self.last_answer) = Instant::now();
        match load.phase {
            // The stopping process has ended, and this is another one: it must first report its model.
            Phase::Serving if self.health.state() == NodeState::Draining => {
                self.health.note_silence(&StateChange::new(StateReason::Restarted, "the node was restarted"));
            }
            Phase::Serving => self.health.note_alive(),
            Phase::Stopping => {
                self.stopping.store(self.process(), Ordering::Relaxed);
                self.health.note_draining();
            }
            Phase::Starting => self.health.note_loading(StateReason::Loading),
        }
        if self.breakers.answered(asked) {
            self.note_breaker_closed();
        }
        if let Some(waker) = &*self.waker.load() {
            waker.note_answer(asked);
        }
    }

    fn note_not_asked(&self) {
        *lock(&self.last_answer) = Instant::now();
    }

    fn clear_load(&self) {
        *lock(&self.last_answer) = Instant::now();
        *lock(&self.load) = ReportedLoad::default();
        self.forget();
    }
}

impl Holder for Node {
    fn asked(&self) -> Option<(Arc<dyn Engine>, u64)> {
        let held = lock(&self.load).load.held;
        let is_known = held == 0 || held == lock(&self.learned).prefixes.version() || self.info().is_none();
        (!is_known).then(|| (Arc::clone(&self.engine), self.process()))
    }

    fn told(&self, digest: HeldDigest, asked: Instant, process: u64) {
        // What an ended process held is gone.
        if self.process() == process {
            lock(&self.learned).prefixes.told(digest, asked);
        }
    }
}

/// Starts the clock of a node's silence anew whenever this process was stopped, until the node is dropped.
async fn keep_time(node: Weak<Node>) {
    loop {
        let due = Instant::now() + LOAD_INTERVAL;
        tokio::time::sleep_until(due).await;
        let Some(node) = node.upgrade() else { return };
        if awake::has_overslept(due) {
            *lock(&node.last_answer) = Instant::now();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
