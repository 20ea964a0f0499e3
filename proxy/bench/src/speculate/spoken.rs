//! A reply, and when its tokens came.

use std::time::Instant;

use baton_schemas::Token;
use baton_schemas::sequence::Timings;

/// A reply.
pub(super) struct Spoken {
    pub(super) tokens: Vec<Token>,
    /// Empty if that is not known.
    pub(super) arrived: Vec<Instant>,
    pub(super) timings: Timings,
}

impl Spoken {
    /// Tokens per second after the first one.
    pub(super) fn tps(&self) -> f64 {
        f64::from(self.timings.predicted_n.saturating_sub(1)) * 1e3 / self.timings.predicted_ms.max(1e-3)
    }

    pub(super) fn gaps_ms(&self) -> impl Iterator<Item = f64> + '_ {
        self.arrived.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3)
    }
}
