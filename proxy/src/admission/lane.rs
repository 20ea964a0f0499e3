//! The lane of one key: its requests, those that wait, and their places. `G` is what a sequence gets for its place.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use tokio::sync::oneshot;

use super::engine_work::SlotUse;
use super::target_places::TargetPlaces;
use crate::account::Account;

/// Every request passes the queue, so nothing here looks at all those that run.
pub(super) struct KeyLane<G> {
    /// By ticket.
    pub(super) requests: BTreeMap<u64, QueuedRequest<G>>,
    /// The tickets of those that want a place.
    pub(super) wanting: BTreeSet<u64>,
    pub(super) n_waiting: usize,
    /// The places of all of them.
    pub(super) n_places: usize,
    /// The same by target.
    pub(super) n_places_at: HashMap<u64, usize>,
}

/// A request: it waits while it has no place and wants one.
pub(super) struct QueuedRequest<G> {
    pub(super) account: Arc<Account>,
    /// Places that it has now.
    pub(super) n_places: usize,
    /// Its sequences that want a place, the oldest first.
    pub(super) wants: VecDeque<Want<G>>,
}

impl<G> QueuedRequest<G> {
    pub(super) fn new(account: Arc<Account>) -> Self {
        QueuedRequest { account, n_places: 0, wants: VecDeque::new() }
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.n_places == 0 && !self.wants.is_empty()
    }
}

/// A sequence that waits for a place at any of these targets.
pub(super) struct Want<G> {
    pub(super) number: u64,
    pub(super) targets: Vec<Arc<TargetPlaces>>,
    pub(super) answer: oneshot::Sender<Result<G, Refusal>>,
}

/// The answer to a sequence that wants a place.
pub(super) struct WantAnswer<G> {
    pub(super) to: oneshot::Sender<Result<G, Refusal>>,
    pub(super) outcome: Result<PlaceOf, Refusal>,
}

/// A place of a request at a target.
#[derive(Debug)]
pub(super) struct PlaceOf {
    pub(super) account: Arc<Account>,
    pub(super) ticket: u64,
    pub(super) target: Arc<TargetPlaces>,
    pub(super) slot_use: SlotUse,
}

/// The reason why a request is not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// All places are taken, and the queue is full.
    Full { n_running: usize, n_waiting: usize },
    /// The key has as many places as it may have.
    Concurrency { limit: usize },
}

impl<G> Default for KeyLane<G> {
    fn default() -> Self {
        KeyLane {
            requests: BTreeMap::new(),
            wanting: BTreeSet::new(),
            n_waiting: 0,
            n_places: 0,
            n_places_at: HashMap::new(),
        }
    }
}

impl<G> KeyLane<G> {
    /// The requests that want a place, by ticket.
    pub(super) fn wanting(&self) -> impl Iterator<Item = (u64, &QueuedRequest<G>)> {
        self.wanting.iter().map(|ticket| (*ticket, &self.requests[ticket]))
    }

    /// Returns true if the account's own limit allows another place.
    pub(super) fn has_room(&self, account: &Account) -> bool {
        account.limits.max_concurrent.is_none_or(|limit| self.n_places < limit)
    }

    /// Changes a request, and what the lane knows about it.
    pub(super) fn change<T>(&mut self, ticket: u64, change: impl FnOnce(&mut QueuedRequest<G>) -> T) -> Option<T> {
        let request = self.requests.get_mut(&ticket)?;
        let was_waiting = request.is_waiting();
        let outcome = change(request);
        match request.wants.is_empty() {
            true => self.wanting.remove(&ticket),
            false => self.wanting.insert(ticket),
        };
        self.n_waiting = self.n_waiting + usize::from(request.is_waiting()) - usize::from(was_waiting);
        Some(outcome)
    }

    /// Removes a sequence's want.
    pub(super) fn stop_wanting(&mut self, ticket: u64, number: u64) -> Option<Want<G>> {
        let want = self.change(ticket, |request| {
            let at = request.wants.iter().position(|want| want.number == number)?;
            request.wants.remove(at)
        })??;
        want.targets.iter().for_each(|target| target.stop_wanting());
        Some(want)
    }

    /// Gives a sequence that wants one a place at this target.
    pub(super) fn give_place(&mut self, ticket: u64, number: u64, target: Arc<TargetPlaces>) -> Option<WantAnswer<G>> {
        let account = Arc::clone(&self.requests.get(&ticket)?.account);
        let want = self.stop_wanting(ticket, number)?;
        self.change(ticket, |request| request.n_places += 1);
        // A place begins without a slot: its prompt is not prepared yet.
        let place = PlaceOf { account, ticket, target, slot_use: SlotUse::NoSlot };
        self.take(&place);
        Some(WantAnswer { to: want.answer, outcome: Ok(place) })
    }

    pub(super) fn return_place(&mut self, place: &PlaceOf) {
        self.give_back(place);
        self.change(place.ticket, |request| request.n_places -= 1);
    }

    pub(super) fn take(&mut self, PlaceOf { target, slot_use, .. }: &PlaceOf) {
        target.take(*slot_use);
        self.n_places += 1;
        *self.n_places_at.entry(target.id).or_default() += 1;
    }

    pub(super) fn give_back(&mut self, PlaceOf { target, slot_use, .. }: &PlaceOf) {
        target.give_back(*slot_use);
        self.n_places -= 1;
        if let Some(n) = self.n_places_at.get_mut(&target.id) {
            *n -= 1;
            if *n == 0 {
                self.n_places_at.remove(&target.id);
            }
        }
    }
}
