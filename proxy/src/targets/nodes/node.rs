//! A node of the pool: an engine somewhere, and everything this endpoint knows of it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_engines::Engine;
use baton_planner::rates::{Curve, NodeRates};
use baton_planner::reason::{BarReason, FailureReason};
use baton_planner::snapshot::NodeView;
use baton_schemas::CacheScope;
use baton_schemas::handoff::KvSource;
use baton_schemas::node::{NodeInfo, NodeLoad, Phase};
use baton_schemas::{EngineError, Token};
use tokio::time::Instant;

use super::breakers::{Breakers, Task};
use super::follow::{LOAD_INTERVAL, follow};
use super::health::{Health, StateReason, Why};
use super::life::Life;
use super::prefixes::Prefixes;
use super::{Identity, READY_WAIT, unavailable};
use crate::error::RequestError;

/// A node that has answered nothing for so long is frozen or cut off: no call to it is waited for any longer. A node
/// answers from other threads than those that compute.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(5);

/// See the module.
pub struct Node {
    /// What it is called in `x-baton-route`: no address.
    pub name: String,
    /// Where other nodes reach it, if they do.
    pub url: Option<String>,
    /// Its client.
    pub engine: Arc<dyn Engine>,
    /// Where it is in its life.
    pub health: Arc<Health>,
    /// Keep requests away while they fail. What comes of requests is told to the node, which tells them.
    pub breakers: Breakers,
    load: Mutex<NodeLoad>,
    heard_at: Mutex<Instant>,
    claims: Claims,
    learned: Mutex<Learned>,
}

/// What this endpoint has asked of a node and not got yet.
#[derive(Debug, Default)]
struct Claims {
    n_streams: AtomicU32,
    n_prompt_tokens: AtomicU32,
}

#[derive(Default)]
struct Learned {
    /// What the node was when it was learned.
    of: Option<Arc<NodeInfo>>,
    rates: NodeRates,
    prefixes: Prefixes,
}

impl Node {
    /// A node; its load is followed from now on, until it is dropped.
    pub fn new(name: String, url: Option<String>, engine: Arc<dyn Engine>, health: Arc<Health>) -> Arc<Node> {
        let node = Arc::new(Node {
            name,
            url,
            engine,
            health,
            breakers: Breakers::default(),
            load: Mutex::default(),
            heard_at: Mutex::new(Instant::now()),
            claims: Claims::default(),
            learned: Mutex::default(),
        });
        tokio::spawn(follow(Arc::downgrade(&node)));
        node
    }

    /// What the node is, if it can be sent requests now.
    pub fn info(&self) -> Option<Arc<NodeInfo>> {
        self.health.usable()
    }

    /// Takes in what it says that it is doing, in answer to a question after `asked`.
    pub(super) fn hears(&self, load: NodeLoad, asked: Instant) {
        if let Some(info) = self.info() {
            self.is_now(info);
        }
        *lock(&self.load) = load;
        self.is_heard();
        match load.phase {
            // Another process than the one that was told to stop: it is asked what it is.
            Phase::Serving if self.health.life() == Life::Draining => {
                self.health.quiets(&Why::plainly(StateReason::Restarted, "the node was restarted"));
            }
            Phase::Serving => self.health.lives(),
            Phase::Stopping => self.health.stops(),
            Phase::Starting => self.health.loads(StateReason::Loading),
        }
        if self.breakers.answered(asked) {
            self.closes();
        }
    }

    /// It is not silent now.
    pub(super) fn is_heard(&self) {
        *lock(&self.heard_at) = Instant::now();
    }

    /// It failed at a task, for a reason that is the node's.
    pub fn failed(&self, task: Task, reason: FailureReason) {
        self.breakers.of(task).failed(reason);
        self.health.breaker_opens(reason);
    }

    /// It did a task well.
    pub fn succeeded(&self, task: Task) {
        self.breakers.of(task).succeeded();
        self.closes();
    }

    /// One of its breakers has closed.
    fn closes(&self) {
        if !self.breakers.is_any_open() {
            self.health.breaker_closes();
        }
    }

    /// Whether it is as good as any for a task: it answers, and does not fail at it.
    pub fn is_trusted(&self, task: Task) -> bool {
        self.breakers.of(task).would_pass() && !self.health.is_silent()
    }

    /// What the node is, or was when it was last ready.
    pub fn last_info(&self) -> Option<Arc<NodeInfo>> {
        self.health.last_info()
    }

    /// Notes what the node is. One that was restarted with another model has to be learned anew.
    fn is_now(&self, info: Arc<NodeInfo>) {
        let mut learned = lock(&self.learned);
        let is_other =
            |was: &Arc<NodeInfo>| !Arc::ptr_eq(was, &info) && !Identity::of(was).is_same(&Identity::of(&info));
        if learned.of.as_ref().is_some_and(is_other) {
            *learned = Learned::default();
        }
        learned.of = Some(info);
    }

    /// What the node is, once it is ready. Waits for one that is starting, but not for one that cannot start.
    pub async fn ready(&self) -> Result<Arc<NodeInfo>, RequestError> {
        let mut health = self.health.subscribe();
        let settled = health.wait_for(|status| status.life() != Life::Starting);
        match tokio::time::timeout(READY_WAIT, settled).await {
            Ok(Ok(status)) => {
                let usable = status.usable().map(Arc::clone);
                usable.ok_or_else(|| unavailable(&status.words, status.retry_in))
            }
            Ok(Err(_)) => Err(unavailable("the engine has been stopped", READY_WAIT)),
            Err(_) => Err(unavailable("the model is loading", READY_WAIT)),
        }
    }

