//! The suspects on a node: requests that have lost an engine and have received no token since.
//!
//! If the node's process ends under a suspect that shares it with no other suspect, that request is the cause. A request
//! whose prompt another node computes is entered too: that node may be lost at the same moment as this one.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The suspects on one node.
#[derive(Debug, Default)]
pub struct Suspects(Mutex<SuspectList>);

#[derive(Debug, Default)]
struct SuspectList {
    n_entered: u64,
    present: Vec<SuspectRecord>,
}

#[derive(Debug)]
struct SuspectRecord {
    stay: u64,
    request: u64,
    /// False for a request that has lost no engine so far.
    is_suspect: bool,
    /// The other requests that have been entered meanwhile, except for those that were cleared.
    others: BTreeSet<u64>,
}

/// The stay of a suspect on a node. Dropping it ends the stay without clearing the suspect.
#[derive(Debug)]
pub struct SuspectStay {
    suspects: Arc<Suspects>,
    stay: u64,
}

impl Suspects {
    /// Enters if no other request's suspect is here. `request` is any number that identifies the request.
    pub fn enter_alone(self: &Arc<Self>, request: u64) -> Option<SuspectStay> {
        let mut list = self.lock();
        list.is_free_for(request).then(|| self.note(&mut list, request, true))
    }

    /// Enters even if other suspects are here.
    pub fn enter(self: &Arc<Self>, request: u64) -> SuspectStay {
        self.note(&mut self.lock(), request, true)
    }

    /// Enters a request that has lost no engine so far, and keeps no suspect away.
    pub fn enter_unsuspected(self: &Arc<Self>, request: u64) -> SuspectStay {
        self.note(&mut self.lock(), request, false)
    }

    /// Returns true if no other request's suspect is here.
    pub fn is_free_for(&self, request: u64) -> bool {
        self.lock().is_free_for(request)
    }

    fn note(self: &Arc<Self>, list: &mut SuspectList, request: u64, is_suspect: bool) -> SuspectStay {
        let mut others = BTreeSet::new();
        for record in list.present.iter_mut().filter(|record| record.request != request) {
            record.others.insert(request);
            others.insert(record.request);
        }
        list.n_entered += 1;
        let stay = list.n_entered;
        list.present.push(SuspectRecord { stay, request, is_suspect, others });
        SuspectStay { suspects: Arc::clone(self), stay }
    }

    fn lock(&self) -> MutexGuard<'_, SuspectList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SuspectList {
    fn is_free_for(&self, request: u64) -> bool {
        self.present.iter().all(|record| record.request == request || !record.is_suspect)
    }
}

impl SuspectStay {
    /// The request has lost an engine.
    pub fn suspect(&self) {
        let mut list = self.suspects.lock();
        list.present.iter_mut().filter(|record| record.stay == self.stay).for_each(|record| record.is_suspect = true);
    }

    /// Returns true if no other suspect has been on the node meanwhile, except for those that were cleared.
    pub fn was_alone(&self) -> bool {
        let list = self.suspects.lock();
        list.present.iter().any(|record| record.stay == self.stay && record.others.is_empty())
    }

    /// The suspect has received a token. If the process ends later, this request does not excuse the others.
    pub fn clear(self) {
        let mut list = self.suspects.lock();
        let Some(own) = list.present.iter().find(|record| record.stay == self.stay) else { return };
        let request = own.request;
        for record in &mut list.present {
            record.others.remove(&request);
        }
    }
}

impl Drop for SuspectStay {
    fn drop(&mut self) {
        self.suspects.lock().present.retain(|record| record.stay != self.stay);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suspect_is_alone_unless_another_one_was_there_and_was_not_cleared() {
        let suspects = Arc::new(Suspects::default());
        let first = suspects.enter_alone(1).unwrap();
        let same = suspects.enter_alone(1).expect("it is the same request");
        assert!(first.was_alone() && same.was_alone());
        assert!(suspects.enter_alone(2).is_none() && !suspects.is_free_for(2));
        let second = suspects.enter(2);
        assert!(!first.was_alone() && !same.was_alone() && !second.was_alone());
        second.clear();
        assert!(first.was_alone() && same.was_alone());
        // One that leaves with its engine may have been the cause, so it goes on excusing the others.
        drop(suspects.enter(3));
        assert!(!first.was_alone());
        drop((first, same));
        assert!(suspects.enter_alone(4).is_some_and(|stay| stay.was_alone()));
        let unsuspected = suspects.enter_unsuspected(5);
        let suspect = suspects.enter_alone(6).expect("it keeps no suspect away");
        assert!(!suspect.was_alone() && !unsuspected.was_alone());
        drop(suspect);
        unsuspected.suspect();
        assert!(suspects.enter_alone(6).is_none());
    }
}
