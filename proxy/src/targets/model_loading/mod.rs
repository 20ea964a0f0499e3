//! Loads and unloads this endpoint's own models. A model is loaded when a request needs it, and unloaded after its
//! keep-alive time without a request, or when another model needs its memory.
//!
//! A request holds a [`ModelLease`] to its last token; a leased model is never unloaded. Requests for a model that is not in
//! memory start its process once and wait together. Memory goes to the model whose requests have waited longest; idle
//! models are unloaded for it in the order of their last use. Once it has waited for `YIELD_AFTER`, requests for other
//! models wait after it, so that a busy model cannot keep it out forever.
//!
//! A model's memory is estimated from its file (weights, KV cache, compute buffers). If its process is measured to use
//! more, that value counts. `[model]` is always loaded, and its memory is reserved.

mod keep_wish;
mod load_report;
mod loadable_model;
mod machine;
mod memory;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_schemas::keep_alive::KeepAlive;
use tokio::time::Instant;

pub use self::keep_wish::KeepWish;
pub use self::load_report::{LoadHistory, LoadReport, LoadState, UnloadReason};
pub use self::loadable_model::{LoadableModel, LoadableSettings, ModelLease, ModelProcess};
pub use self::machine::total_memory;
use self::memory::{MemoryFit, MemoryUse};
use crate::error::RequestError;
use crate::targets::nodes::NodeState;

/// How often expired models are unloaded, and waiting requests try again.
const INTERVAL: Duration = Duration::from_millis(50);

/// How often the memory of processes is measured.
const MEASURE_INTERVAL: Duration = Duration::from_secs(2);

/// How long a model waits for memory until requests for other models wait after it.
const YIELD_AFTER: Duration = Duration::from_secs(5);

/// When a client may retry a model that found no memory or is not loaded yet.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// Limits of all models together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadLimits {
    /// Bytes that all own models may use.
    pub memory_budget: u64,
    /// Bytes of the budget that `[model]` uses.
    pub reserved: u64,
    /// The maximum number of requests that wait for one model.
    pub max_waiting: usize,
    /// The maximum wait of a request.
    pub max_wait: Duration,
}

/// `max_waiting` is a small multiple of an engine's queue; `max_wait` is longer than the largest models take to load.
impl Default for LoadLimits {
    fn default() -> Self {
        LoadLimits { memory_budget: u64::MAX, reserved: 0, max_waiting: 256, max_wait: Duration::from_secs(300) }
    }
}

/// Loads and unloads own models. See the module.
#[derive(Default)]
pub struct ModelLoader {
    inner: Mutex<LoaderState>,
}

#[derive(Default)]
struct LoaderState {
    limits: LoadLimits,
    /// The configured models, and removed ones that still have streams.
    models: Vec<Arc<LoadableModel>>,
}

/// The outcome of one attempt to use a model.
enum LeaseAttempt {
    /// The model is in memory or loading.
    Granted(ModelLease),
    /// Other models must be unloaded first.
    Wait,
}

impl LoaderState {
    fn budget(&self) -> u64 {
        self.limits.memory_budget.saturating_sub(self.limits.reserved)
    }

    /// Returns true if `other` would have memory once `this` were idle.
    fn would_make_room(&self, this: &Arc<LoadableModel>, other: &LoadableModel) -> bool {
        let memory_use = |model: &Arc<LoadableModel>| {
            let used = model.memory_use();
            MemoryUse { is_used: used.is_used && !Arc::ptr_eq(model, this), ..used }
        };
        let uses: Vec<MemoryUse> = self.models.iter().map(memory_use).collect();
        !matches!(memory::find(other.bytes(), self.budget(), &uses), MemoryFit::Later | MemoryFit::Never)
    }
}

impl ModelLoader {
    /// A loader of these models. A task unloads and measures them until the loader is dropped.
    pub fn new(limits: LoadLimits, models: Vec<Arc<LoadableModel>>) -> Arc<ModelLoader> {
        let loader = Arc::new(ModelLoader { inner: Mutex::new(LoaderState { limits, models }) });
        let watched = Arc::downgrade(&loader);
        tokio::spawn(async move {
            let mut measured_at = Instant::now();
            while let Some(loader) = watched.upgrade() {
                loader.expire();
                if measured_at.elapsed() >= MEASURE_INTERVAL {
                    measured_at = Instant::now();
                    loader.measure().await;
                }
                drop(loader);
                tokio::time::sleep(INTERVAL).await;
            }
        });
        loader
    }

    /// Replaces the models and limits. Removed models are unloaded when their streams have ended.
    pub fn replace(&self, limits: LoadLimits, models: &[Arc<LoadableModel>]) {
        let mut inner = self.lock();
        inner.limits = limits;
        let stays = |old: &Arc<LoadableModel>| models.iter().any(|new| Arc::ptr_eq(new, old));
        inner.models.iter().filter(|old| !stays(old)).for_each(|old| old.retire());
        for new in models {
            if !inner.models.iter().any(|old| Arc::ptr_eq(new, old)) {
                inner.models.push(Arc::clone(new));
            }
        }
    }

    /// The limits now.
    pub fn limits(&self) -> LoadLimits {
        self.lock().limits
    }

