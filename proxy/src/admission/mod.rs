//! Admission: how many sequences run at once, and which request gets the next place.
//!
//! Each target has its own places ([`TargetPlaces`]): a node as many as it has slots, an upstream as many as its
//! `max_concurrent`. Every sequence that a target generates has one of them, so a target never gets more than it runs at
//! once, and all that waits does so here. A sequence that another target shall generate gives its place back before it waits
//! for one there: a target that is full or hangs keeps nobody from another one.
//!
//! A place is taken before the prompt is prepared, so it begins without a slot ([`SlotUse`]), and lives to the last token, not
//! to the response head. Requests without a place wait in one bounded queue with a lane for each key. A free place goes to the highest priority, then to the key
//! with the fewest places at this target, then to the request that has waited longest. A request with many choices takes its
//! turn for each place, so it delays another key no more than as many requests with one choice each.

mod engine_work;
mod gate;
mod lane;
mod limits;
mod permit;
mod queue;
mod request_admission;
mod target_places;

use std::sync::{Arc, Mutex};

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

pub use self::engine_work::{EngineWork, SlotUse, WorkPhase};
use self::gate::{EnteredRequest, Gate};
use self::lane::Refusal;
pub use self::limits::{AdmissionLimits, DEFAULT_MAX_WAIT, DEFAULT_MAX_WAITING};
use self::limits::{BRIEF_WAIT, MAX_BRIEF, RETRY_AFTER};
pub use self::permit::{Permit, Place, RequestPlaces};
use self::queue::AdmissionQueue;
pub use self::request_admission::RequestAdmission;
pub use self::target_places::TargetPlaces;
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
        self.0.change(|queue| queue.limits = limits);
    }

    /// Sets the targets that can serve now.
    pub fn set_targets(&self, targets: Vec<Arc<TargetPlaces>>) {
        self.0.change(|queue| queue.set_targets(targets));
    }

    /// Admits a request that generates nothing, and needs no place. It waits a little if its key has its share of them, or
    /// if all keys together have too many. Errors: too many run.
    pub async fn admit_brief(&self, account: &Account) -> Result<BriefPermit, RequestError> {
        let full = || Refusal::Full { n_running: MAX_BRIEF, n_waiting: 0 };
        let acquire = async {
            let of_key = match &account.brief {
                Some(share) => Some(Arc::clone(share).acquire_owned().await?),
                None => None,
            };
            Ok::<_, AcquireError>(BriefPermit(of_key, Arc::clone(&self.0.brief).acquire_owned().await?))
        };
        match tokio::time::timeout(BRIEF_WAIT, acquire).await {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_)) | Err(_) => Err(full().into()),
        }
    }

    /// Lets a request enter its key's lane. It is admitted when it gets its first place. Its key's rate was charged before,
    /// with [`RequestAdmission::charge`].
    pub fn enter(&self, account: &Arc<Account>, admission: &RequestAdmission) -> Permit {
        let enter = || EnteredRequest::new(&self.0, account);
        let entered = match &admission.prompts {
            Some(prompts) => Arc::clone(prompts.entered.get_or_init(enter)),
            None => enter(),
        };
        admission.note_entered(&entered);
        Permit::new(entered)
    }

    /// The number of places of all targets.
    pub fn limit(&self) -> usize {
        self.0.read(AdmissionQueue::max_places)
    }

    /// Requests that have a place, or are about to want one.
    pub fn n_admitted(&self) -> usize {
        self.0.read(AdmissionQueue::n_running)
    }

    /// Places of sequences that have a slot, at most [`limit`](Self::limit).
    pub fn n_places(&self) -> usize {
        self.0.read(AdmissionQueue::n_places)
    }

    /// Requests that wait for a place.
    pub fn n_waiting(&self) -> usize {
        self.0.read(AdmissionQueue::n_waiting)
    }
}

/// Held by a request that generates nothing: one of its key's share, and one of all.
#[derive(Debug)]
pub struct BriefPermit(
    #[allow(dead_code, reason = "held until it is dropped")] Option<OwnedSemaphorePermit>,
    #[allow(dead_code, reason = "held until it is dropped")] OwnedSemaphorePermit,
);

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
