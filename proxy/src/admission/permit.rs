//! What a request holds: its permit, and a place for each running sequence.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use baton_link::no_sleep::StayAwake;
use tokio::time::timeout;

use super::gate::{EnteredRequest, GivenPlace};
use super::slot_wait::SlotWait;
use super::target_places::TargetPlaces;
use crate::error::RequestError;

/// A request's part in admission. Dropping it charges its key for the generated tokens.
#[derive(Debug)]
pub struct Permit {
    entered: Arc<EnteredRequest>,
    n_generated: Arc<AtomicU32>,
    _awake: StayAwake,
}

impl Permit {
    pub(super) fn new(entered: Arc<EnteredRequest>) -> Permit {
        Permit { entered, n_generated: Arc::default(), _awake: StayAwake::begin() }
    }

    /// The places of the request's sequences.
    pub fn places(&self) -> RequestPlaces {
        RequestPlaces(Arc::clone(&self.entered))
    }

    /// Charges the key for a prompt.
    pub fn charge_prompt(&self, n_tokens: u32) {
        self.entered.account.charge_tokens(n_tokens.into());
    }

    /// Since when the request waits for a slot with places in hand.
    pub fn slot_wait(&self) -> Arc<SlotWait> {
        Arc::clone(&self.entered.slot_wait)
    }

    /// The counter of the tokens that are generated under this permit.
    pub fn meter(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.n_generated)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.entered.account.charge_tokens(self.n_generated.load(Ordering::Relaxed).into());
    }
}

/// Gets places for the sequences of a request.
#[derive(Debug, Clone)]
pub struct RequestPlaces(Arc<EnteredRequest>);

impl RequestPlaces {
    /// Waits for a place at one of these targets; of equally loaded ones, at the first. The caller holds no place that
    /// this sequence no longer needs. Dropping the future leaves the queue. A sequence of a request that has no other place
    /// counts as a waiting request.
    ///
    /// Errors: the queue is full, or the turn did not come in time. While the request has another place it waits on.
    pub async fn next(&self, targets: &[Arc<TargetPlaces>]) -> Result<Place, RequestError> {
        let EnteredRequest { gate, account, ticket, .. } = &*self.0;
        let mut want = self.0.want(targets);
        loop {
            let max_wait = gate.read(|queue| queue.limits.max_wait);
            return match wait(max_wait, &mut want.turn).await {
                Some(Ok(grant)) => Ok(Place { grant, _request: Arc::clone(&self.0) }),
                // A key with fewer waiting requests got the place in the queue.
                Some(Err(refusal)) => Err(refusal.into()),
                None if !gate.read(|queue| queue.is_waiting(account, *ticket)) => continue,
                None => Err(gate.read(|queue| queue.late(account)).into()),
            };
        }
    }

    /// Takes a place of this target if one is free and nobody has a better claim to it.
    pub fn try_next(&self, target: &Arc<TargetPlaces>) -> Option<Place> {
        let mut want = self.0.want(std::slice::from_ref(target));
        let grant = want.turn.try_recv().ok()?.ok()?;
        Some(Place { grant, _request: Arc::clone(&self.0) })
    }
}

/// Waits for an answer. `None`: it did not come in time.
async fn wait<T>(max_wait: Duration, answer: &mut tokio::sync::oneshot::Receiver<T>) -> Option<T> {
    timeout(max_wait, answer).await.ok()?.ok()
}

/// The place of one sequence at its target. Dropping it says that the sequence has ended there.
#[derive(Debug)]
pub struct Place {
    // Dropped before the request.
    grant: GivenPlace,
    _request: Arc<EnteredRequest>,
}

impl Place {
    /// The target where it is.
    pub fn target(&self) -> &Arc<TargetPlaces> {
        &self.grant.place.target
    }

    /// The sequence goes on at this target, where it may be one too many: what has begun is not made to wait.
    pub fn move_to(&mut self, target: &Arc<TargetPlaces>) {
        if !self.is_at(target) {
            self.grant.move_to(target);
        }
    }

    /// The sequence has got a slot in an engine, or waits for one: in the engine's queue, or for another engine.
    pub fn note_slot(&mut self, has_slot: bool) {
        self.grant.note_slot(has_slot);
    }

    /// Returns true if it is a place of this target.
    pub fn is_at(&self, target: &TargetPlaces) -> bool {
        self.target().id == target.id
    }
}
