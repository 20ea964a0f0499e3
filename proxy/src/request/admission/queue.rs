//! The queue, with a lane for each key. `P` is what an admitted request gets.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use tokio::sync::oneshot;

use super::limits::{AdmissionLimits, REQUESTS_PER_SLOT, WITHOUT_SLOTS};
use crate::account::Account;

/// All requests that run or wait. A lane exists only while its key has any.
pub(super) struct AdmissionQueue<P> {
    pub(super) limits: AdmissionLimits,
    n_slots: usize,
    lanes_by_key: HashMap<String, Lane<P>>,
    next_ticket: u64,
}

struct Lane<P> {
    n_running: usize,
    waiting: VecDeque<Waiter<P>>,
}

pub(super) struct Waiter<P> {
    ticket: u64,
    pub(super) account: Arc<Account>,
    pub(super) answer: oneshot::Sender<Result<P, Refusal>>,
}

/// The reason why a request is not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The limit of running requests is reached, and the queue is full.
    Full { limit: usize },
    /// The key's limit of running requests is reached.
    Concurrency { limit: usize },
}

impl<P> Default for Lane<P> {
    fn default() -> Self {
        Lane { n_running: 0, waiting: VecDeque::new() }
    }
}

impl<P> Lane<P> {
    /// Returns true if the account's own limit allows another running request.
    fn has_room(&self, account: &Account) -> bool {
        account.limits.max_concurrent.is_none_or(|limit| self.n_running < limit)
    }
}

impl<P> AdmissionQueue<P> {
    pub(super) fn new(limits: AdmissionLimits) -> Self {
        AdmissionQueue { limits, n_slots: 0, lanes_by_key: HashMap::new(), next_ticket: 0 }
    }

    /// The maximum number of requests served at once.
    pub(super) fn max_requests(&self) -> usize {
        let room = match self.n_slots {
            0 => WITHOUT_SLOTS,
            n_slots => n_slots.saturating_mul(REQUESTS_PER_SLOT),
        };
        self.limits.max_requests.unwrap_or(room)
    }

    /// Sets how many slots the engines have. Returns true if that changed.
    pub(super) fn set_slots(&mut self, n_slots: usize) -> bool {
        std::mem::replace(&mut self.n_slots, n_slots) != n_slots
    }

    pub(super) fn n_running(&self) -> usize {
        self.lanes_by_key.values().map(|lane| lane.n_running).sum()
    }

    pub(super) fn n_waiting(&self) -> usize {
        self.lanes_by_key.values().map(|lane| lane.waiting.len()).sum()
    }

    /// Admits a new request if there is room and no request of its key waits. A request may wait even if there is room,
    /// because its key's own limit is reached.
    pub(super) fn try_enter(&mut self, account: &Arc<Account>) -> bool {
        let has_room = self.n_running() < self.max_requests();
        let lane = self.lanes_by_key.entry(account.name.clone()).or_default();
        let enters = has_room && lane.waiting.is_empty() && lane.has_room(account);
        if enters {
            lane.n_running += 1;
        }
        enters
    }

    /// Puts a new request at the end of its lane and returns its ticket. In a full queue it takes the place of the last
    /// request in the longest lane, if that lane is longer than its own would be.
    pub(super) fn wait(
        &mut self,
        account: &Arc<Account>,
        answer: oneshot::Sender<Result<P, Refusal>>,
    ) -> Result<u64, Refusal> {
        if self.n_waiting() >= self.limits.max_waiting {
            let own = self.lanes_by_key.get(&account.name).map_or(0, |lane| lane.waiting.len());
            let full = self.full();
            let longest = self.lanes_by_key.values_mut().max_by_key(|lane| lane.waiting.len());
            let displaced =
                longest.filter(|lane| lane.waiting.len() > own + 1).and_then(|lane| lane.waiting.pop_back());
            let Some(displaced) = displaced else {
                let is_own_limit = self.is_at_own_limit(account);
                self.sweep(&account.name);
                return Err(if is_own_limit { self.concurrency(account) } else { full });
            };
            // Its client may be gone already.
            let _ = displaced.answer.send(Err(full));
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let lane = self.lanes_by_key.entry(account.name.clone()).or_default();
        lane.waiting.push_back(Waiter { ticket, account: Arc::clone(account), answer });
        Ok(ticket)
    }

    /// Takes the next request out of the queue and counts it as running.
    pub(super) fn next(&mut self) -> Option<Waiter<P>> {
        if self.n_running() >= self.max_requests() {
            return None;
        }
        let order = |lane: &Lane<P>| {
            let first = lane.waiting.front()?;
            let may_run = lane.has_room(&first.account);
            may_run.then_some((std::cmp::Reverse(first.account.limits.priority), lane.n_running, first.ticket))
        };
        let (_, lane) =
            self.lanes_by_key.values_mut().filter_map(|lane| Some((order(lane)?, lane))).min_by_key(|(o, _)| *o)?;
        lane.n_running += 1;
        lane.waiting.pop_front()
    }

    /// One of this account's requests has ended.
    pub(super) fn leave(&mut self, account: &Account) {
        if let Some(lane) = self.lanes_by_key.get_mut(&account.name) {
            lane.n_running = lane.n_running.saturating_sub(1);
        }
        self.sweep(&account.name);
    }

    /// The request with this ticket no longer waits.
    pub(super) fn give_up(&mut self, account: &Account, ticket: u64) {
        if let Some(lane) = self.lanes_by_key.get_mut(&account.name) {
            lane.waiting.retain(|waiter| waiter.ticket != ticket);
        }
        self.sweep(&account.name);
    }

    /// The place in the queue of the request with this ticket, from 1. An estimate: the order among equals depends on how
    /// many requests each key has running when a place becomes free.
    pub(super) fn place_of(&self, ticket: u64) -> Option<usize> {
        let waiting = || self.lanes_by_key.values().flat_map(|lane| &lane.waiting);
        let order = |waiter: &Waiter<P>| (std::cmp::Reverse(waiter.account.limits.priority), waiter.ticket);
        let own = order(waiting().find(|waiter| waiter.ticket == ticket)?);
        Some(waiting().filter(|waiter| order(waiter) <= own).count())
    }

    /// Returns true if the key's own limit keeps its requests waiting.
    pub(super) fn is_at_own_limit(&self, account: &Account) -> bool {
        self.lanes_by_key.get(&account.name).is_some_and(|lane| !lane.has_room(account))
    }

    /// The refusal when the queue is full.
    pub(super) fn full(&self) -> Refusal {
        Refusal::Full { limit: self.max_requests() }
    }

    /// The refusal when the key's own limit is reached.
    pub(super) fn concurrency(&self, account: &Account) -> Refusal {
        Refusal::Concurrency { limit: account.limits.max_concurrent.unwrap_or(self.max_requests()) }
    }

    /// Removes an empty lane: the configuration may add and remove keys at any time.
    fn sweep(&mut self, name: &str) {
        if self.lanes_by_key.get(name).is_some_and(|lane| lane.n_running == 0 && lane.waiting.is_empty()) {
            self.lanes_by_key.remove(name);
        }
    }
}
