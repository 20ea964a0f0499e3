//! One of the endpoint's own models that is loaded on demand: its process, its users, and the time of its unloading.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::node::NodeInfo;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::keep_wish::KeepWish;
use super::load_report::{LoadHistory, LoadReport, LoadState, UnloadReason};
use super::memory::MemoryUse;
use crate::error::RequestError;
use crate::log_target::NOTICE;
use crate::targets::nodes::{Health, HealthStatus, NodeState};

/// The pause after a failed load. Doubles with each failure in a row, because each attempt may unload other models.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// The settings of a model, as far as they are known before it is loaded.
#[derive(Debug, Clone)]
pub struct LoadableSettings {
    /// Its name in the log.
    pub name: String,
    /// Bytes of memory that it needs, estimated from its file.
    pub estimated_bytes: u64,
    /// Its description from its file.
    pub outline: Option<Arc<NodeInfo>>,
    /// How long it stays in memory, unless a request sets another time.
    pub keep_alive: KeepAlive,
}

/// The handles of a supervised process.
pub struct ModelProcess {
    /// Set to true to start the process, to false to end it.
    pub wanted: watch::Sender<bool>,
    /// Its state.
    pub health: Arc<Health>,
    /// The id of the process; 0 if there is none.
    pub pid: Arc<AtomicU32>,
    /// Ends it permanently.
    pub stop: CancellationToken,
    /// Finishes when it has ended permanently.
    pub tracker: TaskTracker,
}

/// See the module.
pub struct LoadableModel {
    /// Its state.
    pub health: Arc<Health>,
    settings: Mutex<LoadableSettings>,
    process: ModelProcess,
    usage: Mutex<LoadableUsage>,
}

struct LoadableUsage {
    n_active: u32,
    n_waiting: usize,
    last_used: Instant,
    keep_alive: KeepAlive,
    waiting_since: Option<Instant>,
    is_retired: bool,
    /// Memory of the running process.
    measured_bytes: u64,
    load_began: Option<Instant>,
    last_failure: Option<String>,
    /// Failed loads in a row.
    n_failures: u32,
    /// No load is tried before this.
    failing_until: Option<Instant>,
    history: LoadHistory,
}

impl LoadableModel {
    /// A model with its supervised process.
    pub fn new(settings: LoadableSettings, process: ModelProcess) -> Arc<LoadableModel> {
        let usage = LoadableUsage {
            n_active: 0,
            n_waiting: 0,
            last_used: Instant::now(),
            keep_alive: settings.keep_alive,
            waiting_since: None,
            is_retired: false,
            measured_bytes: 0,
            load_began: None,
            last_failure: None,
            n_failures: 0,
            failing_until: None,
            history: LoadHistory::default(),
        };
        let health = Arc::clone(&process.health);
        let mut state = health.subscribe();
        let settings = Mutex::new(settings);
        let model = Arc::new(LoadableModel { health, settings, process, usage: Mutex::new(usage) });
        let watched = Arc::downgrade(&model);
        tokio::spawn(async move {
            while state.changed().await.is_ok() {
                let now = state.borrow_and_update().clone();
                match watched.upgrade() {
                    Some(model) => model.note(&now),
                    None => return,
                }
            }
        });
        model
    }

    /// Notes that a load succeeded or failed. Noting a failure twice changes nothing.
    pub(super) fn note(&self, status: &HealthStatus) {
        let name = self.settings().name;
        let mut usage = self.usage();
        match status.state() {
            NodeState::Ready | NodeState::Suspect => {
                if let Some(began) = usage.load_began.take() {
                    let took = began.elapsed();
                    usage.history.n_loads += 1;
                    usage.history.load_time += took;
                    usage.history.last_load = took;
                    // Its idle time starts only now.
                    usage.last_used = Instant::now();
                    tracing::info!(target: NOTICE, model = name, seconds = took.as_secs_f64(), "a model was loaded");
                }
                usage.last_failure = None;
                usage.n_failures = 0;
                usage.failing_until = None;
            }
            NodeState::Down => {
                let reason = &status.words;
                let was_loading = usage.load_began.take().is_some();
                if !was_loading && usage.last_failure.as_ref() == Some(reason) {
                    return;
                }
                usage.last_failure = Some(reason.clone());
                if was_loading {
                    let pause = FIRST_PAUSE.saturating_mul(1 << usage.n_failures.min(16)).min(MAX_PAUSE);
                    usage.n_failures = usage.n_failures.saturating_add(1);
                    usage.failing_until = Some(Instant::now() + pause);
                }
                tracing::warn!(model = name, reason, "a model cannot be loaded");
            }
            // A process of this machine's own is never asleep.
            NodeState::Starting | NodeState::Draining | NodeState::Asleep | NodeState::Waking => {}
            NodeState::Unloaded => usage.measured_bytes = 0,
        }
    }

