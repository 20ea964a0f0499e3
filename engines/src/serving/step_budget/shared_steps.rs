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

/// Rows from which a step is of the next size: 64 fill a tile of llama.cpp's attention on a CPU (`GGML_FA_TILE_Q`).
const SIZES: [usize; 8] = [0, 64, 128, 256, 512, 1_024, 2_048, 4_096];

/// Rows of the first step: few enough for a slow CPU, and enough to measure a rate.
const UNMEASURED: usize = 64;

/// Weight of the newest measurement, for each step since the one before it.
const RATE_WEIGHT: f64 = 0.2;

/// The steps after which another size is tried, and after how many if none of these trials was better.
const TRIAL_EVERY: [u64; 2] = [16, 256];

/// The longest step that is tried, or made first, by the estimate.
const LONGEST_TRIAL: Duration = Duration::from_millis(500);

/// The sizes of a context's steps with streams, and their measured rates.
#[derive(Debug)]
pub(crate) struct SharedSteps {
    sizes: Vec<MeasuredSize>,
    n_ubatch: usize,
    n_steps: u64,
    /// The index of the size that was best before the last step. A change lets others be tried soon.
    last_best: usize,
    trial_at: u64,
    trial_after: u64,
}

#[derive(Debug, Clone, Copy)]
struct MeasuredSize {
    /// The fewest rows.
    rows: usize,
    /// Rows per second, of prompts and streams; 0 if it was not measured.
    rate: f64,
    /// The step that measured it last.
    measured_at: u64,
    /// The step that measured it last, or after which it was chosen to be tried.
    tried_at: u64,
}

impl SharedSteps {
    /// Sizes up to a physical batch.
    pub(crate) fn new(n_ubatch: usize) -> Self {
        let of = |rows| MeasuredSize { rows, rate: 0.0, measured_at: 0, tried_at: 0 };
        let sizes = SIZES.into_iter().filter(|rows| *rows < n_ubatch).map(of).collect();
        let [trial_after, _] = TRIAL_EVERY;
        SharedSteps { sizes, n_ubatch, n_steps: 0, last_best: 0, trial_at: trial_after, trial_after }
    }

    /// Prompt tokens per second beside `n_streams`. `None`: nothing is measured.
    pub(crate) fn tps(&self, n_streams: usize) -> Option<f64> {
        let size = self.sizes[self.best(n_streams)?];
        let rows = self.rows(&size, n_streams);
        Some(size.rate * (rows - n_streams) as f64 / rows as f64)
    }

    /// Prompt tokens of a step of the best size, with a row of each of `n_streams` besides. `alone_tps`: the rate of prompts without
    /// streams, 0 if it is unknown.
    pub(crate) fn tokens(&self, n_streams: usize, alone_tps: f64) -> usize {
        let rows = match self.best(n_streams) {
            Some(best) => self.affordable(best, n_streams),
            None if alone_tps <= 0.0 => UNMEASURED.min(self.n_ubatch),
            None if UNMEASURED as f64 / alone_tps > LONGEST_TRIAL.as_secs_f64() => MIN_TOKENS,
            None => self.tiles(alone_tps).max(UNMEASURED).min(self.n_ubatch),
        };
        self.prompt_tokens(rows, n_streams)
    }

    /// The same for the next step, which may try another size.
    pub(crate) fn next_tokens(&mut self, n_streams: usize, alone_tps: f64) -> usize {
        let Some(best) = self.best(n_streams) else { return self.tokens(n_streams, alone_tps) };
        let [shortest, longest] = TRIAL_EVERY;
        if self.last_best != best {
            (self.last_best, self.trial_after, self.trial_at) = (best, shortest, self.n_steps + shortest);
        }
        let Some(tried) = self.trial(best, n_streams) else { return self.tokens(n_streams, alone_tps) };
        self.sizes[tried].tried_at = self.n_steps;
        self.trial_after = (2 * self.trial_after).min(longest);
        self.trial_at = self.n_steps + self.trial_after;
        self.prompt_tokens(self.rows(&self.sizes[tried], n_streams), n_streams)
    }

