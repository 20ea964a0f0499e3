//! Keeps compiled constraints, bounded in number and in bytes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::Matcher;

/// Compiled constraints that are kept; an application has a handful of schemas.
const MAX_KEPT: usize = 64;

/// The bytes of all kept constraints together, about.
pub(crate) const MAX_KEPT_BYTES: usize = 128 << 20;

/// How many times the bytes of its source a compiled grammar takes. Its lexer comes on top: a pattern of 60 KB may be one
/// of 40 MB.
pub(crate) const BYTES_FOR_SOURCE: usize = 128;

/// Matchers, the most recently used last.
#[derive(Default)]
pub(crate) struct MatcherCache(Mutex<VecDeque<Kept>>);

struct Kept {
    /// The source of the constraint.
    source: String,
    matcher: Arc<Matcher>,
    /// The bytes that both take, about.
    n_bytes: usize,
}

impl MatcherCache {
    /// The matcher of a constraint, at the beginning of the text. A sequence needs a deep clone of it.
    pub(crate) fn get(&self, source: &str) -> Option<Arc<Matcher>> {
        let mut kept = self.lock();
        let at = kept.iter().position(|known| known.source == source)?;
        let entry = kept.remove(at)?;
        let matcher = Arc::clone(&entry.matcher);
        kept.push_back(entry);
        Some(matcher)
    }

    /// Keeps a matcher with a lexer of this size, and drops those that were not used for longest if there are too many.
    pub(crate) fn put(&self, source: String, matcher: Matcher, lexer_bytes: usize) {
        let mut kept = self.lock();
        // Requests with the same new schema compile it at the same time.
        kept.retain(|known| known.source != source);
        let n_bytes = source.len() * BYTES_FOR_SOURCE + lexer_bytes;
        kept.push_back(Kept { source, matcher: Arc::new(matcher), n_bytes });
        while kept.len() > MAX_KEPT || kept.iter().map(|known| known.n_bytes).sum::<usize>() > MAX_KEPT_BYTES {
            kept.pop_front();
        }
    }

    #[cfg(test)]
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    #[cfg(test)]
    pub(crate) fn sources(&self) -> Vec<String> {
        self.lock().iter().map(|known| known.source.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
