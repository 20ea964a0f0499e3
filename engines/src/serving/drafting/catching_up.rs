//! How much of its time an engine spends to compute in the draft model what sequences have and that lacks. Pure.
//!
//! Catching up brings something only later, and perhaps nothing: a reply may end before a token of it was guessed. So it is paid
//! from savings: a share of each step's time, prefill's, too. A batch is computed once the savings suffice for it. What it really took
//! is taken from them, and may leave a debt, which later steps pay first. So all batches together take at most the share of all
//! steps' time, and one batch, whatever rows cost.

/// The fewest rows that are computed at a time: one row costs nearly as much.
pub(super) const LEAST_ROWS: usize = 32;

/// The share of the steps' time that is saved.
const SHARE: f64 = 0.05;

/// The most seconds that are saved, unless the smallest batch takes longer: in an hour without drafts nobody saves minutes.
const MOST_SAVED: f64 = 1.0;

/// The weight of the newest measurement.
const WEIGHT: f64 = 0.1;

/// The savings, and what a row costs.
#[derive(Debug, Clone)]
pub(super) struct CatchingUp {
    share: f64,
    /// Seconds; negative after a batch that took longer than expected.
    saved: f64,
    /// Seconds of the last step.
    step_seconds: f64,
    /// Seconds of a row where many are computed; 0 if not measured.
    row_seconds: f64,
}

impl Default for CatchingUp {
    fn default() -> Self {
        CatchingUp { share: SHARE, saved: 0.0, step_seconds: 0.0, row_seconds: 0.0 }
    }
}

impl CatchingUp {
    #[cfg(test)]
    pub(super) fn at_any_cost() -> Self {
        CatchingUp { share: 1e9, ..CatchingUp::default() }
    }

    /// Seconds that so many rows take longer than none, in a pass that is made anyway.
    pub(super) fn seconds(&self, n_rows: usize) -> f64 {
        self.row_seconds * n_rows as f64
    }

    /// A step took so many seconds.
    pub(super) fn earn(&mut self, step_seconds: f64) {
        let most = MOST_SAVED.max(self.seconds(2 * LEAST_ROWS));
        self.saved = (self.saved + self.share * step_seconds).min(most);
        self.step_seconds = step_seconds;
    }

    /// The most rows that may be computed now. They take no longer than the last step, so that streams pause no longer than for
    /// another one, unless the smallest batch does.
    pub(super) fn n_rows(&self) -> usize {
        if self.row_seconds <= 0.0 {
            return if self.saved > 0.0 { LEAST_ROWS } else { 0 };
        }
        let affordable = (self.saved / self.row_seconds) as usize;
        let unnoticed = (self.step_seconds / self.row_seconds) as usize;
        if affordable < LEAST_ROWS { 0 } else { affordable.min(unnoticed.max(LEAST_ROWS)) }
    }

    /// So many rows took so many seconds.
    pub(super) fn spend(&mut self, n_rows: usize, seconds: f64) {
        self.saved -= seconds;
        learn(&mut self.row_seconds, seconds / n_rows.max(1) as f64);
    }
}

/// Adds a measurement to what is known; 0 if nothing is.
pub(super) fn learn(known: &mut f64, new: f64) {
    *known = if *known > 0.0 { *known + WEIGHT * (new - *known) } else { new };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Seconds that steps and batches took, and the longest batch.
    #[derive(Debug, Default)]
    struct Spent {
        steps: f64,
        batches: f64,
        longest: f64,
    }

    /// Catches up after each of `n_steps` steps, on a machine where a batch takes `fixed` seconds and `row` for each row, and all
    /// times are up to twice as long by chance.
    fn spent(n_steps: usize, step: f64, [fixed, row]: [f64; 2], noise: &[f64]) -> Spent {
        let mut subject = CatchingUp::default();
        let mut spent = Spent::default();
        for n in 0..n_steps {
            let noise = 1.0 + noise[n % noise.len()];
            subject.earn(step * noise);
            spent.steps += step * noise;
            let n_rows = subject.n_rows().min(512);
            if n_rows > 0 {
                let took = (fixed + row * n_rows as f64) * noise;
                subject.spend(n_rows, took);
                spent.batches += took;
                spent.longest = spent.longest.max(took);
            }
        }
        spent
    }

    proptest! {
        #[test]
        fn catching_up_takes_its_share_of_all_time_whatever_it_costs(
            step in -9.0f64..1.0,
            costs in prop::array::uniform2(-14.0f64..2.0),
            noise in prop::collection::vec(0.0f64..1.0, 1..40),
            n_steps in 1usize..2_000,
        ) {
            let costs = costs.map(f64::exp);
            let Spent { steps, batches, longest } = spent(n_steps, step.exp(), costs, &noise);
            prop_assert!(batches <= SHARE * steps + longest + 1e-9, "{batches} of {steps} s, {longest} s in one");
            // What is affordable is used: nothing is saved for ever.
            let least = 2.0 * (costs[0] + LEAST_ROWS as f64 * costs[1]);
            let most_rows = 2.0 * (costs[0] + 512.0 * costs[1]);
            let is_worth = SHARE * steps > 8.0 * (least + MOST_SAVED);
            prop_assert!(!is_worth || batches >= (SHARE * steps / 4.0).min(most_rows), "only {batches} of {steps} s");
        }
    }

    #[test]
    fn a_prompts_prefill_pays_for_a_small_models_own() {
        let mut subject = CatchingUp::default();
        subject.earn(2.0);
        assert_eq!(subject.n_rows(), LEAST_ROWS, "nothing is known yet");
        subject.spend(LEAST_ROWS, 32e-4);
        assert_eq!(subject.n_rows(), 968);
        // A step of a token is not followed by a pause of a second.
        subject.earn(0.02);
        assert_eq!(subject.n_rows(), 200);
        subject.spend(200, 0.2);
        assert_eq!(subject.n_rows(), 0, "in debt");
    }
}
