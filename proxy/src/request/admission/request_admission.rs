//! The admission of a client's request, which its prompts share.

use std::sync::{Arc, OnceLock};

use tokio::sync::OnceCell;

use super::gate::{AdmittedRequest, Gate, QueueEntry};
use crate::account::Account;
use crate::error::RequestError;

/// The admission of a client's request, with its position in the queue. The prompts of one request share it: they are
/// charged and admitted once, for all their sequences.
#[derive(Debug, Clone, Default)]
pub struct RequestAdmission {
    entry: Arc<OnceLock<(Arc<Gate>, u64)>>,
    pub(super) prompts: Option<Arc<PromptGroup>>,
}

/// Several prompts of one request.
#[derive(Debug)]
pub(super) struct PromptGroup {
    /// The sequences of all prompts.
    pub(super) n_sequences: usize,
    charged: OnceCell<()>,
    pub(super) admitted: OnceCell<Arc<AdmittedRequest>>,
}

impl RequestAdmission {
    /// The admission of prompts with so many sequences in all.
    pub fn of_prompts(n_sequences: usize) -> RequestAdmission {
        let prompts = PromptGroup { n_sequences, charged: OnceCell::new(), admitted: OnceCell::new() };
        RequestAdmission { entry: Arc::default(), prompts: Some(Arc::new(prompts)) }
    }

    /// Charges the key's rate of requests: one for each sequence, since each occupies the endpoint like a request of
    /// its own. Call it before anything is loaded or kept waiting for the request.
    ///
    /// Errors: a rate of the key is exhausted.
    pub async fn charge(&self, account: &Account, n_sequences: usize) -> Result<(), RequestError> {
        match &self.prompts {
            None => account.take_requests(n_sequences),
            Some(prompts) => {
                let charge = || async { account.take_requests(prompts.n_sequences) };
                prompts.charged.get_or_try_init(charge).await.copied()
            }
        }
    }

    /// The request waits in the queue with this entry.
    pub(super) fn note_queued(&self, entry: &QueueEntry) {
        let _ = self.entry.set((Arc::clone(&entry.gate), entry.ticket));
    }

    /// The position in the queue, 1 for the next request; `None` if the request does not wait.
    pub fn position(&self) -> Option<usize> {
        let (gate, ticket) = self.entry.get()?;
        gate.lock().position_of(*ticket)
    }
}
