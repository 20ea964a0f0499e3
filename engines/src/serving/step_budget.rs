//! Chooses how many prompt tokens one step computes.
//!
//! A step is one `llama_decode`, and every running stream waits for it. So while streams are running, a step's prefill
//! is limited by time, through the rate measured in such steps. A fixed batch takes 10 ms on one machine and 8 s on
//! another. Without streams a step has a fixed size: the batches, and with them llama.cpp's rounding, then depend on
//! the prompt alone and not on the machine's speed.

use std::time::Duration;

/// The longest step while streams are running: with such gaps, text still seems to flow steadily.
const STEP_WITH_STREAMS: Duration = Duration::from_millis(100);

/// Prompt tokens of a step before a rate is known: few enough for a slow CPU, and enough to measure a rate.
const UNMEASURED: usize = 64;

/// The fewest prompt tokens of a step. With fewer, launching costs more than computing.
pub(crate) const MIN_TOKENS: usize = 16;

/// The limits on prompt tokens in a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefillBudget {
    /// The operator's limit for steps with running streams. `None`: it follows from the measured rate.
    pub(crate) fixed: Option<usize>,
    /// The engine's physical batch: no step is larger.
    pub(crate) n_ubatch: usize,
    /// A step without streams.
    pub(crate) alone: usize,
    /// The smallest chunk that a prompt is divided into for a handoff, except for what is left after it.
    pub(crate) last_chunk: usize,
}

/// Prompt tokens of a step without streams on a CPU. A step cannot be interrupted: on a slow CPU 512 tokens take seconds,
/// for which a new request would wait behind prompts whose clients have left. 64 tokens are a fifth slower, 256 hardly faster.
const STEP_OF_CPU: usize = 128;

/// The smallest chunk of a handoff: smaller ones cost more compute than they save in transfer.
const LAST_CHUNK: usize = 64;

/// Prompt tokens of a step on a pipeline. Devices are idle at the beginning and at the end of each step; longer ones
/// would make cancelling slower.
const STEP_OF_PIPELINE: usize = 2_048;

/// The fewest batches of a step on a pipeline: on two devices 1.6 times the speed of one.
const PIPELINE_BATCHES: usize = 4;

impl PrefillBudget {
    /// The limits of an engine whose physical batch has `n_ubatch` tokens. `small_steps`: on a CPU, steps are smaller even
    /// without streams. `fixed` is the operator's limit for steps with streams.
    pub(crate) fn new(n_ubatch: u32, small_steps: bool, fixed: Option<u32>) -> Self {
        let n_ubatch = n_ubatch as usize;
        let alone = if small_steps { n_ubatch.min(STEP_OF_CPU) } else { n_ubatch };
        PrefillBudget { fixed: fixed.map(|n| n as usize), n_ubatch, alone, last_chunk: LAST_CHUNK }
    }

    /// The same for devices that compute different layers at the same time: a step without streams has several batches.
    /// With k batches on n devices, a step takes (k + n − 1) / n times that of one batch, so few would leave the
    /// devices idle. The last chunks are larger, too: what they cost in transfer is less than what idle devices cost.
    pub(crate) fn of_pipeline(self) -> Self {
        let alone = STEP_OF_PIPELINE.max(self.n_ubatch.saturating_mul(PIPELINE_BATCHES));
        PrefillBudget { alone, last_chunk: alone / 2, ..self }
    }

    /// The most tokens of a step.
    pub(crate) fn max_tokens(&self) -> usize {
        self.alone.max(self.n_ubatch)
    }

    /// Prompt tokens for a step with `n_streams` decoding sequences. `tps` is the rate in prompt tokens per second of
    /// such steps, 0 if it was not measured yet.
    pub(crate) fn tokens(&self, n_streams: usize, tps: f64) -> usize {
        match self.fixed {
            _ if n_streams == 0 => self.alone,
            Some(fixed) => fixed.min(self.n_ubatch),
            None if tps <= 0.0 => UNMEASURED.min(self.n_ubatch),
            None => {
                let affordable = (tps * STEP_WITH_STREAMS.as_secs_f64()) as usize;
                // Multiples of 16 keep the matrix kernels on full tiles.
                let tiles = affordable / MIN_TOKENS * MIN_TOKENS;
                tiles.clamp(MIN_TOKENS.min(self.n_ubatch), self.n_ubatch)
            }
        }
    }

