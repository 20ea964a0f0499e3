//! The queue, with a lane for each key. `P` is what an admitted request gets.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use tokio::sync::{Semaphore, oneshot};

use super::limits::{AdmissionLimits, PLACES_PER_SLOT, WITHOUT_SLOTS};
use super::need::PlaceNeed;
use crate::account::Account;

/// All requests that run or wait. A lane exists only while its key has any.
pub(super) struct AdmissionQueue<P> {
    pub(super) limits: AdmissionLimits,
    n_slots: usize,
    lanes_by_key: HashMap<String, Lane<P>>,
    next_ticket: u64,
}

/// Every request passes the queue, so nothing here looks at all those that run.
struct Lane<P> {
    /// By ticket.
    running: BTreeMap<u64, RunningRequest>,
    /// The tickets of those that want another place.
    wanting: BTreeSet<u64>,
    /// The places of all of them.
    n_places: usize,
    waiting: VecDeque<Waiter<P>>,
}

/// An admitted request.
struct RunningRequest {
    account: Arc<Account>,
    /// Places that it has now.
    n_places: usize,
    /// Its sequences that have not ended, started or not.
    n_left: usize,
    /// The most places that it uses at once.
    at_once: usize,
    /// A permit for each place that no sequence of the request has taken yet.
    free_places: Arc<Semaphore>,
}

impl RunningRequest {
    fn get_place(&mut self) {
        self.n_places += 1;
        self.free_places.add_permits(1);
    }

    fn wants_place(&self) -> bool {
        self.n_places < self.n_left.min(self.at_once)
    }
}

pub(super) struct Waiter<P> {
    ticket: u64,
    pub(super) account: Arc<Account>,
    need: PlaceNeed,
    pub(super) answer: oneshot::Sender<Result<P, Refusal>>,
}

/// A request that has just been admitted.
pub(super) struct Entered {
    pub(super) ticket: u64,
    pub(super) free_places: Arc<Semaphore>,
}

/// The one that gets the next place.
enum Next {
    /// A running request with more sequences.
    Running(u64),
    /// The first request in its lane.
    Waiting,
}

/// The reason why a request is not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// All places are taken, and the queue is full.
    Full { n_running: usize, n_waiting: usize },
    /// The key has as many places as it may have.
    Concurrency { limit: usize },
}

impl<P> Default for Lane<P> {
    fn default() -> Self {
        Lane { running: BTreeMap::new(), wanting: BTreeSet::new(), n_places: 0, waiting: VecDeque::new() }
    }
}

impl<P> Lane<P> {
    /// Returns true if the account's own limit allows another place.
    fn has_room(&self, account: &Account) -> bool {
        account.limits.max_concurrent.is_none_or(|limit| self.n_places < limit)
    }

    /// Gives a request its first place.
    fn enter(&mut self, ticket: u64, account: &Arc<Account>, need: PlaceNeed) -> Entered {
        let free_places = Arc::new(Semaphore::new(1));
        let request = RunningRequest {
            account: Arc::clone(account),
            n_places: 0,
            n_left: need.n_sequences.max(1),
            at_once: need.at_once,
            free_places: Arc::clone(&free_places),
        };
        self.running.insert(ticket, request);
        self.change(ticket, |request| request.n_places = 1);
        Entered { ticket, free_places }
    }

    /// Changes a running request, and what the lane knows about it.
    fn change(&mut self, ticket: u64, change: impl FnOnce(&mut RunningRequest)) {
        let Some(request) = self.running.get_mut(&ticket) else { return };
        self.n_places -= request.n_places;
        change(request);
        self.n_places += request.n_places;
        match request.wants_place() {
            true => self.wanting.insert(ticket),
            false => self.wanting.remove(&ticket),
        };
    }

    fn give_place(&mut self, ticket: u64) {
        self.change(ticket, RunningRequest::get_place);
    }

    fn leave(&mut self, ticket: u64) {
        if let Some(request) = self.running.remove(&ticket) {
            self.n_places -= request.n_places;
            self.wanting.remove(&ticket);
        }
    }
}

impl<P> AdmissionQueue<P> {
    pub(super) fn new(limits: AdmissionLimits) -> Self {
        AdmissionQueue { limits, n_slots: 0, lanes_by_key: HashMap::new(), next_ticket: 0 }
    }

    /// The maximum number of places.
    pub(super) fn max_places(&self) -> usize {
        let room = match self.n_slots {
            0 => WITHOUT_SLOTS,
            n_slots => n_slots.saturating_mul(PLACES_PER_SLOT),
        };
        self.limits.max_requests.unwrap_or(room)
    }

    /// Sets how many slots the engines have. Returns true if that changed.
    pub(super) fn set_slots(&mut self, n_slots: usize) -> bool {
        std::mem::replace(&mut self.n_slots, n_slots) != n_slots
    }

