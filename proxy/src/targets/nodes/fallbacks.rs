//! How often requests had to go another way than planned, and why.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

/// Counts by reason. Reasons are words of this program, so there are few of them.
#[derive(Debug, Default)]
pub struct Fallbacks(Mutex<BTreeMap<&'static str, Fallback>>);

/// One reason's count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fallback {
    /// Since the start.
    pub count: u64,
    /// The last time.
    pub last: SystemTime,
}

impl Fallbacks {
    /// A request fell back for this reason. Its client saw nothing of it.
    pub fn count(&self, reason: &'static str) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.entry(reason).or_insert(Fallback { count: 0, last: SystemTime::UNIX_EPOCH });
        *known = Fallback { count: known.count + 1, last: SystemTime::now() };
    }

    /// All reasons that occurred.
    pub fn view(&self) -> BTreeMap<&'static str, Fallback> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