    /// Leases a model, and loads it first if it is not in memory. `wish` says how long it stays in memory after this use.
    /// Dropping the future ends the wait.
    ///
    /// Errors: too many requests wait already, the model cannot be loaded, or memory does not become free in time.
    pub async fn lease(
        &self,
        model: &Arc<LoadableModel>,
        wish: impl Into<KeepWish>,
    ) -> Result<ModelLease, RequestError> {
        let wish = wish.into();
        let LoadLimits { max_waiting, max_wait, .. } = self.limits();
        let waiting = model.start_waiting(max_waiting)?;
        let deadline = Instant::now() + max_wait;
        let lease = loop {
            match self.try_lease(model, wish)? {
                LeaseAttempt::Granted(lease) => break lease,
                LeaseAttempt::Wait if Instant::now() >= deadline => {
                    return Err(RequestError::unavailable(
                        "other models are busy in the memory that it needs",
                        RETRY_AFTER,
                    ));
                }
                LeaseAttempt::Wait => tokio::time::sleep(INTERVAL).await,
            }
        };
        let mut state = model.health.subscribe();
        let settled = state.wait_for(|status| status.usable().is_some() || status.state() == NodeState::Down);
        // A copy, because the model's own lock must not be taken while the state is borrowed.
        let settled = tokio::time::timeout_at(deadline, settled).await.map(|state| state.map(|status| status.clone()));
        let outcome = match settled {
            Err(_) => Err(RequestError::unavailable("it is still being loaded", RETRY_AFTER)),
            Ok(Err(_)) => Err(RequestError::unavailable("it was removed", RETRY_AFTER)),
            Ok(Ok(status)) if status.usable().is_some() => Ok(()),
            Ok(Ok(status)) => {
                // Before the client hears of it, so that whoever looks then sees it.
                model.note(&status);
                Err(RequestError::unavailable(&status.words, status.retry_in))
            }
        };
        drop(waiting);
        outcome.map(|()| lease)
    }

    /// Unloads a model as soon as no request uses it.
    pub fn unload(&self, model: &LoadableModel) {
        model.set_keep_alive(KeepAlive::For(Duration::ZERO));
        self.expire();
    }

    /// Ends all processes, and waits until they have ended.
    pub async fn stop(&self) {
        let models = self.lock().models.clone();
        models.iter().for_each(|model| model.stop());
        for model in models {
            model.wait_until_gone().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, LoaderState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes one attempt. Starts the model's process if there is memory for it.
    fn try_lease(&self, model: &Arc<LoadableModel>, wish: KeepWish) -> Result<LeaseAttempt, RequestError> {
        let inner = self.lock();
        if model.is_retired() && !model.is_wanted() {
            return Err(RequestError::unavailable("it was removed", RETRY_AFTER));
        }
        let now = Instant::now();
        let waits_longer = |other: &&Arc<LoadableModel>, than: Instant| {
            !Arc::ptr_eq(other, model) && other.waiting_since().is_some_and(|since| since < than)
        };
        if model.is_wanted() {
            let long_ago = now.checked_sub(YIELD_AFTER);
            let waits = |other: &Arc<LoadableModel>| long_ago.is_some_and(|then| waits_longer(&other, then));
            let yields = inner.models.iter().any(|other| waits(other) && inner.would_make_room(model, other));
            return Ok(if yields { LeaseAttempt::Wait } else { LeaseAttempt::Granted(model.lease(wish)) });
        }
        if let Some((why, wait)) = model.failing() {
            return Err(RequestError::unavailable(&why, wait));
        }
        let since = model.wait_for_memory(now);
        if model.holds_memory() || inner.models.iter().any(|other| waits_longer(&other, since)) {
            return Ok(LeaseAttempt::Wait);
        }
        let uses: Vec<MemoryUse> = inner.models.iter().map(|model| model.memory_use()).collect();
        match memory::find(model.bytes(), inner.budget(), &uses) {
            MemoryFit::Now => {
                model.load();
                Ok(LeaseAttempt::Granted(model.lease(wish)))
            }
            MemoryFit::AfterUnloading(idle) => {
                for i in idle {
                    inner.models[i].unload(UnloadReason::Memory);
                }
                Ok(LeaseAttempt::Wait)
            }
            MemoryFit::Later => Ok(LeaseAttempt::Wait),
            MemoryFit::Never => {
                Err(RequestError::unavailable("it does not fit into the memory that models may take", RETRY_AFTER))
            }
        }
    }

    /// Unloads models that are no longer needed.
    fn expire(&self) {
        let mut inner = self.lock();
        for model in &inner.models {
            if let Some(why) = model.unload_reason() {
                model.unload(why);
            }
            if model.is_retired() && !model.is_used() {
                model.stop();
            }
        }
        inner.models.retain(|model| !(model.is_retired() && model.is_gone()));
    }

    async fn measure(&self) {
        let models = self.lock().models.clone();
        let running: Vec<_> = models.into_iter().filter_map(|model| Some((model.pid()?, model))).collect();
        if running.is_empty() {
            return;
        }
        // This reads system files, which would block the threads that serve requests.
        let measured = tokio::task::spawn_blocking(move || {
            for (pid, model) in running {
                if let Some(bytes) = machine::resident_bytes(pid) {
                    model.set_measured(pid, bytes);
                }
            }
        });
        let _ = measured.await;
    }
}
