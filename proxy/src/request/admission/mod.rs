//! Admission: how many sequences run at once, and which request gets the next place.
//!
//! Every sequence that an engine or an upstream generates needs a place ([`PlaceNeed`]). A permit is taken before the
//! prompt is prepared and lives to its last token, not to the response head: it travels inside the stream and is
//! returned when the stream is dropped. Beyond the limit, requests wait in a bounded queue with a lane for each key.
//! The highest priority goes first, then the key with the fewest places, then the request that has waited longest. A
//! request with many choices takes its turn for each place, so it delays another key no more than as many requests with
//! one choice each.

mod gate;
mod limits;
mod need;
mod permit;
mod queue;
mod request_admission;

use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use self::gate::{AdmittedRequest, Gate, QueueEntry};
pub use self::limits::{AdmissionLimits, DEFAULT_MAX_WAIT, DEFAULT_MAX_WAITING, PLACES_PER_SLOT};
use self::limits::{MAX_BRIEF, RETRY_AFTER};
pub use self::need::PlaceNeed;
pub use self::permit::{Permit, Place, Places};
use self::queue::{AdmissionQueue, Refusal};
pub use self::request_admission::RequestAdmission;
use crate::account::Account;
use crate::error::RequestError;

/// Admits requests, at once or when it is their turn.
pub struct Admission(Arc<Gate>);

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

    /// Admits a request that generates nothing, without waiting for a place. Errors: too many such requests run.
    pub fn admit_brief(&self) -> Result<OwnedSemaphorePermit, RequestError> {
        let full = Refusal::Full { n_running: MAX_BRIEF, n_waiting: 0 };
        Arc::clone(&self.0.brief).try_acquire_owned().map_err(|_| full.into())
    }

    /// Admits a request, at once or when it is its turn. Its key's rate was charged before, with
    /// [`RequestAdmission::charge`]. Dropping the future leaves the queue.
    ///
    /// Errors: the queue is full, or the turn did not come in time.
    pub async fn admit(
        &self,
        account: &Arc<Account>,
        admission: &RequestAdmission,
        need: PlaceNeed,
    ) -> Result<Permit, RequestError> {
        let admitted = match &admission.prompts {
            Some(prompts) => {
                let of_all = PlaceNeed { n_sequences: prompts.n_sequences, ..need };
                Arc::clone(prompts.admitted.get_or_try_init(|| self.enter(account, admission, of_all)).await?)
            }
            None => self.enter(account, admission, need).await?,
        };
        Ok(Permit::new(admitted))
    }

    async fn enter(
        &self,
        account: &Arc<Account>,
        admission: &RequestAdmission,
        need: PlaceNeed,
    ) -> Result<Arc<AdmittedRequest>, RequestError> {
        let (answer, turn) = oneshot::channel();
        let ticket = {
            let mut queue = self.0.lock();
            if let Some(entered) = queue.try_enter(account, need) {
                drop(queue);
                let admitted = AdmittedRequest::new(&self.0, account, entered);
                // It may get more places at once.
                self.0.admit_next();
                return Ok(admitted);
            }
            queue.wait(account, need, answer)?
        };
        let max_wait = self.0.lock().limits.max_wait;
        let entry = QueueEntry { gate: Arc::clone(&self.0), account: Arc::clone(account), ticket };
        admission.note_queued(&entry);
        let outcome = tokio::time::timeout(max_wait, turn).await;
        let is_own_limit = self.0.lock().is_at_own_limit(account);
        drop(entry);
        match outcome {
            Ok(Ok(Ok(admitted))) => Ok(admitted),
            // A key with fewer waiting requests got the place.
            Ok(Ok(Err(refusal))) => Err(refusal.into()),
            Ok(Err(_)) | Err(_) if is_own_limit => Err(self.0.lock().concurrency(account).into()),
            Ok(Err(_)) | Err(_) => Err(self.0.lock().full().into()),
        }
    }

    /// The number of places.
    pub fn limit(&self) -> usize {
        self.0.lock().max_places()
    }

    /// Requests that are being served.
    pub fn n_admitted(&self) -> usize {
        self.0.lock().n_running()
    }

    /// Places that these requests have.
    pub fn n_places(&self) -> usize {
        self.0.lock().n_places()
    }

    /// Requests that wait to be served.
    pub fn n_waiting(&self) -> usize {
        self.0.lock().n_waiting()
    }
}

impl From<Refusal> for RequestError {
    fn from(refusal: Refusal) -> RequestError {
        match refusal {
            Refusal::Full { n_running, n_waiting } => {
                RequestError::Overloaded { n_running, n_waiting, retry_after: RETRY_AFTER }
            }
            Refusal::Concurrency { limit } => RequestError::TooManyAtOnce { limit, retry_after: RETRY_AFTER },
        }
    }
}

#[cfg(test)]
mod tests;
