//! Which of this endpoint's own models are in memory: loaded when a request needs them, unloaded when none has for a
//! while, or when another one needs the room.
//!
//! A request holds a [`Stay`] to its last token; a model with stays is never unloaded. Requests for a model that is not
//! there start its process once and wait together. Room is given first come, first served: the model whose requests have
//! waited longest is next, idle models make room for it in the order of their last use, and if it has waited for
//! `YIELD_AFTER`, requests for other models wait behind it, so that a busy model cannot keep it out for ever.
//!
//! What a model takes is estimated from its file (weights, KV cache, compute buffers) and corrected upwards by what its
//! process is seen to hold. What `[model]` takes is not given away; it never comes or goes.

mod machine;
mod presence;
mod resident;
mod room;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_schemas::keep_alive::KeepAlive;
use tokio::time::Instant;

pub use self::machine::total_memory;
pub use self::presence::{Presence, Unloaded};
pub use self::resident::{Process, Resident, ResidentSettings, Stay};
use self::room::{Room, Tenant};
use crate::error::RequestError;
use crate::targets::nodes::Life;

/// How often models are looked at: what has expired goes, and those who wait look whether there is room.
const INTERVAL: Duration = Duration::from_millis(50);

/// How often processes are asked how much they hold.
const MEASURE_INTERVAL: Duration = Duration::from_secs(2);

/// How long a model waits for room until requests for others wait behind it.
const YIELD_AFTER: Duration = Duration::from_secs(5);

/// When to come back to a model that found no room, or is not loaded yet.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// What holds for all models together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes that all own models may take.
    pub memory_budget: u64,
    /// Of these, bytes that `[model]` takes.
    pub reserved: u64,
    /// Requests that may wait for one model to be loaded.
    pub max_waiting: usize,
    /// How long they wait.
    pub max_wait: Duration,
}

/// A small multiple of what engines queue, and longer than the largest models load.
impl Default for Limits {
    fn default() -> Self {
        Limits { memory_budget: u64::MAX, reserved: 0, max_waiting: 256, max_wait: Duration::from_secs(300) }
    }
}

/// All own models that come and go. See the module.
#[derive(Default)]
pub struct Residency {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    limits: Limits,
    /// Those of the configuration, and those that left it and still have streams.
    residents: Vec<Arc<Resident>>,
}

/// What came of an attempt to use a model.
enum Entry {
    /// It is in memory, or on its way there.
    In(Stay),
    /// Others have to go first.
    Wait,
}

impl Inner {
    fn budget(&self) -> u64 {
        self.limits.memory_budget.saturating_sub(self.limits.reserved)
    }

    /// Whether `other` would have room once `this` were idle.
    fn helps(&self, this: &Arc<Resident>, other: &Resident) -> bool {
        let tenant = |resident: &Arc<Resident>| {
            let tenant = resident.tenant();
            Tenant { is_used: tenant.is_used && !Arc::ptr_eq(resident, this), ..tenant }
        };
        let tenants: Vec<Tenant> = self.residents.iter().map(tenant).collect();
        !matches!(room::find(other.bytes(), self.budget(), &tenants), Room::Later | Room::Never)
    }
}

impl Residency {
    /// These models. Time passes for them as long as this lives.
    pub fn new(limits: Limits, residents: Vec<Arc<Resident>>) -> Arc<Residency> {
        let residency = Arc::new(Residency { inner: Mutex::new(Inner { limits, residents }) });
        let watched = Arc::downgrade(&residency);
        tokio::spawn(async move {
            let mut measured_at = Instant::now();
            while let Some(residency) = watched.upgrade() {
                residency.expire();
                if measured_at.elapsed() >= MEASURE_INTERVAL {
                    measured_at = Instant::now();
                    residency.measure().await;
                }
                drop(residency);
                tokio::time::sleep(INTERVAL).await;
            }
        });
        residency
    }

    /// Other models and limits from now on. Those that are not among them go when their streams have ended.
    pub fn replace(&self, limits: Limits, residents: &[Arc<Resident>]) {
        let mut inner = self.lock();
        inner.limits = limits;
        let stays = |old: &Arc<Resident>| residents.iter().any(|new| Arc::ptr_eq(new, old));
        inner.residents.iter().filter(|old| !stays(old)).for_each(|old| old.retire());
        for new in residents {
            if !inner.residents.iter().any(|old| Arc::ptr_eq(new, old)) {
                inner.residents.push(Arc::clone(new));
            }
        }
    }

    /// What holds for all of them.
    pub fn limits(&self) -> Limits {
        self.lock().limits
    }

