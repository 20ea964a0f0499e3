//! What an upstream's replies have that Baton does not know or cannot pass on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use baton_upstream::LeftOut;

/// Counts such replies of one upstream, and logs the first ones.
#[derive(Debug, Default)]
pub struct ReplyReports {
    n_unknown_ends: AtomicU64,
    left_out: Mutex<Vec<LeftOut>>,
}

impl ReplyReports {
    /// Replies that ended by an unknown word, so far.
    pub fn n_unknown_ends(&self) -> u64 {
        self.n_unknown_ends.load(Ordering::Relaxed)
    }

    /// Notes a reply that ended by an unknown word.
    pub(super) fn unknown_end(&self, upstream: &str, word: &str) {
        match self.n_unknown_ends.fetch_add(1, Ordering::Relaxed) {
            0 => {
                tracing::warn!(upstream, word, "an upstream ended a reply for an unknown reason; clients get `length`")
            }
            _ => tracing::debug!(upstream, word, "an upstream ended a reply for an unknown reason"),
        }
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
