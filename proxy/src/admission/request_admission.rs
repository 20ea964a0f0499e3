//! The admission of a client's request, which its prompts share.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};

use tokio::sync::OnceCell;

use super::gate::EnteredRequest;
use crate::account::Account;
use crate::error::RequestError;

/// The admission of a client's request, with its position in the queue. The prompts of one request share it: they are
/// charged and admitted once, for all their sequences.
#[derive(Debug, Clone, Default)]
pub struct RequestAdmission {
    /// Does not keep the request in the queue.
    entry: Arc<OnceLock<Weak<EnteredRequest>>>,
    pub(super) prompts: Option<Arc<PromptGroup>>,
}

/// Several prompts of one request.
#[derive(Debug)]
pub(super) struct PromptGroup {
    /// The sequences of all prompts.
    n_sequences: usize,
    charged: OnceCell<()>,
    pub(super) entered: OnceLock<Arc<EnteredRequest>>,
}

impl RequestAdmission {
    /// The admission of prompts with so many sequences in all.
    pub fn of_prompts(n_sequences: usize) -> RequestAdmission {
        let prompts = PromptGroup { n_sequences, charged: OnceCell::new(), entered: OnceLock::new() };
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

    /// The request is in the queue with this entry.
    pub(super) fn note_entered(&self, entered: &Arc<EnteredRequest>) {
        let _ = self.entry.set(Arc::downgrade(entered));
    }

    /// The position in the queue, 1 for the next request; `None` if the request does not wait.
    pub fn position(&self) -> Option<usize> {
        let entered = self.entry.get()?.upgrade()?;
        entered.gate.read(|queue| queue.position_of(entered.ticket))
    }

    /// Returns true if the request waits for a machine that is being woken.
    pub fn is_waking(&self) -> bool {
        self.entry.get().and_then(Weak::upgrade).is_some_and(|entered| entered.is_waking.load(Ordering::Relaxed))
    }
}
