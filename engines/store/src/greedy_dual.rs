//! Which of many copies in memory is worth keeping: what each byte saves, and it ages.

/// The level from which worths count (GreedyDual-Size, Cao and Irani 1997). It rises to the worth of everything that is dropped,
/// so what was not used since is worth less than what was.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GreedyDual(f64);

impl GreedyDual {
    /// The worth of a copy that was used at this level, and saves `cost` with `n_bytes`.
    pub fn worth(self, cost: f64, n_bytes: usize) -> f64 {
        self.0 + cost / n_bytes.max(1) as f64
    }

    /// Notes that a copy of this worth was dropped.
    pub fn dropped(&mut self, worth: f64) {
        self.0 = self.0.max(worth);
    }
}
