//! The suspects on a node: requests that have lost an engine and have received few tokens since.
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
    suspicion: Suspicion,
    /// The other requests that have been entered meanwhile, except for those that were cleared.
    others: BTreeSet<u64>,
}

/// How likely a request is the cause of the end of its engine. The likeliest comes last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Suspicion {
    /// It has lost no engine so far.
    Unsuspected,
    /// It was generating for a while when its engine was lost. It keeps away from strong suspects if it can.
    Weak,
    /// It had just begun, or it was in the prompt. It keeps away from all suspects, and waits until it can.
    Strong,
}

/// The stay of a suspect on a node. Dropping it ends the stay without clearing the suspect.
#[derive(Debug)]
pub struct SuspectStay {
    suspects: Arc<Suspects>,
    stay: u64,
}

impl Suspects {
    /// Enters a strong suspect if no other request's suspect is here. `request` is any number that identifies the request.
    pub fn enter_alone(self: &Arc<Self>, request: u64) -> Option<SuspectStay> {
        let mut list = self.lock();
        list.is_free_for(request, Suspicion::Strong).then(|| self.note(&mut list, request, Suspicion::Strong))
    }

    /// Enters even if other suspects are here.
    pub fn enter(self: &Arc<Self>, request: u64, suspicion: Suspicion) -> SuspectStay {
        self.note(&mut self.lock(), request, suspicion)
    }

    /// Returns true if no other request is here that this one keeps away from.
    pub fn is_free_for(&self, request: u64, suspicion: Suspicion) -> bool {
        self.lock().is_free_for(request, suspicion)
    }

    fn note(self: &Arc<Self>, list: &mut SuspectList, request: u64, suspicion: Suspicion) -> SuspectStay {
        let mut others = BTreeSet::new();
        for record in list.present.iter_mut().filter(|record| record.request != request) {
            record.others.insert(request);
            others.insert(record.request);
        }
        list.n_entered += 1;
        let stay = list.n_entered;
        list.present.push(SuspectRecord { stay, request, suspicion, others });
        SuspectStay { suspects: Arc::clone(self), stay }
    }

    fn lock(&self) -> MutexGuard<'_, SuspectList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SuspectList {
    fn is_free_for(&self, request: u64, suspicion: Suspicion) -> bool {
        self.present.iter().filter(|record| record.request != request).all(|record| match suspicion {
            Suspicion::Unsuspected => true,
            Suspicion::Weak => record.suspicion < Suspicion::Strong,
            Suspicion::Strong => record.suspicion == Suspicion::Unsuspected,
        })
    }
}

impl SuspectStay {
    /// The request has lost an engine; it is a suspect to this degree at least.
    pub fn suspect(&self, suspicion: Suspicion) {
        let mut list = self.suspects.lock();
        for record in list.present.iter_mut().filter(|record| record.stay == self.stay) {
            record.suspicion = record.suspicion.max(suspicion);
        }
    }

    /// Returns true if no other suspect has been on the node meanwhile, except for those that were cleared.
    pub fn was_alone(&self) -> bool {
        let list = self.suspects.lock();
        list.present.iter().any(|record| record.stay == self.stay && record.others.is_empty())
    }

    /// The request is no suspect any more. If the process ends later, this request does not excuse the others.
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
        assert!(suspects.enter_alone(2).is_none() && !suspects.is_free_for(2, Suspicion::Weak));
        let second = suspects.enter(2, Suspicion::Strong);
        assert!(!first.was_alone() && !same.was_alone() && !second.was_alone());
        second.clear();
        assert!(first.was_alone() && same.was_alone());
        // One that leaves with its engine may have been the cause, so it goes on excusing the others.
        drop(suspects.enter(3, Suspicion::Strong));
        assert!(!first.was_alone());
        drop((first, same));
        assert!(suspects.enter_alone(4).is_some_and(|stay| stay.was_alone()));
        let unsuspected = suspects.enter(5, Suspicion::Unsuspected);
        let suspect = suspects.enter_alone(6).expect("it keeps no suspect away");
        assert!(!suspect.was_alone() && !unsuspected.was_alone());
        drop(suspect);
        unsuspected.suspect(Suspicion::Weak);
        assert!(suspects.enter_alone(6).is_none() && suspects.is_free_for(6, Suspicion::Weak));
    }
}
