//! The gaps between the tokens of all choices: noted by each choice's clock, read by the metrics and the history.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::metrics::histogram::Histogram;

use crate::latency_buckets::{LatencyBuckets, Percentiles};

/// Tokens of all models since the last look.
#[derive(Debug, Default)]
pub struct RecentTokens {
    n_tokens: AtomicU64,
    gaps: LatencyBuckets,
}

impl RecentTokens {
    /// The number of tokens since the last call, and the gaps between them, if there were any.
    pub fn drain(&self) -> (u64, Option<Percentiles>) {
        (self.n_tokens.swap(0, Ordering::Relaxed), self.gaps.drain())
    }
}

/// Where a choice notes its tokens.
#[derive(Debug, Clone)]
pub struct TokenGaps {
    /// The gaps of the choice's model since the start, seconds.
    pub histogram: Histogram,
    /// The tokens of all models.
    pub recent: Arc<RecentTokens>,
}

impl TokenGaps {
    /// Notes a token that came `gap` after the one before it, if there was one.
    pub fn token(&self, gap: Option<Duration>) {
        self.recent.n_tokens.fetch_add(1, Ordering::Relaxed);
        if let Some(gap) = gap.map(|gap| gap.as_secs_f64()) {
            self.histogram.observe(gap);
            self.recent.gaps.observe(gap * 1e3);
        }
    }

    /// Gaps that nobody reads.
    #[cfg(test)]
    pub(crate) fn unread() -> TokenGaps {
        TokenGaps { histogram: Histogram::new(std::iter::empty()), recent: Arc::default() }
    }
}