    /// Tokens of the next chunk of a prompt with `n_left` tokens still to be computed, on an engine that takes part in
    /// handoffs. Chunks get smaller toward the end, because the decode node has to wait for export, transfer and import
    /// of the last one. If several prompts (`n_prompts`) are computed together, each further chunk also waits for the
    /// other prompts' chunks, which costs more. Then a rest that fits into an equal share of the step is one chunk.
    ///
    /// For a model with states: [`PrefillBudget::even`].
    pub(crate) fn taper(&self, n_left: usize, n_prompts: usize) -> usize {
        if n_prompts > 1 && n_left <= self.alone / n_prompts {
            return n_left;
        }
        let half = (n_left / 2).next_multiple_of(MIN_TOKENS);
        half.max(self.last_chunk).min(self.alone).min(n_left)
    }

    /// The fewest tokens of a long prompt's last chunk in [`PrefillBudget::even`].
    pub(crate) fn last_before_states(&self) -> usize {
        self.alone / 2
    }

    /// The same for a model with states. The states of the first layers are sent while the last layers of the last chunk are
    /// computed, and weigh as much as the rows of 100 to 3,000 tokens. So the last chunk is no shorter than half a step, as far
    /// as the prompt allows: on a GPU that computes 2,500 tokens per second, 256 tokens leave 100 ms, in which 10 Gb/s carry
    /// 120 MB. If the link's rate is known, the last chunk has `last` tokens, rounded up to a power of two: the states travel while it
    /// is computed, and its rows follow. Rates vary a little, and chunks that varied with them would round differently each time.
    /// States are streamed from one physical batch.
    pub(crate) fn even(&self, n_left: usize, last: Option<usize>) -> usize {
        if let Some(last) = last {
            let longest = self.alone.min(self.n_ubatch);
            let last = last.min(longest).next_power_of_two().clamp(self.last_chunk.min(longest), longest);
            let is_last = n_left < last + MIN_TOKENS && n_left <= longest;
            return if is_last { n_left } else { (n_left - last.min(n_left - 1)).min(self.alone) };
        }
        if n_left <= self.alone || n_left >= 2 * self.alone {
            return n_left.min(self.alone);
        }
        let half = n_left / 2 / MIN_TOKENS * MIN_TOKENS;
        half.max((n_left - self.alone).next_multiple_of(MIN_TOKENS)).min(self.alone)
    }
}