    /// Whether it is down.
    pub fn has_failed(&self) -> bool {
        self.health.life() == Life::Down
    }

    /// Waits for a call to this node's engine, but no longer than the node shows that it lives. Errors: the call's, or
    /// that the engine is lost.
    pub async fn call<T, E: From<EngineError>>(&self, call: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        tokio::select! {
            outcome = call => outcome,
            () = self.silence() => Err(EngineError::lost("the node has stopped answering").into()),
        }
    }

    /// Returns once the node is down or has been silent for too long.
    async fn silence(&self) {
        while self.health.is_running() && lock(&self.heard_at).elapsed() < SILENCE_TIMEOUT {
            tokio::time::sleep(LOAD_INTERVAL).await;
        }
    }

    /// What a plan has to know of it, for a task and a prompt.
    pub fn view(&self, task: Task, scope: CacheScope, prompt: &[Token]) -> NodeView {
        let load = *lock(&self.load);
        let learned = lock(&self.learned);
        let info = self.info();
        let barred = match self.health.life() {
            Life::Unloaded => Some(BarReason::Unloaded),
            Life::Starting => Some(BarReason::Starting),
            Life::Draining => Some(BarReason::Draining),
            Life::Down => Some(BarReason::Down),
            Life::Ready | Life::Suspect => {
                let silent = || self.health.is_silent().then_some(BarReason::Suspect);
                self.breakers.of(task).bars().map(BarReason::from).or_else(silent)
            }
        };
        // The node's own figures until this endpoint has better ones: they are not by length or batch.
        let known = |curve: Curve, engines: f64| if curve.is_known() { curve } else { Curve::constant(engines) };
        let n_streams = self.claims.n_streams.load(Ordering::Relaxed);
        NodeView {
            name: self.name.clone(),
            barred,
            n_slots: info.as_ref().map_or(1, |info| info.n_slots),
            n_active: load.active_slots.max(n_streams.min(info.as_ref().map_or(0, |info| info.n_slots))),
            n_queued: load.queued.max(n_streams.saturating_sub(info.as_ref().map_or(0, |info| info.n_slots))),
            n_backlog: load.prefill_backlog.max(self.claims.n_prompt_tokens.load(Ordering::Relaxed)),
            n_cached: u32::try_from(learned.prefixes.cached(scope, prompt)).unwrap_or(u32::MAX),
            rates: NodeRates {
                prefill: known(learned.rates.prefill, load.prefill_tps),
                decode: known(learned.rates.decode, load.decode_tps),
            },
            kv_bytes_per_token: info
                .and_then(|info| info.kv.as_ref().map(|kv| kv.layout.bytes_per_position()))
                .and_then(|n| u32::try_from(n).ok()),
        }
    }

    /// Notes that the node is asked for a stream whose prompt has this many tokens to compute.
    pub fn claim(self: &Arc<Self>, n_streams: u32, n_prompt_tokens: u32) -> Claim {
        self.claims.n_streams.fetch_add(n_streams, Ordering::Relaxed);
        self.claims.n_prompt_tokens.fetch_add(n_prompt_tokens, Ordering::Relaxed);
        Claim { node: Arc::clone(self), n_streams, n_prompt_tokens, is_prompt: false }
    }

    /// Notes that the node is asked for the KV of a prompt, of which it has so many tokens to compute.
    pub fn claim_prompt(self: &Arc<Self>, n_tokens: u32) -> Claim {
        let mut claim = self.claim(1, n_tokens);
        claim.is_prompt = true;
        claim
    }

    /// What a decode node is told, to pull KV from this one.
    pub fn kv_source(&self) -> Option<KvSource> {
        Some(KvSource::at(self.url.clone()?))
    }

    /// Takes measurements into account.
    pub fn learn(&self, update: impl FnOnce(&mut NodeRates)) {
        update(&mut lock(&self.learned).rates);
    }

    /// What was measured.
    pub fn rates(&self) -> NodeRates {
        lock(&self.learned).rates
    }

    /// Notes that the node holds the KV of these tokens now.
    pub fn remember(&self, scope: CacheScope, tokens: &[Token]) {
        lock(&self.learned).prefixes.remember(scope, tokens);
    }

    /// Notes that the node's process has ended, and its caches with it.
    pub fn forget(&self) {
        lock(&self.learned).prefixes.clear();
    }

    /// Its process does not run, and so does nothing and keeps nothing.
    pub(super) fn ends(&self) {
        *lock(&self.load) = NodeLoad::default();
        self.forget();
    }

    /// What the node is doing, as far as is known.
    pub fn load(&self) -> NodeLoad {
        *lock(&self.load)
    }
}

/// A part of a node's work that this endpoint asked for. Given back when dropped.
pub struct Claim {
    node: Arc<Node>,
    n_streams: u32,
    n_prompt_tokens: u32,
    /// For a prompt alone: no stream stays after it.
    is_prompt: bool,
}

impl Claim {
    /// The prompt is computed.
    pub fn prompt_done(&mut self) {
        let n_tokens = std::mem::take(&mut self.n_prompt_tokens);
        self.node.claims.n_prompt_tokens.fetch_sub(n_tokens, Ordering::Relaxed);
        if self.is_prompt {
            self.stream_done();
        }
    }

    fn stream_done(&mut self) {
        self.node.claims.n_streams.fetch_sub(std::mem::take(&mut self.n_streams), Ordering::Relaxed);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.prompt_done();
        self.stream_done();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