    /// Records a step with `n_tokens` of prompts, `n_rows` in all.
    pub(crate) fn learn(&mut self, n_tokens: usize, n_rows: usize, took: Duration) {
        if n_tokens < MIN_TOKENS {
            // This is the cost of launching and no rate.
            return;
        }
        self.n_steps += 1;
        let at = self.size_of(n_rows);
        let size = &mut self.sizes[at];
        let rate = n_rows as f64 / took.as_secs_f64().max(1e-6);
        // Old measurements say little: a longer context makes all steps longer.
        let age = i32::try_from(self.n_steps - size.measured_at).unwrap_or(i32::MAX);
        let weight = if size.rate > 0.0 { 1.0 - (1.0 - RATE_WEIGHT).powi(age) } else { 1.0 };
        size.rate += weight * (rate - size.rate);
        (size.measured_at, size.tried_at) = (self.n_steps, self.n_steps);
    }

    /// The index of the size of so many rows.
    fn size_of(&self, n_rows: usize) -> usize {
        self.sizes.iter().rposition(|size| size.rows <= n_rows).unwrap_or(0)
    }

    /// The sizes that a step beside so many streams can have.
    fn possible(&self, n_streams: usize) -> std::ops::Range<usize> {
        self.size_of(n_streams + MIN_TOKENS)..self.sizes.len()
    }

    /// The fewest rows of a step of this size.
    fn rows(&self, size: &MeasuredSize, n_streams: usize) -> usize {
        size.rows.max(n_streams + MIN_TOKENS)
    }

    fn prompt_tokens(&self, n_rows: usize, n_streams: usize) -> usize {
        n_rows.saturating_sub(n_streams).max(MIN_TOKENS).min(self.n_ubatch)
    }

    /// The index of the size with the highest score. `None`: nothing is measured.
    fn best(&self, n_streams: usize) -> Option<usize> {
        let score = |idx: &usize| {
            let size = self.sizes[*idx];
            let rows = self.rows(&size, n_streams) as f64;
            let seconds = rows / size.rate;
            (rows - n_streams as f64) / seconds / seconds.max(STEP_WITH_STREAMS.as_secs_f64())
        };
        let measured = self.possible(n_streams).filter(|idx| self.sizes[*idx].rate > 0.0);
        measured.max_by(|a, b| score(a).total_cmp(&score(b)))
    }

    /// As many rows as fill [`STEP_WITH_STREAMS`], but of this size, and no fewer than it has.
    fn affordable(&self, idx: usize, n_streams: usize) -> usize {
        let size = self.sizes[idx];
        // The next size's fewest, so that it is measured.
        let most = self.sizes.get(idx + 1).map_or(self.n_ubatch, |larger| larger.rows);
        let fewest = self.rows(&size, n_streams);
        self.tiles(size.rate).clamp(fewest, most.max(fewest))
    }

    /// Rows that such a rate computes within [`STEP_WITH_STREAMS`].
    fn tiles(&self, rate: f64) -> usize {
        let rows = (rate * STEP_WITH_STREAMS.as_secs_f64()) as usize;
        // Multiples of 16 keep the matrix kernels on full tiles.
        (rows / MIN_TOKENS * MIN_TOKENS).max(MIN_TOKENS)
    }