/// Divides a step's budget among the prefilling sequences, which still need `needs` tokens. Shares are equal; the part
/// that a short prompt does not need goes to longer ones, so a short prompt never waits for a long one.
pub(crate) fn share(budget: usize, needs: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by_key(|&i| needs[i]);
    let mut shares = vec![0; needs.len()];
    let mut left = budget;
    for (n_before, &i) in order.iter().enumerate() {
        let equal = left / (needs.len() - n_before);
        shares[i] = needs[i].min(equal.max(1)).min(left);
        left -= shares[i];
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_bounded_by_time_and_by_the_batch() {
        let auto = PrefillBudget { fixed: None, n_ubatch: 512, alone: 512, last_chunk: LAST_CHUNK };
        assert_eq!(auto.tokens(0, 0.0), 512);
        assert_eq!(auto.tokens(0, 250.0), 512);
        assert_eq!(auto.tokens(1, 0.0), 64);
        assert_eq!(auto.tokens(3, 250.0), 16);
        assert_eq!(auto.tokens(3, 1_000.0), 96);
        assert_eq!(auto.tokens(0, 1e6), 512);
        let fixed = PrefillBudget { fixed: Some(64), ..auto };
        assert_eq!(fixed.tokens(1, 1e6), 64);
        assert_eq!(fixed.tokens(0, 1e6), 512);
        assert_eq!(PrefillBudget { fixed: None, n_ubatch: 8, alone: 8, last_chunk: LAST_CHUNK }.tokens(1, 1.0), 8);
    }

    #[test]
    fn a_step_on_a_cpu_is_small_unless_its_batch_is_configured() {
        let check = |n_ubatch, small_steps, expected| {
            let budget = PrefillBudget::new(n_ubatch, small_steps, None);
            assert_eq!((budget.tokens(0, 250.0), budget.n_ubatch), (expected, n_ubatch as usize));
        };
        check(512, true, 128);
        check(32, true, 32);
        check(512, false, 512);
        check(2048, false, 2048);
        // With streams, a fast CPU may compute more than alone.
        let budget = PrefillBudget { fixed: None, n_ubatch: 512, alone: 64, last_chunk: LAST_CHUNK };
        assert_eq!((budget.tokens(1, 4_000.0), budget.taper(1_000, 1)), (400, 64));
    }

    #[test]
    fn a_step_of_a_pipeline_has_several_batches_unless_streams_run() {
        let pipeline = PrefillBudget::new(256, false, None).of_pipeline();
        assert_eq!((pipeline.tokens(0, 250.0), pipeline.tokens(1, 1e6), pipeline.max_tokens()), (2_048, 256, 2_048));
        assert_eq!([8_000, 4_000, 2_000, 976].map(|n_left| pipeline.taper(n_left, 1)), [2_048, 2_000, 1_024, 976]);
        let large = PrefillBudget::new(1_024, false, None).of_pipeline();
        assert_eq!((large.tokens(0, 250.0), large.taper(4_000, 1)), (4_096, 2_048));
    }

    #[test]
    fn chunks_taper_toward_the_end_and_cover_the_prompt() {
        let budget = PrefillBudget { fixed: None, n_ubatch: 512, alone: 512, last_chunk: LAST_CHUNK };
        let mut n_left = 1999;
        let mut chunks = Vec::new();
        while n_left > 0 {
            chunks.push(budget.taper(n_left, 1));
            n_left -= chunks[chunks.len() - 1];
        }
        assert_eq!(chunks, [512, 512, 496, 240, 128, 64, 47]);
        assert_eq!([budget.taper(199, 1), budget.taper(199, 2), budget.taper(257, 2)], [112, 199, 128]);
        assert_eq!(PrefillBudget { fixed: None, n_ubatch: 32, alone: 32, last_chunk: LAST_CHUNK }.taper(1000, 1), 32);
    }

    #[test]
    fn the_last_chunk_before_states_is_at_least_half_a_step() {
        let budget = PrefillBudget { fixed: None, n_ubatch: 512, alone: 512, last_chunk: LAST_CHUNK };
        for n_prompt in 513..3_000 {
            let (mut n_left, mut last) = (n_prompt, 0);
            while n_left > 0 {
                last = budget.even(n_left, None);
                n_left -= last;
            }
            assert!((256..=512).contains(&last), "{n_prompt}: {last}");
        }
        assert_eq!([1, 300, 512].map(|n| budget.even(n, None)), [1, 300, 512]);
    }

    #[test]
    fn the_last_chunk_before_states_is_as_long_as_the_link_needs_to_carry_them() {
        let chunks = |budget: PrefillBudget, mut n_left: usize, last| {
            let mut chunks = Vec::new();
            while n_left > 0 {
                chunks.push(budget.even(n_left, Some(last)));
                n_left -= chunks[chunks.len() - 1];
            }
            chunks
        };
        let budget = PrefillBudget { fixed: None, n_ubatch: 512, alone: 512, last_chunk: LAST_CHUNK };
        assert_eq!(chunks(budget, 2_000, 133), [512, 512, 512, 208, 256]);
        for varied in 130..=250 {
            assert_eq!(chunks(budget, 2_000, varied), chunks(budget, 2_000, 133));
        }
        assert_eq!(chunks(budget, 2_000, 1), [512, 512, 512, 400, 64], "a fast link");
        assert_eq!(chunks(budget, 2_000, 100_000), [512, 512, 464, 512], "a slow one: one batch");
        assert_eq!([chunks(budget, 144, 133), chunks(budget, 150, 133), chunks(budget, 1, 1)], [[144], [150], [1]]);
        for n_prompt in 1..3_000 {
            let all = chunks(budget, n_prompt, 133);
            assert_eq!(all.iter().sum::<usize>(), n_prompt);
            assert!(n_prompt < 256 || (256..272).contains(&all[all.len() - 1]), "{n_prompt}: {all:?}");
        }
        let pipeline = PrefillBudget::new(256, false, None).of_pipeline();
        assert_eq!(chunks(pipeline, 5_000, 133), [2_048, 2_048, 648, 256], "states are streamed from one batch");
        let cpu = PrefillBudget::new(512, true, None);
        assert_eq!(chunks(cpu, 300, 133), [128, 44, 128], "steps on a CPU stay short");
    }

    #[test]
    fn short_prompts_get_all_they_need_and_long_ones_share_the_rest() {
        let check = |budget, needs: &[usize], expected: &[usize]| assert_eq!(share(budget, needs), expected);
        check(100, &[8000, 20], &[80, 20]);
        check(100, &[8000, 8000], &[50, 50]);
        check(100, &[10, 10], &[10, 10]);
        check(2, &[5, 5, 5], &[1, 1, 0]);
        check(100, &[], &[]);
    }
}
