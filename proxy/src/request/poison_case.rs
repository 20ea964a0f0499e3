//! What the prompts of a request share in quarantine.

use std::sync::{Arc, OnceLock};

use tokio::sync::Semaphore;

/// The quarantine of a request. Its prompts share it, and each of their choices has its own
/// [`PoisonMark`](super::failover::PoisonMark).
#[derive(Debug, Clone)]
pub struct PoisonCase {
    /// The choices in quarantine take turns.
    pub(super) turns: Arc<Semaphore>,
    /// The processes that ended, once the request counts as their cause.
    pub(super) verdict: Arc<OnceLock<u32>>,
}

impl Default for PoisonCase {
    fn default() -> PoisonCase {
        PoisonCase { turns: Arc::new(Semaphore::new(1)), verdict: Arc::default() }
    }
}