    /// Admitted requests.
    pub(super) fn n_running(&self) -> usize {
        self.lanes_by_key.values().map(|lane| lane.running.len()).sum()
    }

    /// Places that running requests have.
    pub(super) fn n_places(&self) -> usize {
        self.lanes_by_key.values().map(|lane| lane.n_places).sum()
    }

    pub(super) fn n_waiting(&self) -> usize {
        self.lanes_by_key.values().map(|lane| lane.waiting.len()).sum()
    }

    /// Admits a new request if there is room and no other request has a better claim to it. A request may wait even if
    /// there is room, because its key's own limit is reached.
    pub(super) fn try_enter(&mut self, account: &Arc<Account>, need: PlaceNeed) -> Option<Entered> {
        let has_room = self.n_places() < self.max_places() && self.best().is_none();
        let lane = self.lanes_by_key.entry(account.name.clone()).or_default();
        let enters = has_room && lane.waiting.is_empty() && lane.has_room(account);
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        enters.then(|| lane.enter(ticket, account, need))
    }

    /// Puts a new request at the end of its lane and returns its ticket. In a full queue it takes the place of the last
    /// request in the longest lane, if that lane is longer than its own would be.
    pub(super) fn wait(
        &mut self,
        account: &Arc<Account>,
        need: PlaceNeed,
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
        lane.waiting.push_back(Waiter { ticket, account: Arc::clone(account), need, answer });
        Ok(ticket)
    }

    /// Gives free places to those who are next, until a waiting request is admitted. Returns that request.
    pub(super) fn next(&mut self) -> Option<(Waiter<P>, Entered)> {
        while self.n_places() < self.max_places() {
            let (name, next) = self.best()?;
            match next {
                Next::Running(ticket) => self.lanes_by_key.get_mut(&name)?.give_place(ticket),
                Next::Waiting => {
                    let lane = self.lanes_by_key.get_mut(&name)?;
                    let first = lane.waiting.pop_front()?;
                    let entered = lane.enter(first.ticket, &first.account, first.need);
                    return Some((first, entered));
                }
            }
        }
        None
    }

    /// The lane and the request that get the next place: the highest priority, then the key with the fewest places,
    /// then the oldest request. A lane at its key's own limit is passed over.
    fn best(&self) -> Option<(String, Next)> {
        let candidate = |lane: &Lane<P>| {
            let running = lane.wanting.first().and_then(|ticket| lane.running.get_key_value(ticket));
            let (account, ticket, next) = match (running, lane.waiting.front()) {
                (Some((&ticket, request)), _) => (&request.account, ticket, Next::Running(ticket)),
                (None, Some(waiter)) => (&waiter.account, waiter.ticket, Next::Waiting),
                (None, None) => return None,
            };
            let order = (std::cmp::Reverse(account.limits.priority), lane.n_places, ticket);
            lane.has_room(account).then_some((order, next))
        };
        let candidates = self.lanes_by_key.iter().filter_map(|(name, lane)| Some((name, candidate(lane)?)));
        candidates.min_by_key(|(_, (order, _))| *order).map(|(name, (_, next))| (name.clone(), next))
    }

    /// A sequence of this request has ended. Its place goes to whoever is next. The request's last place stays with it
    /// while it has sequences left: a reply that has begun is not made to wait.
    pub(super) fn end_sequence(&mut self, account: &Account, ticket: u64) {
        let Some(lane) = self.lanes_by_key.get_mut(&account.name) else { return };
        lane.change(ticket, |request| {
            request.n_places = request.n_places.saturating_sub(1);
            request.n_left = request.n_left.saturating_sub(1);
            if request.n_places == 0 && request.n_left > 0 {
                request.get_place();
            }
        });
    }

    /// This request has ended.
    pub(super) fn leave(&mut self, account: &Account, ticket: u64) {
        if let Some(lane) = self.lanes_by_key.get_mut(&account.name) {
            lane.leave(ticket);
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

    /// The position in the queue of the request with this ticket, from 1. An estimate: the order among equals depends
    /// on how many places each key has when one becomes free.
    pub(super) fn position_of(&self, ticket: u64) -> Option<usize> {
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
        Refusal::Full { n_running: self.n_places(), n_waiting: self.n_waiting() }
    }

    /// The refusal when the key's own limit is reached.
    pub(super) fn concurrency(&self, account: &Account) -> Refusal {
        Refusal::Concurrency { limit: account.limits.max_concurrent.unwrap_or(self.max_places()) }
    }

    /// Removes an empty lane: the configuration may add and remove keys at any time.
    fn sweep(&mut self, name: &str) {
        if self.lanes_by_key.get(name).is_some_and(|lane| lane.running.is_empty() && lane.waiting.is_empty()) {
            self.lanes_by_key.remove(name);
        }
    }
}