    /// The settings now.
    pub fn settings(&self) -> LoadableSettings {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes how long it stays in memory.
    pub fn reconfigure(&self, keep_alive: KeepAlive) {
        let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut settings.keep_alive, keep_alive) == keep_alive {
            return;
        }
        drop(settings);
        self.set_keep_alive(keep_alive);
    }

    /// Bytes that it uses: the estimate, or the measured size of its process if that is more.
    pub(super) fn bytes(&self) -> u64 {
        let estimated = self.settings.lock().unwrap_or_else(PoisonError::into_inner).estimated_bytes;
        // A process that has just ended is measured until its end was noted.
        let measured = if self.holds_memory() { self.usage().measured_bytes } else { 0 };
        estimated.max(measured)
    }

    /// The cause of its last failed load and the time until the next attempt; `None` if an attempt is allowed now.
    pub(super) fn failing(&self) -> Option<(String, Duration)> {
        let usage = self.usage();
        let left = usage.failing_until?.checked_duration_since(Instant::now())?;
        Some((usage.last_failure.clone().unwrap_or_default(), left))
    }

    /// Returns true if it should be in memory.
    pub(super) fn is_wanted(&self) -> bool {
        *self.process.wanted.borrow()
    }

    /// Returns true if its process is running or ending.
    pub(super) fn holds_memory(&self) -> bool {
        self.health.state() != NodeState::Unloaded
    }

    pub(super) fn memory_use(&self) -> MemoryUse {
        let bytes = self.bytes();
        let is_wanted = self.is_wanted();
        let is_in = is_wanted || self.holds_memory();
        let usage = self.usage();
        MemoryUse {
            bytes,
            is_in,
            is_leaving: is_in && !is_wanted,
            is_used: usage.n_active > 0,
            last_used: usage.last_used,
        }
    }

    /// Counts one more waiting request. Errors: too many wait already.
    pub(super) fn start_waiting(self: &Arc<Self>, max_waiting: usize) -> Result<LoadWaiter, RequestError> {
        let is_ready = self.health.usable().is_some();
        let mut usage = self.usage();
        if usage.n_waiting >= max_waiting && !is_ready {
            let reason = "too many requests wait for it to be loaded";
            return Err(RequestError::unavailable(reason, super::RETRY_AFTER));
        }
        usage.n_waiting += 1;
        Ok(LoadWaiter(Arc::clone(self)))
    }

    /// Returns the time since which its requests wait for memory: `now`, if they did not wait before.
    pub(super) fn wait_for_memory(&self, now: Instant) -> Instant {
        *self.usage().waiting_since.get_or_insert(now)
    }

    pub(super) fn waiting_since(&self) -> Option<Instant> {
        self.usage().waiting_since
    }

    /// Starts its process.
    pub(super) fn load(&self) {
        let keep_alive = self.settings().keep_alive;
        {
            let mut usage = self.usage();
            usage.load_began = Some(Instant::now());
            usage.waiting_since = None;
            usage.keep_alive = keep_alive;
        }
        self.process.wanted.send_replace(true);
    }

    /// Counts one more request that uses it.
    pub(super) fn lease(self: &Arc<Self>, wish: KeepWish) -> ModelLease {
        let configured = self.settings().keep_alive;
        let mut usage = self.usage();
        usage.n_active += 1;
        usage.last_used = Instant::now();
        usage.keep_alive = wish.apply(usage.keep_alive, configured);
        ModelLease { model: Arc::clone(self) }
    }

    /// Sets how long it stays in memory after its last use.
    pub(super) fn set_keep_alive(&self, keep_alive: KeepAlive) {
        self.usage().keep_alive = keep_alive;
    }

