//! Admission: how many requests are in the house at once, and whose turn it is.
//!
//! A permit is taken before any work is done for a request and lives to its last token, not to the response head: it
//! travels inside the stream and is given back when that is dropped. When the house is full, requests wait in a bounded
//! queue, a lane for each key: the highest priority goes first, among equals the key with the fewest running, and among
//! those the one that waits longest. So a key with a thousand requests delays another by one of them.

mod account;
mod lanes;
mod rate;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

pub use self::account::{Account, DEFAULT_PRIORITY, KeyLimits};
use self::lanes::{Lanes, Refusal};
pub use self::rate::Quota;
use crate::error::RequestError;

/// Requests admitted at once by default, for each slot of the engines: one that runs, and one that is ready when that
/// ends. An engine's own queue has no lanes, so who waits there for long has lost the fair share that it has here.
pub const REQUESTS_PER_SLOT: usize = 2;

/// Requests admitted while no engine is ready: nobody knows their slots, and those who are let in wait for one. Not one
/// more than their slots allow once there are some: whoever is let in is past the lanes.
const WITHOUT_SLOTS: usize = 16;

/// Requests at once that generate nothing. They take milliseconds, so none of them waits.
const MAX_BRIEF: usize = 64;

/// Requests that wait to be admitted, by default.
pub const DEFAULT_MAX_WAITING: usize = 256;

/// How long they wait by default. A stream tells its place meanwhile; most clients of whole replies wait for longer.
pub const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(120);

/// When a refused client should come back: about as long as a short reply takes.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The bounds of the house.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Requests served at once; by default as many as the engines have room for.
    pub max_requests: Option<usize>,
    /// Requests that wait for that.
    pub max_waiting: usize,
    /// How long they wait.
    pub max_wait: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds { max_requests: None, max_waiting: DEFAULT_MAX_WAITING, max_wait: DEFAULT_MAX_WAIT }
    }
}

/// The door.
pub struct Admission(Arc<Door>);

struct Door {
    lanes: Mutex<Lanes>,
    brief: Arc<Semaphore>,
}

impl Admission {
    /// A door.
    pub fn new(bounds: Bounds) -> Self {
        let brief = Arc::new(Semaphore::new(MAX_BRIEF));
        Admission(Arc::new(Door { lanes: Mutex::new(Lanes::new(bounds)), brief }))
    }

    /// Other bounds from now on. Requests that are in stay in.
    pub fn set_bounds(&self, bounds: Bounds) {
        self.0.lock().bounds = bounds;
        self.0.let_in();
    }

    /// The engines that are ready have so many slots.
    pub fn set_slots(&self, n_slots: usize) {
        if self.0.lock().set_slots(n_slots) {
            self.0.let_in();
        }
    }

    /// Lets a request in that generates nothing, past those who wait for a slot. It counts for its key's rates.
    ///
    /// Errors: a rate of the key is exhausted, or too many of these run.
    pub fn admit_brief(&self, account: &Account) -> Result<OwnedSemaphorePermit, RequestError> {
        account.take_request()?;
        let full = Refusal::Full { limit: MAX_BRIEF };
        Arc::clone(&self.0.brief).try_acquire_owned().map_err(|_| full.into())
    }

    /// Lets a request in, at once or when it is its turn. Dropping the future leaves the queue.
    ///
    /// Errors: a rate of the key is exhausted, the queue is full, or the turn did not come in time.
    pub async fn admit(&self, account: &Arc<Account>, place: &QueuePlace) -> Result<Permit, RequestError> {
        account.take_request()?;
        let (answer, turn) = oneshot::channel();
        let (ticket, max_wait) = {
            let mut lanes = self.0.lock();
            if lanes.try_enter(account) {
                drop(lanes);
                return Ok(Permit::new(&self.0, account));
            }
            (lanes.wait(account, answer)?, lanes.bounds.max_wait)
        };
        let waiting = Waiting { door: Arc::clone(&self.0), account: Arc::clone(account), ticket };
        place.set(&waiting);
        let outcome = tokio::time::timeout(max_wait, turn).await;
        let is_own_limit = self.0.lock().is_at_own_limit(account);
        drop(waiting);
        match outcome {
            Ok(Ok(Ok(permit))) => Ok(permit),
            // The place was given to a key with fewer waiting.
            Ok(Ok(Err(refusal))) => Err(refusal.into()),
            Ok(Err(_)) | Err(_) if is_own_limit => Err(self.0.lock().concurrency(account).into()),
            Ok(Err(_)) | Err(_) => Err(self.0.lock().full().into()),
        }
    }

    /// Requests served at once at most.
    pub fn limit(&self) -> usize {
        self.0.lock().max_requests()
    }

    /// Requests that are being served.
    pub fn n_admitted(&self) -> usize {
        self.0.lock().n_running()
    }

    /// Requests that wait to be served.
    pub fn n_waiting(&self) -> usize {
        self.0.lock().n_waiting()
    }
}

impl Door {
    fn lock(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives free places to those whose turn it is.
    fn let_in(self: &Arc<Self>) {
        loop {
            let Some(next) = self.lock().next() else { return };
            // Not under the lock: a permit that nobody waits for any more is dropped here, which takes the lock again.
            let _ = next.answer.send(Ok(Permit::new(self, &next.account)));
        }
    }
}

/// The right to be served. Dropping it frees the place and charges its key for the tokens that were generated.
#[derive(Debug)]
pub struct Permit {
    door: Arc<Door>,
    account: Arc<Account>,
    n_generated: Arc<AtomicU32>,
}

impl Permit {
    fn new(door: &Arc<Door>, account: &Arc<Account>) -> Permit {
        Permit { door: Arc::clone(door), account: Arc::clone(account), n_generated: Arc::default() }
    }

    /// Charges the key for a prompt.
    pub fn charge_prompt(&self, n_tokens: u32) {
        self.account.charge_tokens(n_tokens.into());
    }

    /// Counts the tokens that are generated under this permit.
    pub fn meter(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.n_generated)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.account.charge_tokens(self.n_generated.load(Ordering::Relaxed).into());
        self.door.lock().leave(&self.account);
        self.door.let_in();
    }
}

impl std::fmt::Debug for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Door")
    }
}

/// A place in the queue, left when dropped.
struct Waiting {
    door: Arc<Door>,
    account: Arc<Account>,
    ticket: u64,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.door.lock().give_up(&self.account, self.ticket);
    }
}

/// Where a request stands in the queue, for whoever tells its client.
#[derive(Debug, Clone, Default)]
pub struct QueuePlace(Arc<OnceLock<(Arc<Door>, u64)>>);

impl QueuePlace {
    fn set(&self, waiting: &Waiting) {
        let _ = self.0.set((Arc::clone(&waiting.door), waiting.ticket));
    }

    /// 1 for the next one; `None` if it does not wait.
    pub fn get(&self) -> Option<usize> {
        let (door, ticket) = self.0.get()?;
        door.lock().place_of(*ticket)
    }
}

impl From<Refusal> for RequestError {
    fn from(refusal: Refusal) -> RequestError {
        match refusal {
            Refusal::Full { limit } => RequestError::Overloaded { limit, retry_after: RETRY_AFTER },
            Refusal::Concurrency { limit } => RequestError::TooManyAtOnce { limit, retry_after: RETRY_AFTER },
        }
    }
}

#[cfg(test)]
mod tests;