    /// Uses a model, which is loaded if it is not there. `keep_alive` is how long it stays afterwards, if not as
    /// configured. Dropping the future gives up.
    ///
    /// Errors: too many wait already, it could not be loaded, there was no room in time or never will be.
    pub async fn stay(&self, resident: &Arc<Resident>, keep_alive: Option<KeepAlive>) -> Result<Stay, RequestError> {
        let Limits { max_waiting, max_wait, .. } = self.limits();
        let waiting = resident.wait(max_waiting)?;
        let deadline = Instant::now() + max_wait;
        let stay = loop {
            match self.enter(resident, keep_alive)? {
                Entry::In(stay) => break stay,
                Entry::Wait if Instant::now() >= deadline => {
                    return Err(unavailable("other models are busy in the memory that it needs", RETRY_AFTER));
                }
                Entry::Wait => tokio::time::sleep(INTERVAL).await,
            }
        };
        let mut state = resident.health.subscribe();
        let settled = state.wait_for(|status| status.usable().is_some() || status.life() == Life::Down);
        let outcome = match tokio::time::timeout_at(deadline, settled).await {
            Err(_) => Err(unavailable("it is still being loaded", RETRY_AFTER)),
            Ok(Err(_)) => Err(unavailable("it was removed", RETRY_AFTER)),
            Ok(Ok(status)) if status.usable().is_some() => Ok(()),
            Ok(Ok(status)) => Err(unavailable(&status.words, status.retry_in)),
        };
        drop(waiting);
        outcome.map(|()| stay)
    }

    /// Lets a model go as soon as nothing uses it.
    pub fn unload(&self, resident: &Resident) {
        resident.keep(KeepAlive::For(Duration::ZERO));
        self.expire();
    }

    /// Ends all processes, and waits until they have.
    pub async fn stop(&self) {
        let residents = self.lock().residents.clone();
        residents.iter().for_each(|resident| resident.stop());
        for resident in residents {
            resident.gone().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One attempt. Starts the model's process if it may.
    fn enter(&self, resident: &Arc<Resident>, keep_alive: Option<KeepAlive>) -> Result<Entry, RequestError> {
        let inner = self.lock();
        if resident.is_retired() && !resident.is_wanted() {
            return Err(unavailable("it was removed", RETRY_AFTER));
        }
        let now = Instant::now();
        let waits_longer = |other: &&Arc<Resident>, than: Instant| {
            !Arc::ptr_eq(other, resident) && other.wants_room_since().is_some_and(|since| since < than)
        };
        if resident.is_wanted() {
            let long_ago = now.checked_sub(YIELD_AFTER);
            let waits = |other: &Arc<Resident>| long_ago.is_some_and(|then| waits_longer(&other, then));
            let yields = inner.residents.iter().any(|other| waits(other) && inner.helps(resident, other));
            return Ok(if yields { Entry::Wait } else { Entry::In(resident.enter(keep_alive)) });
        }
        if let Some((why, wait)) = resident.failing() {
            return Err(unavailable(&why, wait));
        }
        let since = resident.wants_room(now);
        if resident.holds_memory() || inner.residents.iter().any(|other| waits_longer(&other, since)) {
            return Ok(Entry::Wait);
        }
        let tenants: Vec<Tenant> = inner.residents.iter().map(|resident| resident.tenant()).collect();
        match room::find(resident.bytes(), inner.budget(), &tenants) {
            Room::Here => {
                resident.load();
                Ok(Entry::In(resident.enter(keep_alive)))
            }
            Room::After(idle) => {
                for i in idle {
                    inner.residents[i].unload(Unloaded::Memory);
                }
                Ok(Entry::Wait)
            }
            Room::Later => Ok(Entry::Wait),
            Room::Never => Err(unavailable("it does not fit into the memory that models may take", RETRY_AFTER)),
        }
    }

    /// Unloads what nobody needs any more.
    fn expire(&self) {
        let mut inner = self.lock();
        for resident in &inner.residents {
            if let Some(why) = resident.is_over() {
                resident.unload(why);
            }
            if resident.is_retired() && !resident.is_used() {
                resident.stop();
            }
        }
        inner.residents.retain(|resident| !(resident.is_retired() && resident.is_gone()));
    }

    async fn measure(&self) {
        let residents = self.lock().residents.clone();
        let running: Vec<_> = residents.into_iter().filter_map(|resident| Some((resident.pid()?, resident))).collect();
        if running.is_empty() {
            return;
        }
        // It reads files of the system: quick, but not for the threads that serve.
        let measured = tokio::task::spawn_blocking(move || {
            for (pid, resident) in running {
                if let Some(bytes) = machine::resident_bytes(pid) {
                    resident.measured(pid, bytes);
                }
            }
        });
        let _ = measured.await;
    }
}

fn unavailable(reason: &str, retry_after: Duration) -> RequestError {
    RequestError::Unavailable { reason: reason.to_owned(), retry_after: retry_after.max(Duration::from_secs(1)) }
}
