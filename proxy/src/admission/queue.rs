//! The queue, with a lane for each key. `G` is what a sequence gets for its place.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use tokio::sync::oneshot;

use super::lane::{KeyLane, PlaceOf, QueuedRequest, Refusal, Want, WantAnswer};
use super::limits::AdmissionLimits;
use super::target_places::TargetPlaces;
use crate::account::Account;

/// All requests that run or wait. A lane exists only while its key has any.
pub(super) struct AdmissionQueue<G> {
    pub(super) limits: AdmissionLimits,
    /// The targets that can serve now.
    targets: Vec<Arc<TargetPlaces>>,
    lanes_by_key: HashMap<String, KeyLane<G>>,
    /// Places that are taken, of all targets.
    n_places: usize,
    next_number: u64,
    /// Answers to send once the lock is free.
    answers: Vec<WantAnswer<G>>,
}

/// The sequence that gets the next place.
struct Next {
    key: String,
    ticket: u64,
    number: u64,
    target: Arc<TargetPlaces>,
}

impl<G> AdmissionQueue<G> {
    pub(super) fn new(limits: AdmissionLimits) -> Self {
        AdmissionQueue {
            limits,
            targets: Vec::new(),
            lanes_by_key: HashMap::new(),
            n_places: 0,
            next_number: 0,
            answers: Vec::new(),
        }
    }

    /// Sets which targets can serve now.
    pub(super) fn set_targets(&mut self, targets: Vec<Arc<TargetPlaces>>) {
        self.targets = targets;
    }

    /// The maximum number of places.
    pub(super) fn max_places(&self) -> usize {
        let room = self.targets.iter().map(|target| target.n_places()).sum();
        self.limits.max_requests.map_or(room, |limit| limit.min(room))
    }

    /// Requests that have a place, or are about to want one.
    pub(super) fn n_running(&self) -> usize {
        self.lanes_by_key.values().map(|lane| lane.requests.len() - lane.n_waiting).sum()
    }

    /// The places whose sequences have a slot, at each target at most as many as it has. A stream that moves to a full target is
    /// one too many.
    pub(super) fn n_places(&self) -> usize {
        self.targets.iter().map(|target| target.n_in_slots().min(target.n_places())).sum()
    }

    /// Requests that wait for their only place.
    pub(super) fn n_waiting(&self) -> usize {
        self.lanes_by_key.values().map(|lane| lane.n_waiting).sum()
    }

    /// A new request at the end of its key's lane, which wants nothing yet. Returns its ticket.
    pub(super) fn enter(&mut self, account: &Arc<Account>) -> u64 {
        let ticket = self.number();
        let request = QueuedRequest::new(Arc::clone(account));
        self.lanes_by_key.entry(account.name.clone()).or_default().requests.insert(ticket, request);
        ticket
    }

    /// A sequence of this request wants a place at one of these targets; of equally loaded ones, at the first. Returns the
    /// number of its want. If that makes too many requests wait, the last one of the longest lane is refused.
    pub(super) fn want(
        &mut self,
        account: &Account,
        ticket: u64,
        targets: Vec<Arc<TargetPlaces>>,
        answer: oneshot::Sender<Result<G, Refusal>>,
    ) -> u64 {
        let number = self.number();
        if let Some(lane) = self.lanes_by_key.get_mut(&account.name) {
            targets.iter().for_each(|target| target.want());
            lane.change(ticket, |request| request.wants.push_back(Want { number, targets, answer }));
        }
        self.give_places();
        if self.n_waiting() > self.limits.max_waiting && self.is_waiting(account, ticket) {
            self.refuse_one(account, ticket);
        }
        number
    }

    /// Refuses the last request of the longest lane, or this one if no lane is longer than its own.
    fn refuse_one(&mut self, account: &Account, ticket: u64) {
        // Without the one that is refused.
        let full = Refusal::Full { n_running: self.n_places, n_waiting: self.n_waiting() - 1 };
        let own = self.lanes_by_key.get(&account.name).map_or(0, |lane| lane.n_waiting);
        let longest = self.lanes_by_key.iter().max_by_key(|(_, lane)| lane.n_waiting);
        let longer = longest.filter(|(_, lane)| lane.n_waiting > own).and_then(|(key, lane)| {
            let (last, _) = lane.wanting().filter(|(_, request)| request.is_waiting()).last()?;
            Some((key.clone(), last))
        });
        let refusal = match &longer {
            None if self.is_at_own_limit(account) => self.concurrency(account),
            _ => full,
        };
        let (key, ticket) = longer.unwrap_or_else(|| (account.name.clone(), ticket));
        let Some(lane) = self.lanes_by_key.get_mut(&key) else { return };
        let wants = lane.change(ticket, |request| std::mem::take(&mut request.wants));
        for want in wants.into_iter().flatten() {
            want.targets.iter().for_each(|target| target.stop_wanting());
            self.answers.push(WantAnswer { to: want.answer, outcome: Err(refusal) });
        }
    }

    /// The sequence waits no longer.
    pub(super) fn stop_wanting(&mut self, account: &Account, ticket: u64, number: u64) {
        if let Some(lane) = self.lanes_by_key.get_mut(&account.name) {
            lane.stop_wanting(ticket, number);
        }
    }

    /// A place is free again. If it is the request's last one, it goes to its next sequence that can use it: a reply that
    /// has begun is not made to wait.
    pub(super) fn return_place(&mut self, place: &PlaceOf) {
        let PlaceOf { account, ticket, target, .. } = place;
        if let Some(lane) = self.lanes_by_key.get_mut(&account.name) {
            lane.return_place(place);
            let rest = lane.requests.get(ticket).filter(|request| request.n_places == 0);
            let is_here = |want: &&Want<G>| want.targets.iter().any(|wanted| wanted.id == target.id);
            if let Some(number) = rest.and_then(|request| request.wants.iter().find(is_here)).map(|want| want.number) {
                self.answers.extend(lane.give_place(*ticket, number, Arc::clone(target)));
            } else {
                self.n_places -= 1;
            }
        }
        self.sweep(&account.name);
    }

