//! Admission: how many requests run at once, and which waiting request is next.
//!
//! A permit is taken before the prompt is prepared and lives to its last token, not to the response head: it
//! travels inside the stream and is returned when the stream is dropped. Beyond the limit, requests wait in a bounded
//! queue with a lane for each key. The highest priority goes first, then the key with the fewest running requests, then
//! the request that has waited longest. So a key with a thousand requests delays another key by only one of them.

mod limits;
mod queue;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

pub use self::limits::{AdmissionLimits, DEFAULT_MAX_WAIT, DEFAULT_MAX_WAITING, REQUESTS_PER_SLOT};
use self::limits::{MAX_BRIEF, RETRY_AFTER};
use self::queue::{AdmissionQueue, Refusal};
use crate::account::Account;
use crate::error::RequestError;

/// Admits requests, at once or when it is their turn.
pub struct Admission(Arc<Gate>);

struct Gate {
    queue: Mutex<AdmissionQueue<Permit>>,
    brief: Arc<Semaphore>,
}

impl Admission {
    /// Admits within these limits.
    pub fn new(limits: AdmissionLimits) -> Self {
        let brief = Arc::new(Semaphore::new(MAX_BRIEF));
        Admission(Arc::new(Gate { queue: Mutex::new(AdmissionQueue::new(limits)), brief }))
    }

    /// Changes the limits. Admitted requests go on.
    pub fn set_limits(&self, limits: AdmissionLimits) {
        self.0.lock().limits = limits;
        self.0.admit_next();
    }

    /// Sets the number of slots of the ready engines.
    pub fn set_slots(&self, n_slots: usize) {
        if self.0.lock().set_slots(n_slots) {
            self.0.admit_next();
        }
    }

    /// Admits a request that generates nothing, without waiting for a slot. It counts for its key's rates.
    ///
    /// Errors: a rate of the key is exhausted, or too many such requests run.
    pub fn admit_brief(&self, account: &Account) -> Result<OwnedSemaphorePermit, RequestError> {
        account.take_request()?;
        let full = Refusal::Full { limit: MAX_BRIEF };
        Arc::clone(&self.0.brief).try_acquire_owned().map_err(|_| full.into())
    }

    /// Admits a request, at once or when it is its turn. Dropping the future leaves the queue.
    ///
    /// Errors: a rate of the key is exhausted, the queue is full, or the turn did not come in time.
    pub async fn admit(&self, account: &Arc<Account>, place: &QueuePlace) -> Result<Permit, RequestError> {
        account.take_request()?;
        let (answer, turn) = oneshot::channel();
        let ticket = {
            let mut queue = self.0.lock();
            if queue.try_enter(account) {
                return Ok(Permit::new(&self.0, account));
            }
            queue.wait(account, answer)?
        };
        let max_wait = self.0.lock().limits.max_wait;
        let entry = QueueEntry { gate: Arc::clone(&self.0), account: Arc::clone(account), ticket };
        place.set(&entry);
        let outcome = tokio::time::timeout(max_wait, turn).await;
        let is_own_limit = self.0.lock().is_at_own_limit(account);
        drop(entry);
        match outcome {
            Ok(Ok(Ok(permit))) => Ok(permit),
            // A key with fewer waiting requests got the place.
            Ok(Ok(Err(refusal))) => Err(refusal.into()),
            Ok(Err(_)) | Err(_) if is_own_limit => Err(self.0.lock().concurrency(account).into()),
            Ok(Err(_)) | Err(_) => Err(self.0.lock().full().into()),
        }
    }

    /// The maximum number of requests served at once.
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

impl Gate {
    fn lock(&self) -> MutexGuard<'_, AdmissionQueue<Permit>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits waiting requests until the limit is reached.
    fn admit_next(self: &Arc<Self>) {
        loop {
            let Some(next) = self.lock().next() else { return };
            // Not under the lock: if the request is gone, its permit is dropped here, which takes the lock again.
            let _ = next.answer.send(Ok(Permit::new(self, &next.account)));
        }
    }
}

/// An admitted request. Dropping it admits the next one and charges its key for the generated tokens.
#[derive(Debug)]
pub struct Permit {
    gate: Arc<Gate>,
    account: Arc<Account>,
    n_generated: Arc<AtomicU32>,
}

impl Permit {
    fn new(gate: &Arc<Gate>, account: &Arc<Account>) -> Permit {
        Permit { gate: Arc::clone(gate), account: Arc::clone(account), n_generated: Arc::default() }
    }

    /// Charges the key for a prompt.
    pub fn charge_prompt(&self, n_tokens: u32) {
        self.account.charge_tokens(n_tokens.into());
    }

    /// The counter of the tokens that are generated under this permit.
    pub fn meter(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.n_generated)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.account.charge_tokens(self.n_generated.load(Ordering::Relaxed).into());
        self.gate.lock().leave(&self.account);
        self.gate.admit_next();
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gate")
    }
}

/// A waiting request's entry. Dropping it leaves the queue.
struct QueueEntry {
    gate: Arc<Gate>,
    account: Arc<Account>,
    ticket: u64,
}

impl Drop for QueueEntry {
    fn drop(&mut self) {
        self.gate.lock().give_up(&self.account, self.ticket);
    }
}

/// A request's place in the queue, for its client.
#[derive(Debug, Clone, Default)]
pub struct QueuePlace(Arc<OnceLock<(Arc<Gate>, u64)>>);

impl QueuePlace {
    fn set(&self, entry: &QueueEntry) {
        let _ = self.0.set((Arc::clone(&entry.gate), entry.ticket));
    }

    /// The place, 1 for the next request; `None` if the request does not wait.
    pub fn get(&self) -> Option<usize> {
        let (gate, ticket) = self.0.get()?;
        gate.lock().place_of(*ticket)
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
