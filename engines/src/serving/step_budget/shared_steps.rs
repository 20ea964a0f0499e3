//! Chooses how many rows a step has that computes prompts while streams wait for it, from how long such steps took. Pure.
//!
//! A step's time is not proportional to its rows. A GPU computes 64 nearly as fast as 16. The attention of llama.cpp on a CPU
//! computes 64 rows together and fewer one by one: behind 2,000 tokens of SmolLM2, 16 rows took 0.38 s and 64 took 0.48 s. So
//! rates are kept by size, and the size is chosen that makes (prompt tokens per second) ÷ (seconds of a step) greatest, where
//! shorter steps count as [`STEP_WITH_STREAMS`]: a step is longer than that only if prompts gain more than streams lose.

use std::time::Duration;

/// The fewest prompt tokens of a step. With fewer, launching costs more than computing.
pub(crate) const MIN_TOKENS: usize = 16;

/// The longest step that costs streams nothing: with such gaps, text still seems to flow steadily.
const STEP_WITH_STREAMS: Duration = Duration::from_millis(100);

/// Rows of a step. 16 fill a tile of the matrix kernels, 64 one of llama.cpp's attention on a CPU (`GGML_FA_TILE_Q`).
const SIZES: [usize; 8] = [MIN_TOKENS, 64, 128, 256, 512, 1_024, 2_048, 4_096];

/// Rows of a step before anything is measured: few enough for a slow CPU, and enough to measure a rate.
const UNMEASURED: usize = 64;

/// Weight of the newest measurement, for each step since the one before it.
const RATE_WEIGHT: f64 = 0.2;

/// The steps after which another size is tried, and after how many if none of these trials was better.
const TRIAL_EVERY: [u64; 2] = [16, 256];

/// The longest step that is tried, as far as is known before.
const LONGEST_TRIAL: Duration = Duration::from_secs(1);

/// The sizes of a context's steps with streams, and their measured rates.
#[derive(Debug)]
pub(crate) struct SharedSteps {
    sizes: Vec<MeasuredSize>,
    /// The best size, as an index.
    best: usize,
    /// The next step's: the best, or one that is tried.
    next: usize,
    n_steps: u64,
    trial_at: u64,
    trial_after: u64,
}

#[derive(Debug, Clone, Copy)]
struct MeasuredSize {
    rows: usize,
    /// Prompt tokens per second, with the streams' share of the time; 0 if it was not measured.
    tps: f64,
    /// The step that measured it last.
    at_step: u64,
}

impl MeasuredSize {
    fn seconds(&self, tps: f64) -> f64 {
        self.rows as f64 / tps
    }

    /// What is to be made great.
    fn merit(&self) -> f64 {
        if self.tps > 0.0 { self.tps / self.seconds(self.tps).max(STEP_WITH_STREAMS.as_secs_f64()) } else { 0.0 }
    }
}

impl SharedSteps {
    /// Sizes up to a physical batch.
    pub(crate) fn new(n_ubatch: usize) -> Self {
        let of = |rows| MeasuredSize { rows, tps: 0.0, at_step: 0 };
        let sizes: Vec<MeasuredSize> =
            SIZES.into_iter().filter(|rows| *rows < n_ubatch).chain([n_ubatch]).map(of).collect();
        let first = sizes.iter().rposition(|size| size.rows <= UNMEASURED).unwrap_or(0);
        let [trial_after, _] = TRIAL_EVERY;
        SharedSteps { sizes, best: first, next: first, n_steps: 0, trial_at: trial_after, trial_after }
    }

    /// The rate of the best size in prompt tokens per second. `None`: nothing is measured.
    pub(crate) fn tps(&self) -> Option<f64> {
        Some(self.sizes[self.best].tps).filter(|tps| *tps > 0.0)
    }

    /// Prompt tokens of the next step, with a row of each of `n_streams` besides.
    pub(crate) fn tokens(&self, n_streams: usize) -> usize {
        let size = self.sizes[self.next];
        let longer = self.sizes.get(self.next + 1).map_or(size.rows, |size| size.rows);
        let affordable = (size.tps * STEP_WITH_STREAMS.as_secs_f64()) as usize / MIN_TOKENS * MIN_TOKENS;
        let rows = affordable.clamp(size.rows, longer);
        rows.saturating_sub(n_streams).max(MIN_TOKENS.min(rows))
    }

    /// Takes note of a step with `n_tokens` of prompts, `n_rows` in all, and chooses the next one's size.
    pub(crate) fn learn(&mut self, n_tokens: usize, n_rows: usize, took: Duration) {
        if n_tokens < MIN_TOKENS {
            // This is the cost of launching and no rate.
            return;
        }
        self.n_steps += 1;
        let at = self.sizes.iter().rposition(|size| size.rows <= n_rows).unwrap_or(0);
        let size = &mut self.sizes[at];
        let tps = n_tokens as f64 / took.as_secs_f64().max(1e-6);
        // What was measured long ago says little: a longer context makes all steps longer.
        let age = i32::try_from(self.n_steps - size.at_step).unwrap_or(i32::MAX);
        let weight = if size.tps > 0.0 { 1.0 - (1.0 - RATE_WEIGHT).powi(age) } else { 1.0 };
        (size.tps, size.at_step) = (size.tps + weight * (tps - size.tps), self.n_steps);
        let best = (0..self.sizes.len()).max_by(|a, b| self.sizes[*a].merit().total_cmp(&self.sizes[*b].merit()));
        let before = std::mem::replace(&mut self.best, best.unwrap_or(at));
        self.next = self.best;
        let [shortest, longest] = TRIAL_EVERY;
        if self.best != before {
            self.trial_after = shortest;
            self.trial_at = self.n_steps + shortest;
        } else if let Some(tried) = self.trial().filter(|_| self.n_steps >= self.trial_at || self.is_shorter_unknown())
        {
            self.next = tried;
            self.trial_after = (2 * self.trial_after).min(longest);
            self.trial_at = self.n_steps + self.trial_after;
        }
    }