    /// A running sequence goes on at another target.
    pub(super) fn move_place(&mut self, place: &mut PlaceOf, target: &Arc<TargetPlaces>) {
        if let Some(lane) = self.lanes_by_key.get_mut(&place.account.name) {
            lane.give_back(place);
            place.target = Arc::clone(target);
            lane.take(place);
        }
    }

    /// This request has ended.
    pub(super) fn leave(&mut self, account: &Account, ticket: u64) {
        if let Some(lane) = self.lanes_by_key.get_mut(&account.name) {
            lane.requests.remove(&ticket);
            lane.wanting.remove(&ticket);
        }
        self.sweep(&account.name);
    }

    /// Gives all free places to those who are next.
    pub(super) fn give_places(&mut self) {
        while let Some(Next { key, ticket, number, target }) = self.next() {
            let Some(lane) = self.lanes_by_key.get_mut(&key) else { return };
            let Some(given) = lane.give_place(ticket, number, target) else { return };
            self.n_places += 1;
            self.answers.push(given);
        }
    }

    /// Takes the answers to send. Send them without the lock.
    pub(super) fn take_answers(&mut self) -> Vec<WantAnswer<G>> {
        std::mem::take(&mut self.answers)
    }

    /// Who gets the next place: the highest priority, then the key with the fewest places at the target, then the oldest
    /// request. A lane at its key's own limit is passed over.
    fn next(&self) -> Option<Next> {
        let wants = self.lanes_by_key.iter().flat_map(|(key, lane)| {
            let may_have = lane.wanting().filter(move |(_, request)| lane.has_room(&request.account));
            may_have.flat_map(move |(ticket, request)| {
                request.wants.iter().map(move |want| (key, lane, ticket, &request.account, want))
            })
        });
        let free = wants.filter_map(|(key, lane, ticket, account, want)| {
            let target =
                want.targets.iter().filter(|target| self.is_free(target)).min_by_key(|target| target.load())?;
            let n_here = lane.n_places_at.get(&target.id).copied().unwrap_or(0);
            Some(((Reverse(account.limits.priority), n_here, ticket, want.number), (key, ticket, want.number, target)))
        });
        let (_, (key, ticket, number, target)) = free.min_by_key(|(order, _)| *order)?;
        Some(Next { key: key.clone(), ticket, number, target: Arc::clone(target) })
    }

    /// Returns true if a place of this target can be taken. If the number of all places is limited, a target gets another
    /// one only while more are free than there are targets without one. So no target has all of them.
    fn is_free(&self, target: &TargetPlaces) -> bool {
        if target.is_full() {
            return false;
        }
        let Some(limit) = self.limits.max_requests else { return true };
        let n_free = limit.saturating_sub(self.n_places);
        let n_idle = self.targets.iter().filter(|other| other.id != target.id && other.n_taken() == 0).count();
        n_free > if target.n_taken() == 0 { 0 } else { n_idle }
    }

    /// The position in the queue of the request with this ticket, from 1, among those that wait for the same targets. An
    /// estimate: the order among equals depends on how many places each key has when one becomes free.
    pub(super) fn position_of(&self, ticket: u64) -> Option<usize> {
        let waiting =
            || self.lanes_by_key.values().flat_map(KeyLane::wanting).filter(|(_, request)| request.is_waiting());
        let order = |ticket: u64, request: &QueuedRequest<G>| (Reverse(request.account.limits.priority), ticket);
        let targets = |request: &QueuedRequest<G>| -> BTreeSet<u64> {
            request.wants.iter().flat_map(|want| &want.targets).map(|target| target.id).collect()
        };
        let own = waiting().find(|(number, _)| *number == ticket)?.1;
        let (own_order, own_targets) = (order(ticket, own), targets(own));
        let is_before = |(number, request): &(u64, &QueuedRequest<G>)| {
            let is_rival = || !targets(request).is_disjoint(&own_targets);
            *number == ticket || (order(*number, request) < own_order && is_rival())
        };
        Some(waiting().filter(is_before).count())
    }

    /// Returns true if this request waits for its only place.
    pub(super) fn is_waiting(&self, account: &Account, ticket: u64) -> bool {
        let request = self.lanes_by_key.get(&account.name).and_then(|lane| lane.requests.get(&ticket));
        request.is_some_and(QueuedRequest::is_waiting)
    }

    /// Why this account's request did not get a place in time.
    pub(super) fn late(&self, account: &Account) -> Refusal {
        match self.is_at_own_limit(account) {
            true => self.concurrency(account),
            false => Refusal::Full { n_running: self.n_places, n_waiting: self.n_waiting() },
        }
    }

    /// Returns true if the key's own limit keeps its requests waiting.
    fn is_at_own_limit(&self, account: &Account) -> bool {
        self.lanes_by_key.get(&account.name).is_some_and(|lane| !lane.has_room(account))
    }

    fn concurrency(&self, account: &Account) -> Refusal {
        Refusal::Concurrency { limit: account.limits.max_concurrent.unwrap_or(self.max_places()) }
    }

    /// Removes an empty lane: the configuration may add and remove keys at any time.
    fn sweep(&mut self, name: &str) {
        if self.lanes_by_key.get(name).is_some_and(|lane| lane.requests.is_empty() && lane.n_places == 0) {
            self.lanes_by_key.remove(name);
        }
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }
}
