//! The queue: a lane for each key.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use tokio::sync::oneshot;

use super::{Account, Bounds, Permit, REQUESTS_PER_SLOT, WITHOUT_SLOTS};

/// Everybody who is in or waits. Lanes are there only while somebody is in them.
pub(super) struct Lanes {
    pub(super) bounds: Bounds,
    n_slots: usize,
    lanes: HashMap<String, Lane>,
    next_ticket: u64,
}

#[derive(Default)]
struct Lane {
    n_running: usize,
    waiting: VecDeque<Waiter>,
}

/// Somebody who waits.
pub(super) struct Waiter {
    ticket: u64,
    /// Whose it is.
    pub(super) account: Arc<Account>,
    /// Where the permit goes.
    pub(super) answer: oneshot::Sender<Result<Permit, Refusal>>,
}

/// Why somebody does not get in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The house and its queue are full.
    Full { limit: usize },
    /// The key has as many requests running as it may.
    Concurrency { limit: usize },
}

impl Lane {
    /// Whether another of this account's requests may run, as far as the account goes.
    fn has_room(&self, account: &Account) -> bool {
        account.limits.max_concurrent.is_none_or(|limit| self.n_running < limit)
    }
}

impl Lanes {
    pub(super) fn new(bounds: Bounds) -> Lanes {
        Lanes { bounds, n_slots: 0, lanes: HashMap::new(), next_ticket: 0 }
    }

    /// Requests served at once at most.
    pub(super) fn max_requests(&self) -> usize {
        let room = match self.n_slots {
            0 => WITHOUT_SLOTS,
            n_slots => n_slots.saturating_mul(REQUESTS_PER_SLOT),
        };
        self.bounds.max_requests.unwrap_or(room)
    }

    /// Notes how many slots the engines have; says whether that is news.
    pub(super) fn set_slots(&mut self, n_slots: usize) -> bool {
        std::mem::replace(&mut self.n_slots, n_slots) != n_slots
    }

    pub(super) fn n_running(&self) -> usize {
        self.lanes.values().map(|lane| lane.n_running).sum()
    }

    pub(super) fn n_waiting(&self) -> usize {
        self.lanes.values().map(|lane| lane.waiting.len()).sum()
    }

    /// Lets a newcomer in if there is room and nobody of its key is before it. Others who wait while there is room wait
    /// for their own key.
    pub(super) fn try_enter(&mut self, account: &Arc<Account>) -> bool {
        let has_room = self.n_running() < self.max_requests();
        let lane = self.lanes.entry(account.name.clone()).or_default();
        let enters = has_room && lane.waiting.is_empty() && lane.has_room(account);
        if enters {
            lane.n_running += 1;
        }
        enters
    }

    /// Puts a newcomer at the end of its lane; returns its ticket. In a full queue it takes the place of the last one in
    /// a lane that is longer than its own would be.
    pub(super) fn wait(
        &mut self,
        account: &Arc<Account>,
        answer: oneshot::Sender<Result<Permit, Refusal>>,
    ) -> Result<u64, Refusal> {
        if self.n_waiting() >= self.bounds.max_waiting {
            let own = self.lanes.get(&account.name).map_or(0, |lane| lane.waiting.len());
            let full = self.full();
            let longest = self.lanes.values_mut().max_by_key(|lane| lane.waiting.len());
            let displaced =
                longest.filter(|lane| lane.waiting.len() > own + 1).and_then(|lane| lane.waiting.pop_back());
            let Some(displaced) = displaced else {
                let is_own_limit = self.is_at_own_limit(account);
                self.sweep(&account.name);
                return Err(if is_own_limit { self.concurrency(account) } else { full });
            };
            // Gone already: then it does not mind.
            let _ = displaced.answer.send(Err(full));
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let lane = self.lanes.entry(account.name.clone()).or_default();
        lane.waiting.push_back(Waiter { ticket, account: Arc::clone(account), answer });
        Ok(ticket)
    }

    /// Takes the one out of the queue whose turn it is, and counts it as running.
    pub(super) fn next(&mut self) -> Option<Waiter> {
        if self.n_running() >= self.max_requests() {
            return None;
        }
        let order = |lane: &Lane| {
            let first = lane.waiting.front()?;
            let may_run = lane.has_room(&first.account);
            may_run.then_some((std::cmp::Reverse(first.account.limits.priority), lane.n_running, first.ticket))
        };
        let (_, lane) =
            self.lanes.values_mut().filter_map(|lane| Some((order(lane)?, lane))).min_by_key(|(o, _)| *o)?;
        lane.n_running += 1;
        lane.waiting.pop_front()
    }

    /// One of this account's requests is over.
    pub(super) fn leave(&mut self, account: &Account) {
        if let Some(lane) = self.lanes.get_mut(&account.name) {
            lane.n_running = lane.n_running.saturating_sub(1);
        }
        self.sweep(&account.name);
    }

    /// The holder of this ticket does not wait any more.
    pub(super) fn give_up(&mut self, account: &Account, ticket: u64) {
        if let Some(lane) = self.lanes.get_mut(&account.name) {
            lane.waiting.retain(|waiter| waiter.ticket != ticket);
        }
        self.sweep(&account.name);
    }

    /// How many go before the holder of this ticket if nobody comes or leaves, and itself. An estimate: whose key has
    /// fewest running when a place is free is not known yet.
    pub(super) fn place_of(&self, ticket: u64) -> Option<usize> {
        let waiting = || self.lanes.values().flat_map(|lane| &lane.waiting);
        let order = |waiter: &Waiter| (std::cmp::Reverse(waiter.account.limits.priority), waiter.ticket);
        let own = order(waiting().find(|waiter| waiter.ticket == ticket)?);
        Some(waiting().filter(|waiter| order(waiter) <= own).count())
    }

    /// Whether it is the key's own limit that keeps it waiting.
    pub(super) fn is_at_own_limit(&self, account: &Account) -> bool {
        self.lanes.get(&account.name).is_some_and(|lane| !lane.has_room(account))
    }

    /// The refusal of a full house.
    pub(super) fn full(&self) -> Refusal {
        Refusal::Full { limit: self.max_requests() }
    }

    /// The refusal of a key that has enough running.
    pub(super) fn concurrency(&self, account: &Account) -> Refusal {
        Refusal::Concurrency { limit: account.limits.max_concurrent.unwrap_or(self.max_requests()) }
    }

    /// Removes a lane that nobody is in: keys come and go with the configuration.
    fn sweep(&mut self, name: &str) {
        if self.lanes.get(name).is_some_and(|lane| lane.n_running == 0 && lane.waiting.is_empty()) {
            self.lanes.remove(name);
        }
    }
}