    /// Returns true if a shorter step may be the better one, and none was ever made.
    fn is_shorter_unknown(&self) -> bool {
        self.best.checked_sub(1).is_some_and(|below| self.sizes[below].at_step == 0)
    }

    /// The neighbour of the best size that was measured longest ago, if it is not too long. `None`: the best is short enough, and
    /// grows by itself.
    fn trial(&self) -> Option<usize> {
        let best = self.sizes[self.best];
        if best.seconds(best.tps) <= STEP_WITH_STREAMS.as_secs_f64() {
            return None;
        }
        let is_short = |idx: &usize| {
            let size = self.sizes[*idx];
            let tps = if size.tps > 0.0 { size.tps } else { best.tps };
            size.seconds(tps) <= LONGEST_TRIAL.as_secs_f64()
        };
        let below = self.best.checked_sub(1);
        let above = Some(self.best + 1).filter(|idx| *idx < self.sizes.len()).filter(is_short);
        [below, above].into_iter().flatten().min_by_key(|idx| self.sizes[*idx].at_step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs steps beside `n_streams` on a machine where so many rows take so many seconds. Returns the rows of each.
    fn run(shared: &mut SharedSteps, n_steps: usize, n_streams: usize, seconds: impl Fn(usize) -> f64) -> Vec<usize> {
        let mut all = Vec::new();
        for _ in 0..n_steps {
            let n_tokens = shared.tokens(n_streams);
            let n_rows = n_tokens + n_streams;
            shared.learn(n_tokens, n_rows, Duration::from_secs_f64(seconds(n_rows)));
            all.push(n_rows);
        }
        all
    }

    fn count(all: &[usize], of: impl Fn(usize) -> bool) -> usize {
        all.iter().filter(|rows| of(**rows)).count()
    }

    /// SmolLM2 on two cores, as measured: attention computes rows one by one, or 64 together.
    fn small_on_cpu(n_before: usize) -> impl Fn(usize) -> f64 {
        move |rows| {
            let attended = if rows < 64 { rows as f64 * 16.0 } else { rows.next_multiple_of(64) as f64 * 4.0 };
            rows as f64 / 300.0 + 0.03 + attended * n_before as f64 * 6e-7
        }
    }

    #[test]
    fn steps_take_what_streams_do_not_notice_on_a_gpu() {
        let mut shared = SharedSteps::new(512);
        let gpu = |rows: usize| 0.010 + rows as f64 / 4_000.0;
        let all = run(&mut shared, 200, 4, gpu);
        assert_eq!(all[0], 64, "nothing is measured");
        let longest = all.iter().map(|rows| gpu(*rows)).fold(0.0, f64::max);
        assert!(longest <= 0.140, "{longest}: one step to see that it is too long");
        assert!(count(&all[20..], |rows| (256..=368).contains(&rows)) >= 175, "{all:?}");
        assert_eq!(run(&mut SharedSteps::new(512), 50, 1, |_| 0.001)[49], 512, "no more than a batch");
        assert_eq!(SharedSteps::new(8).tokens(1), 8);
        assert_eq!(SharedSteps::new(32).tokens(1), 31);
    }

    #[test]
    fn a_slow_cpu_keeps_the_shortest_steps() {
        let mut shared = SharedSteps::new(512);
        // A model of 7B: the rows' matrix products are all.
        let all = run(&mut shared, 300, 1, |rows| 0.1 + rows as f64 / 12.0);
        assert!(count(&all, |rows| rows > 17) <= 1, "{all:?}");
        assert_eq!(all[..2], [64, 17]);
    }

    #[test]
    fn a_cpu_computes_64_rows_where_fewer_take_as_long() {
        let mut shared = SharedSteps::new(512);
        let shallow = run(&mut shared, 100, 1, small_on_cpu(100));
        assert!(count(&shallow, |rows| rows <= 64) >= 85, "{shallow:?}");
        let deep = run(&mut shared, 100, 1, small_on_cpu(4_000));
        assert!(count(&deep[20..], |rows| rows < 64) <= 8, "{deep:?}");
        assert!(count(&deep[20..], |rows| rows.is_multiple_of(64)) >= 72, "{deep:?}");
        let again = run(&mut shared, 200, 1, small_on_cpu(100));
        assert!(count(&again[100..], |rows| rows <= 64) >= 85, "{again:?}");
    }

    #[test]
    fn trials_get_rare_while_nothing_changes() {
        let mut shared = SharedSteps::new(512);
        let all = run(&mut shared, 4_000, 1, small_on_cpu(2_000));
        let usual = all[3_999];
        assert!(count(&all[1_000..], |rows| rows != usual) <= 12, "{usual}");
        assert!(count(&all[1_000..], |rows| rows != usual) >= 6);
    }

    #[test]
    fn a_step_with_hardly_any_prompt_says_nothing() {
        let mut shared = SharedSteps::new(512);
        shared.learn(MIN_TOKENS - 1, 64, Duration::from_millis(1));
        assert_eq!(shared.tps(), None);
        shared.learn(48, 64, Duration::from_millis(200));
        assert_eq!(shared.tps(), Some(240.0));
    }
}
