//! One own model that comes and goes: its process, who uses it, and when it may go.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::node::NodeInfo;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::presence::{Presence, Record, Unloaded};
use super::room::Tenant;
use super::unavailable;
use crate::error::RequestError;
use crate::log_target::NOTICE;
use crate::targets::nodes::{Health, Life, Status};

/// How long a model that could not be loaded is not tried again, doubling with each failure in a row: each attempt may
/// cost other models their place.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// What a model is before it is loaded, and how it is kept.
#[derive(Debug, Clone)]
pub struct ResidentSettings {
    /// For the log.
    pub name: String,
    /// What it takes by its file, bytes.
    pub estimated_bytes: u64,
    /// What its file says of it.
    pub outline: Option<Arc<NodeInfo>>,
    /// Sequences it decodes together.
    pub n_slots: u32,
    /// How long it stays if a request does not say.
    pub keep_alive: KeepAlive,
}

/// The handles of its supervised process.
pub struct Process {
    /// Whether it is to run.
    pub wanted: watch::Sender<bool>,
    /// Its life.
    pub health: Arc<Health>,
    /// While there is a process, its id; else 0.
    pub pid: Arc<AtomicU32>,
    /// Ends it for good.
    pub stop: CancellationToken,
    /// Finishes when it is gone for good.
    pub tracker: TaskTracker,
}

/// See the module.
pub struct Resident {
    /// Its life.
    pub health: Arc<Health>,
    settings: Mutex<ResidentSettings>,
    process: Process,
    usage: Mutex<Usage>,
}

struct Usage {
    n_active: u32,
    n_waiting: usize,
    last_used: Instant,
    keep_alive: KeepAlive,
    wants_room_since: Option<Instant>,
    is_retired: bool,
    /// Of its process that runs now.
    measured_bytes: u64,
    load_began: Option<Instant>,
    last_failure: Option<String>,
    /// Loads that failed in a row, and until when no other is tried.
    n_failures: u32,
    failing_until: Option<Instant>,
    record: Record,
}

impl Resident {
    /// A model whose process is supervised.
    pub fn new(settings: ResidentSettings, process: Process) -> Arc<Resident> {
        let usage = Usage {
            n_active: 0,
            n_waiting: 0,
            last_used: Instant::now(),
            keep_alive: settings.keep_alive,
            wants_room_since: None,
            is_retired: false,
            measured_bytes: 0,
            load_began: None,
            last_failure: None,
            n_failures: 0,
            failing_until: None,
            record: Record::default(),
        };
        let (health, settings) = (Arc::clone(&process.health), Mutex::new(settings));
        let resident = Arc::new(Resident { health, settings, process, usage: Mutex::new(usage) });
        let (watched, mut state) = (Arc::downgrade(&resident), resident.health.subscribe());
        tokio::spawn(async move {
            while state.changed().await.is_ok() {
                let now = state.borrow_and_update().clone();
                match watched.upgrade() {
                    Some(resident) => resident.note(&now),
                    None => return,
                }
            }
        });
        resident
    }

    /// Keeps how the model came to be loaded.
    fn note(&self, status: &Status) {
        let name = self.settings().name;
        let mut usage = self.usage();
        match status.life() {
            Life::Ready | Life::Suspect => {
                if let Some(began) = usage.load_began.take() {
                    let took = began.elapsed();
                    usage.record.n_loads += 1;
                    usage.record.load_time += took;
                    usage.record.last_load = took;
                    // Until now nobody could use it.
                    usage.last_used = Instant::now();
                    tracing::info!(target: NOTICE, model = name, seconds = took.as_secs_f64(), "a model was loaded");
                }
                usage.last_failure = None;
                usage.n_failures = 0;
                usage.failing_until = None;
            }
            Life::Down => {
                let reason = &status.words;
                usage.last_failure = Some(reason.clone());
                if usage.load_began.take().is_some() {
                    let pause = FIRST_PAUSE.saturating_mul(1 << usage.n_failures.min(16)).min(MAX_PAUSE);
                    usage.n_failures = usage.n_failures.saturating_add(1);
                    usage.failing_until = Some(Instant::now() + pause);
                }
                tracing::warn!(model = name, reason, "a model cannot be loaded");
            }
            Life::Starting | Life::Draining => {}
            Life::Unloaded => usage.measured_bytes = 0,
        }
    }