    /// The neighbour of the best size to try now, if one is: the one that was measured longest ago, if it is not too long. Only where
    /// the best takes more than [`STEP_WITH_STREAMS`]: else it grows by itself.
    fn trial(&self, best: usize, n_streams: usize) -> Option<usize> {
        let seconds = |idx: usize| {
            let size = self.sizes[idx];
            let rate = if size.rate > 0.0 { size.rate } else { self.sizes[best].rate };
            self.rows(&size, n_streams) as f64 / rate
        };
        if seconds(best) <= STEP_WITH_STREAMS.as_secs_f64() {
            return None;
        }
        let is_short = |idx: &usize| seconds(*idx) <= LONGEST_TRIAL.as_secs_f64();
        let possible = self.possible(n_streams);
        let below = best.checked_sub(1).filter(|idx| possible.contains(idx));
        let above = Some(best + 1).filter(|idx| possible.contains(idx)).filter(is_short);
        let tried = [below, above].into_iter().flatten().min_by_key(|idx| self.sizes[*idx].tried_at)?;
        (self.n_steps >= self.trial_at || self.sizes[tried].tried_at == 0).then_some(tried)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs steps beside `n_streams` on a machine where so many rows take so many seconds. Returns the rows of each.
    fn run(shared: &mut SharedSteps, n_steps: usize, n_streams: usize, seconds: impl Fn(usize) -> f64) -> Vec<usize> {
        let mut all = Vec::new();
        for _ in 0..n_steps {
            let n_tokens = shared.next_tokens(n_streams, 0.0);
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
        let gpu = |rows: usize| 0.025 + rows as f64 / 4_000.0;
        for n_streams in [1, 4, 32, 48, 100] {
            let mut shared = SharedSteps::new(512);
            let all = run(&mut shared, 200, n_streams, gpu);
            let longest = all.iter().map(|rows| gpu(*rows)).fold(0.0, f64::max);
            assert!(longest <= 0.130, "{n_streams}: {longest}");
            // 100 ms compute 300 rows.
            assert!(count(&all[20..], |rows| (240..=304).contains(&rows)) >= 175, "{n_streams}: {all:?}");
        }
        assert_eq!(run(&mut SharedSteps::new(512), 50, 1, |_| 0.001)[49], 512, "no more than a batch");
    }

    #[test]
    fn before_a_measurement_a_step_follows_from_the_rate_without_streams() {
        let shared = SharedSteps::new(512);
        assert_eq!([0.0, 12.0, 250.0, 1_000.0, 1e6].map(|tps| shared.tokens(1, tps)), [63, 16, 63, 95, 511]);
        assert_eq!([8, 32].map(|n_ubatch| SharedSteps::new(n_ubatch).tokens(1, 0.0)), [8, 31]);
        assert_eq!(shared.tokens(100, 0.0), 16);
        assert_eq!(shared.tps(1), None);
    }

    #[test]
    fn a_slow_cpu_keeps_the_shortest_steps() {
        // A model of 7B: matrix products take nearly all of the time.
        let slow = |rows: usize| 0.1 + rows as f64 / 12.0;
        let all = run(&mut SharedSteps::new(512), 300, 1, slow);
        assert_eq!((all[0], count(&all[1..], |rows| rows != 17)), (64, 0), "{all:?}");
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
        assert!((6..=12).contains(&count(&all[1_000..], |rows| rows != usual)), "{usual}");
    }

    #[test]
    fn a_size_that_prompts_never_reach_does_not_keep_others_from_being_tried() {
        let mut shared = SharedSteps::new(512);
        let mut all = Vec::new();
        for _ in 0..300 {
            // Prompts of a handoff come in chunks of at most 100 tokens.
            let n_tokens = shared.next_tokens(1, 0.0).min(100);
            shared.learn(n_tokens, n_tokens + 1, Duration::from_secs_f64(small_on_cpu(4_000)(n_tokens + 1)));
            all.push(n_tokens + 1);
        }
        assert!(count(&all[10..], |rows| rows < 64) >= 1, "{all:?}");
    }

    #[test]
    fn a_step_with_hardly_any_prompt_says_nothing() {
        let mut shared = SharedSteps::new(512);
        shared.learn(MIN_TOKENS - 1, 64, Duration::from_millis(1));
        assert_eq!(shared.tps(1), None);
        shared.learn(48, 64, Duration::from_millis(200));
        assert_eq!(shared.tps(16), Some(240.0));
    }
}
