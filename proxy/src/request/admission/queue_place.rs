//! A request's place in the queue.

use std::sync::{Arc, OnceLock};

use tokio::sync::OnceCell;

use super::gate::{AdmittedRequest, Gate, QueueEntry};
use crate::account::Account;
use crate::error::RequestError;

/// A request's place in the queue, for its client. The prompts of one request share it: they are charged and admitted
/// once, for all their sequences.
#[derive(Debug, Clone, Default)]
pub struct QueuePlace {
    shown: Arc<OnceLock<(Arc<Gate>, u64)>>,
    pub(super) shared: Option<Arc<SharedPlace>>,
}

#[derive(Debug)]
pub(super) struct SharedPlace {
    pub(super) n_sequences: usize,
    charged: OnceCell<()>,
    pub(super) admitted: OnceCell<Arc<AdmittedRequest>>,
}

impl QueuePlace {
    /// A place for prompts with so many sequences in all.
    pub fn shared_by(n_sequences: usize) -> QueuePlace {
        let shared = SharedPlace { n_sequences, charged: OnceCell::new(), admitted: OnceCell::new() };
        QueuePlace { shown: Arc::default(), shared: Some(Arc::new(shared)) }
    }

    /// Charges the key's rate of requests: one for each sequence, since each occupies the endpoint like a request of its
    /// own. Call it before anything is loaded or kept waiting for the request.
    ///
    /// Errors: a rate of the key is exhausted.
    pub async fn charge(&self, account: &Account, n_sequences: usize) -> Result<(), RequestError> {
        match &self.shared {
            None => account.take_requests(n_sequences),
            Some(shared) => {
                let charge = || async { account.take_requests(shared.n_sequences) };
                shared.charged.get_or_try_init(charge).await.copied()
            }
        }
    }

    pub(super) fn set(&self, entry: &QueueEntry) {
        let _ = self.shown.set((Arc::clone(&entry.gate), entry.ticket));
    }

    /// The place, 1 for the next request; `None` if the request does not wait.
    pub fn get(&self) -> Option<usize> {
        let (gate, ticket) = self.shown.get()?;
        gate.lock().place_of(*ticket)
    }
}