    /// How it is kept now.
    pub fn settings(&self) -> ResidentSettings {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Keeps it otherwise, from its next use on, if this is not how it is kept.
    pub fn reconfigure(&self, keep_alive: KeepAlive) {
        let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut settings.keep_alive, keep_alive) == keep_alive {
            return;
        }
        drop(settings);
        self.keep(keep_alive);
    }

    /// What it takes: what was estimated, or more if more was seen.
    pub(super) fn bytes(&self) -> u64 {
        let estimated = self.settings.lock().unwrap_or_else(PoisonError::into_inner).estimated_bytes;
        estimated.max(self.usage().measured_bytes)
    }

    /// Why and for how long it is not tried again, if it could not be loaded just now.
    pub(super) fn failing(&self) -> Option<(String, Duration)> {
        let usage = self.usage();
        let left = usage.failing_until?.checked_duration_since(Instant::now())?;
        Some((usage.last_failure.clone().unwrap_or_default(), left))
    }

    /// It is to be in memory.
    pub(super) fn is_wanted(&self) -> bool {
        *self.process.wanted.borrow()
    }

    /// Its process is there. One that could not start is not.
    pub(super) fn holds_memory(&self) -> bool {
        self.health.life() != Life::Unloaded
    }

    pub(super) fn tenant(&self) -> Tenant {
        let (is_wanted, bytes) = (self.is_wanted(), self.bytes());
        let is_in = is_wanted || self.holds_memory();
        let usage = self.usage();
        Tenant {
            bytes,
            is_in,
            is_leaving: is_in && !is_wanted,
            is_used: usage.n_active > 0,
            last_used: usage.last_used,
        }
    }

    /// One more request waits. Errors: too many do.
    pub(super) fn wait(self: &Arc<Self>, max_waiting: usize) -> Result<Waiting, RequestError> {
        let is_ready = self.health.usable().is_some();
        let mut usage = self.usage();
        if usage.n_waiting >= max_waiting && !is_ready {
            return Err(unavailable("too many requests wait for it to be loaded", super::RETRY_AFTER));
        }
        usage.n_waiting += 1;
        Ok(Waiting(Arc::clone(self)))
    }

    /// Since when its requests wait for room; from now on, if they did not.
    pub(super) fn wants_room(&self, now: Instant) -> Instant {
        *self.usage().wants_room_since.get_or_insert(now)
    }

    pub(super) fn wants_room_since(&self) -> Option<Instant> {
        self.usage().wants_room_since
    }

    /// Starts its process.
    pub(super) fn load(&self) {
        let keep_alive = self.settings().keep_alive;
        {
            let mut usage = self.usage();
            usage.load_began = Some(Instant::now());
            usage.wants_room_since = None;
            usage.keep_alive = keep_alive;
        }
        self.process.wanted.send_replace(true);
    }

    /// One more request uses it.
    pub(super) fn enter(self: &Arc<Self>, keep_alive: Option<KeepAlive>) -> Stay {
        let mut usage = self.usage();
        usage.n_active += 1;
        usage.last_used = Instant::now();
        usage.keep_alive = keep_alive.unwrap_or(usage.keep_alive);
        Stay { resident: Arc::clone(self) }
    }

    /// It stays for so long after its last use.
    pub(super) fn keep(&self, keep_alive: KeepAlive) {
        self.usage().keep_alive = keep_alive;
    }

