//! What a request holds: its permit, and a place for each running sequence.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use baton_link::no_sleep::StayAwake;
use tokio::time::timeout;

use super::engine_work::{EngineWork, SlotUse};
use super::gate::{EnteredRequest, GivenPlace};
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

    /// The places of the request's sequences, whose work counts as `work`.
    pub fn places(&self, work: &Arc<EngineWork>) -> RequestPlaces {
        RequestPlaces { entered: Arc::clone(&self.entered), work: Arc::clone(work) }
    }

    /// Charges the key for a prompt.
    pub fn charge_prompt(&self, n_tokens: u32) {
        self.entered.account.charge_tokens(n_tokens.into());
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
pub struct RequestPlaces {
    entered: Arc<EnteredRequest>,
    work: Arc<EngineWork>,
}

impl RequestPlaces {
    /// Waits for a place at one of these targets; of equally loaded ones, at the first. The caller holds no place that
    /// this sequence no longer needs. Dropping the future leaves the queue. A sequence of a request that has no other place
    /// counts as a waiting request.
    ///
    /// Errors: the queue is full, or the turn did not come in time. While the request has another place it waits on.
    pub async fn next(&self, targets: &[Arc<TargetPlaces>]) -> Result<Place, RequestError> {
        let EnteredRequest { gate, account, ticket, .. } = &*self.entered;
        let mut want = self.entered.want(targets);
        loop {
            let max_wait = gate.read(|queue| queue.limits.max_wait);
            return match wait(max_wait, &mut want.turn).await {
                Some(Ok(grant)) => Ok(self.place(grant)),
                // A key with fewer waiting requests got the place in the queue.
                Some(Err(refusal)) => Err(refusal.into()),
                None if !gate.read(|queue| queue.is_waiting(account, *ticket)) => continue,
                None => Err(gate.read(|queue| queue.late(account)).into()),
            };
        }
    }

    /// The request waits for a machine that is being woken, or no longer.
    pub fn note_waking(&self, is_waking: bool) {
        self.entered.is_waking.store(is_waking, Ordering::Relaxed);
    }

    /// Takes a place of this target if one is free and nobody has a better claim to it.
    pub fn try_next(&self, target: &Arc<TargetPlaces>) -> Option<Place> {
        let mut want = self.entered.want(std::slice::from_ref(target));
        let grant = want.turn.try_recv().ok()?.ok()?;
        Some(self.place(grant))
    }

    fn place(&self, grant: GivenPlace) -> Place {
        Place { grant, work: Arc::clone(&self.work), _request: Arc::clone(&self.entered) }
    }
}

/// Waits for an answer. `None`: it did not come in time.
async fn wait<T>(max_wait: Duration, answer: &mut tokio::sync::oneshot::Receiver<T>) -> Option<T> {
    timeout(max_wait, answer).await.ok()?.ok()
}

/// The place of one sequence at its target. It begins without a slot. Dropping it says that the sequence has ended there.
#[derive(Debug)]
pub struct Place {
    // Dropped before the request.
    grant: GivenPlace,
    work: Arc<EngineWork>,
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

    /// The sequence's slot has this use now.
    pub fn note(&mut self, slot_use: SlotUse) {
        if self.grant.place.slot_use != slot_use {
            let before = self.grant.note(slot_use);
            self.work.changed(before, slot_use);
        }
    }

    /// The sequence goes on at this target, with this use of its slot.
    pub fn note_at(&mut self, target: &Arc<TargetPlaces>, slot_use: SlotUse) {
        self.move_to(target);
        self.note(slot_use);
    }

    /// Returns true if it is a place of this target.
    pub fn is_at(&self, target: &TargetPlaces) -> bool {
        self.target().id == target.id
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.note(SlotUse::NoSlot);
    }
}
