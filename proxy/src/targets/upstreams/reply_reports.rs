//! What an upstream's replies have that Baton does not know or cannot pass on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use baton_upstream::LeftOut;

/// The unknown words of one upstream that are logged. A server that ends each reply by another one must not fill the log.
const MAX_LOGGED_WORDS: usize = 32;

/// Counts such replies of one upstream, and logs the first one of each kind.
#[derive(Debug, Default)]
pub struct ReplyReports {
    n_unknown_ends: AtomicU64,
    unknown_words: Mutex<Vec<String>>,
    left_out: Mutex<Vec<LeftOut>>,
}

impl ReplyReports {
    /// Replies that ended by an unknown word, so far.
    pub fn n_unknown_ends(&self) -> u64 {
        self.n_unknown_ends.load(Ordering::Relaxed)
    }

    /// Notes a reply that ended by an unknown word.
    pub(super) fn unknown_end(&self, upstream: &str, word: &str) {
        self.n_unknown_ends.fetch_add(1, Ordering::Relaxed);
        if self.is_new(word) {
            tracing::warn!(upstream, word, "an upstream ended a reply for an unknown reason; clients get `length`");
        }
    }

    /// Returns true for a word that was not logged yet, and is logged.
    fn is_new(&self, word: &str) -> bool {
        let mut known = self.unknown_words.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = known.len() < MAX_LOGGED_WORDS && !known.iter().any(|one| one == word);
        if is_new {
            known.push(word.to_owned());
        }
        is_new
    }

    /// Notes a reply with something that no dialect shows.
    pub(super) fn left_out(&self, upstream: &str, left_out: LeftOut) {
        let what = left_out.as_str();
        let mut known = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        if known.contains(&left_out) {
            tracing::debug!(upstream, what, "a part of an upstream's reply is not passed on");
        } else {
            known.push(left_out);
            tracing::warn!(upstream, what, "a part of an upstream's reply is not passed on");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_unknown_word_is_logged_once_and_not_without_end() {
        let reports = ReplyReports::default();
        assert_eq!(["a", "b", "a"].map(|word| reports.is_new(word)), [true, true, false]);
        let n_logged = (0..100).filter(|i| reports.is_new(&i.to_string())).count();
        assert_eq!(n_logged, MAX_LOGGED_WORDS - 2);
    }
}
