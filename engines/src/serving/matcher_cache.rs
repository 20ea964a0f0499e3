//! Keeps compiled constraints, bounded in number and in bytes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::Matcher;

/// Compiled constraints that are kept; an application has a handful of schemas.
const MAX_KEPT: usize = 64;

/// The sources of all kept constraints together, bytes. A compiled constraint has about the size of its source.
pub(crate) const MAX_KEPT_BYTES: usize = 16 << 20;

/// Matchers by the source of their constraint, the most recently used last.
#[derive(Default)]
pub(crate) struct MatcherCache(Mutex<VecDeque<(String, Arc<Matcher>)>>);

impl MatcherCache {
    /// The matcher of a constraint, at the beginning of the text. A sequence needs a deep clone of it.
    pub(crate) fn get(&self, source: &str) -> Option<Arc<Matcher>> {
        let mut kept = self.lock();
        let at = kept.iter().position(|(known, _)| known == source)?;
        let entry = kept.remove(at)?;
        let matcher = Arc::clone(&entry.1);
        kept.push_back(entry);
        Some(matcher)
    }

    /// Keeps a matcher, and drops those that were not used for longest if there are too many.
    pub(crate) fn put(&self, source: String, matcher: Matcher) {
        let mut kept = self.lock();
        // Requests with the same new schema compile it at the same time.
        kept.retain(|(known, _)| *known != source);
        kept.push_back((source, Arc::new(matcher)));
        while kept.len() > MAX_KEPT || kept.iter().map(|(known, _)| known.len()).sum::<usize>() > MAX_KEPT_BYTES {
            kept.pop_front();
        }
    }

    #[cfg(test)]
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    #[cfg(test)]
    pub(crate) fn sources(&self) -> Vec<String> {
        self.lock().iter().map(|(source, _)| source.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(String, Arc<Matcher>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