    /// Why it should go now, if it should.
    pub(super) fn is_over(&self) -> Option<Unloaded> {
        if !self.is_wanted() {
            return None;
        }
        let has_failed = self.health.life() == Life::Down;
        let usage = self.usage();
        match usage.keep_alive {
            _ if usage.n_active > 0 => None,
            _ if usage.is_retired => Some(Unloaded::Removed),
            _ if has_failed => Some(Unloaded::Failed),
            KeepAlive::Forever => None,
            KeepAlive::For(time) if usage.last_used.elapsed() < time => None,
            keep_alive if keep_alive.is_nothing() => Some(Unloaded::Asked),
            KeepAlive::For(_) => Some(Unloaded::Idle),
        }
    }

    /// Ends its process. The next request starts it again.
    pub(super) fn unload(&self, why: Unloaded) {
        if self.process.wanted.send_replace(false) {
            let name = self.settings().name;
            let mut usage = self.usage();
            usage.load_began = None;
            *usage.record.unloads.entry(why).or_default() += 1;
            tracing::info!(target: NOTICE, model = name, reason = why.as_str(), "a model is unloaded");
        }
    }

    /// No new request uses it.
    pub(super) fn retire(&self) {
        self.usage().is_retired = true;
    }

    pub(super) fn is_retired(&self) -> bool {
        self.usage().is_retired
    }

    pub(super) fn is_used(&self) -> bool {
        self.usage().n_active > 0
    }

    /// Ends its process for good.
    pub(super) fn stop(&self) {
        self.process.stop.cancel();
    }

    pub(super) fn is_gone(&self) -> bool {
        self.process.tracker.is_empty()
    }

    pub(super) async fn gone(&self) {
        self.process.tracker.wait().await;
    }

    /// The process that has the model in memory.
    pub(super) fn pid(&self) -> Option<u32> {
        let is_ready = self.health.usable().is_some();
        Some(self.process.pid.load(Ordering::Relaxed)).filter(|pid| *pid > 0 && is_ready)
    }

    pub(super) fn measured(&self, pid: u32, bytes: u64) {
        if self.pid() == Some(pid) {
            self.usage().measured_bytes = bytes;
        }
    }

    /// What is known of the model without loading it.
    pub fn outline(&self) -> Option<Arc<NodeInfo>> {
        self.settings().outline
    }

    /// Sequences it decodes together.
    pub fn n_slots(&self) -> usize {
        self.settings().n_slots as usize
    }

    /// How it is now.
    pub fn presence(&self) -> Presence {
        let (is_wanted, bytes) = (self.is_wanted(), self.bytes());
        let life = match (self.health.life(), is_wanted) {
            (Life::Ready | Life::Suspect, true) => "loaded",
            (Life::Down, true) => "failed",
            (Life::Starting | Life::Unloaded | Life::Draining, true) => "loading",
            (Life::Unloaded, false) => "unloaded",
            (_, false) => "unloading",
        };
        let usage = self.usage();
        let life = if life == "unloaded" && usage.last_failure.is_some() { "failed" } else { life };
        let expires_at = match usage.keep_alive {
            KeepAlive::For(time) if life == "loaded" => {
                let since = if usage.n_active > 0 { Duration::ZERO } else { usage.last_used.elapsed() };
                SystemTime::now().checked_add(time.saturating_sub(since))
            }
            _ => None,
        };
        let Record { n_loads, load_time, last_load, unloads } = usage.record.clone();
        Presence {
            life,
            bytes,
            measured_bytes: usage.measured_bytes,
            n_active: usage.n_active,
            n_waiting: usage.n_waiting,
            expires_at,
            n_loads,
            load_time,
            last_load,
            unloads,
            last_failure: usage.last_failure.clone(),
        }
    }

    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.process.stop.cancel();
    }
}

/// The right to use a model: it is not unloaded before this is dropped.
pub struct Stay {
    resident: Arc<Resident>,
}

impl Drop for Stay {
    fn drop(&mut self) {
        let mut usage = self.resident.usage();
        usage.n_active -= 1;
        usage.last_used = Instant::now();
    }
}

/// A request that waits for a model. Given up when dropped.
pub(super) struct Waiting(Arc<Resident>);

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut usage = self.0.usage();
        usage.n_waiting -= 1;
        if usage.n_waiting == 0 {
            usage.wants_room_since = None;
        }
    }
}
