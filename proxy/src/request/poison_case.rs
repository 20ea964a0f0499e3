//! The suspicion that a request ends its engines' processes.

use std::sync::{Arc, OnceLock};

use tokio::sync::Semaphore;

/// The suspicion of a request. Its prompts share it, and each of them has its own
/// [`PoisonMark`](super::failover::PoisonMark).
#[derive(Debug, Clone)]
pub struct PoisonCase(pub(super) Arc<CaseState>);

#[derive(Debug)]
pub(super) struct CaseState {
    /// Identifies the request on nodes.
    pub(super) request: u64,
    /// The suspected choices take turns.
    pub(super) turns: Arc<Semaphore>,
    /// The processes that ended, once the request counts as their cause.
    pub(super) verdict: OnceLock<u32>,
}

impl Default for PoisonCase {
    fn default() -> PoisonCase {
        let turns = Arc::new(Semaphore::new(1));
        PoisonCase(Arc::new(CaseState { request: rand::random(), turns, verdict: OnceLock::new() }))
    }
}