    /// The reason to unload it now; `None` if it should stay.
    pub(super) fn unload_reason(&self) -> Option<UnloadReason> {
        if !self.is_wanted() {
            return None;
        }
        let has_failed = self.health.state() == NodeState::Down;
        let usage = self.usage();
        match usage.keep_alive {
            _ if usage.n_active > 0 => None,
            _ if usage.is_retired => Some(UnloadReason::Removed),
            _ if has_failed => Some(UnloadReason::Failed),
            KeepAlive::Forever => None,
            KeepAlive::For(time) if usage.last_used.elapsed() < time => None,
            keep_alive if keep_alive.is_nothing() => Some(UnloadReason::Asked),
            KeepAlive::For(_) => Some(UnloadReason::Idle),
        }
    }

    /// Ends its process. The next request starts it again.
    pub(super) fn unload(&self, why: UnloadReason) {
        if self.process.wanted.send_replace(false) {
            let name = self.settings().name;
            let mut usage = self.usage();
            usage.load_began = None;
            *usage.history.unloads.entry(why).or_default() += 1;
            tracing::info!(target: NOTICE, model = name, reason = why.as_str(), "a model is unloaded");
        }
    }

    /// Takes it out of service: it is unloaded after its last request.
    pub(super) fn retire(&self) {
        self.usage().is_retired = true;
    }

    pub(super) fn is_retired(&self) -> bool {
        self.usage().is_retired
    }

    pub(super) fn is_used(&self) -> bool {
        self.usage().n_active > 0
    }

    /// Ends its process permanently.
    pub(super) fn stop(&self) {
        self.process.stop.cancel();
    }

    pub(super) fn is_gone(&self) -> bool {
        self.process.tracker.is_empty()
    }

    /// Waits until its process has ended permanently.
    pub async fn wait_until_gone(&self) {
        self.process.tracker.wait().await;
    }

    /// The id of the process that holds the model.
    pub(super) fn pid(&self) -> Option<u32> {
        let is_ready = self.health.usable().is_some();
        Some(self.process.pid.load(Ordering::Relaxed)).filter(|pid| *pid > 0 && is_ready)
    }

    /// Notes the memory of a process.
    pub(super) fn set_measured(&self, pid: u32, bytes: u64) {
        if self.pid() == Some(pid) {
            self.usage().measured_bytes = bytes;
        }
    }

    /// Its description from its file.
    pub fn outline(&self) -> Option<Arc<NodeInfo>> {
        self.settings().outline
    }

    /// The model at this moment.
    pub fn report(&self) -> LoadReport {
        let bytes = self.bytes();
        let is_wanted = self.is_wanted();
        let node_state = self.health.state();
        let usage = self.usage();
        let state = match (node_state, is_wanted) {
            (NodeState::Ready | NodeState::Suspect, true) => LoadState::Loaded,
            (NodeState::Down | NodeState::Asleep | NodeState::Waking, true) => LoadState::Failed,
            (NodeState::Starting | NodeState::Unloaded | NodeState::Draining, true) => LoadState::Loading,
            (NodeState::Unloaded, false) if usage.last_failure.is_some() => LoadState::Failed,
            (NodeState::Unloaded, false) => LoadState::Unloaded,
            (_, false) => LoadState::Unloading,
        };
        let expires_at = match usage.keep_alive {
            KeepAlive::For(time) if state == LoadState::Loaded => {
                let since = if usage.n_active > 0 { Duration::ZERO } else { usage.last_used.elapsed() };
                SystemTime::now().checked_add(time.saturating_sub(since))
            }
            _ => None,
        };
        LoadReport {
            state,
            bytes,
            measured_bytes: usage.measured_bytes,
            n_active: usage.n_active,
            n_waiting: usage.n_waiting,
            expires_at,
            history: usage.history.clone(),
            last_failure: usage.last_failure.clone(),
        }
    }

    fn usage(&self) -> MutexGuard<'_, LoadableUsage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LoadableModel {
    fn drop(&mut self) {
        self.process.stop.cancel();
    }
}

/// The right to use a model. The model is not unloaded before this is dropped.
pub struct ModelLease {
    model: Arc<LoadableModel>,
}

impl Drop for ModelLease {
    fn drop(&mut self) {
        let mut usage = self.model.usage();
        usage.n_active -= 1;
        usage.last_used = Instant::now();
    }
}

/// A request that waits for a model. Dropping it ends the wait.
pub(super) struct LoadWaiter(Arc<LoadableModel>);

impl Drop for LoadWaiter {
    fn drop(&mut self) {
        let mut usage = self.0.usage();
        usage.n_waiting -= 1;
        if usage.n_waiting == 0 {
            usage.waiting_since = None;
        }
    }
}
