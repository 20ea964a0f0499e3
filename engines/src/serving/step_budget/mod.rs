//! Chooses how many prompt tokens one step computes.
//!
//! A step is one `llama_decode`, and every running stream waits for it. So while streams are running, a step's prefill
//! is limited by time ([`SharedSteps`]). A fixed batch takes 10 ms on one machine and 8 s on another. Without streams a step has
//! a size that follows from the prompt: the batches, and with them llama.cpp's rounding, then do not depend on the machine's speed.

mod shared_steps;

pub(crate) use self::shared_steps::{MIN_TOKENS, SharedSteps};

/// The limits on prompt tokens in a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefillBudget {
    /// The operator's limit for steps with running streams. `None`: it follows from what was measured.
    pub(crate) fixed: Option<usize>,
    /// The engine's physical batch: no step is larger.
    pub(crate) n_ubatch: usize,
    /// A step without streams.
    pub(crate) alone: usize,
    /// The same behind [`DEEP`] tokens.
    pub(crate) deep: usize,
    /// The smallest chunk that a prompt is divided into for a handoff, except for what is left after it.
    pub(crate) last_chunk: usize,
}

/// Prompt tokens of a step without streams on a CPU. A step cannot be interrupted: on a slow CPU 512 tokens take seconds,
/// for which a new request would wait behind prompts whose clients have left. 64 tokens are a fifth slower, 256 hardly faster.
const STEP_OF_CPU: usize = 128;

/// The tokens behind which a small model's steps on a CPU are longer.
const DEEP: usize = 1_024;

/// Prompt tokens of such a step. There, attention takes most of the time, which llama.cpp divides into four parts for each thread and
/// computes in tiles of 64 rows of one head (`ggml_compute_forward_flash_attn_ext_tiled`). 128 rows of 9 heads on two threads are 24 tiles
/// instead of the 18 that they fill; 256 are 40 instead of 36. At 4,000 tokens of SmolLM2 that is a seventh of the whole time.
const DEEP_STEP_OF_CPU: usize = 256;

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
        PrefillBudget { fixed: fixed.map(|n| n as usize), n_ubatch, alone, deep: alone, last_chunk: LAST_CHUNK }
    }

    /// The same for a model of which longer steps on a CPU still end soon.
    pub(crate) fn of_small_model(self) -> Self {
        PrefillBudget { deep: DEEP_STEP_OF_CPU.min(self.n_ubatch).max(self.alone), ..self }
    }

    /// The limits of a step behind `n_before` tokens.
    pub(crate) fn behind(self, n_before: usize) -> Self {
        PrefillBudget { alone: if n_before >= DEEP { self.deep } else { self.alone }, ..self }
    }

    /// The same for devices that compute different layers at the same time: a step without streams has several batches.
    /// With k batches on n devices, a step takes (k + n − 1) / n times that of one batch, so few would leave the
    /// devices idle. The last chunks are larger, too: what they cost in transfer is less than what idle devices cost.
    pub(crate) fn of_pipeline(self) -> Self {
        let alone = STEP_OF_PIPELINE.max(self.n_ubatch.saturating_mul(PIPELINE_BATCHES));
        PrefillBudget { alone, deep: alone, last_chunk: alone / 2, ..self }
    }

    /// The most tokens of a step.
    pub(crate) fn max_tokens(&self) -> usize {
        self.alone.max(self.deep).max(self.n_ubatch)
    }

    /// Prompt tokens for a step that `n_streams` sequences wait for; `shared`: as many as these allow.
    pub(crate) fn tokens(&self, n_streams: usize, shared: impl FnOnce() -> usize) -> usize {
        match self.fixed {
            _ if n_streams == 0 => self.alone,
            Some(fixed) => fixed.min(self.n_ubatch),
            None => shared(),
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

    /// The limits of an engine on a GPU.
    fn on_gpu(n_ubatch: u32) -> PrefillBudget {
        PrefillBudget::new(n_ubatch, false, None)
    }

    #[test]
    fn a_step_is_bounded_by_the_operator_and_by_the_batch() {
        let tokens = |budget: PrefillBudget| [budget.tokens(0, || 62), budget.tokens(2, || 62)];
        assert_eq!([tokens(on_gpu(512)), tokens(on_gpu(8))], [[512, 62], [8, 62]]);
        let fixed = |n| tokens(PrefillBudget { fixed: Some(n), ..on_gpu(512) });
        assert_eq!([fixed(64), fixed(600)], [[512, 64], [512, 512]]);
    }

    #[test]
    fn a_step_on_a_cpu_is_small_unless_its_batch_is_configured() {
        let alone = |n_ubatch, small_steps| PrefillBudget::new(n_ubatch, small_steps, None).alone;
        assert_eq!([alone(512, true), alone(32, true), alone(512, false), alone(2_048, false)], [128, 32, 512, 2_048]);
    }

    #[test]
    fn a_small_models_steps_on_a_cpu_are_longer_behind_a_long_context() {
        let of = |n_ubatch, small_steps| {
            let budget = PrefillBudget::new(n_ubatch, small_steps, None).of_small_model();
            assert_eq!(budget.max_tokens(), n_ubatch as usize);
            [0, DEEP - 1, DEEP, 100_000].map(|n_before| budget.behind(n_before).alone)
        };
        assert_eq!(of(512, true), [128, 128, 256, 256]);
        assert_eq!([of(512, false), of(200, true), of(64, true)], [[512; 4], [128, 128, 200, 200], [64; 4]]);
        assert_eq!(PrefillBudget::new(512, true, None).behind(DEEP).alone, 128);
        let deep = PrefillBudget::new(512, true, None).of_small_model().behind(DEEP);
        assert_eq!([1_000, 400, 200, 100].map(|n_left| deep.taper(n_left, 1)), [256, 208, 112, 64]);
    }

    #[test]
    fn a_step_of_a_pipeline_has_several_batches_unless_streams_run() {
        let pipeline = PrefillBudget::new(256, false, None).of_pipeline();
        assert_eq!((pipeline.alone, pipeline.behind(DEEP).alone, pipeline.max_tokens()), (2_048, 2_048, 2_048));
        let mut shared = SharedSteps::new(pipeline.n_ubatch);
        for _ in 0..10 {
            let n_tokens = shared.next_tokens(1, 0.0);
            shared.learn(n_tokens, n_tokens + 1, std::time::Duration::from_millis(1));
        }
        assert_eq!(pipeline.tokens(1, || shared.tokens(1, 0.0)), 255, "with a stream no more than a batch");
        assert_eq!([8_000, 4_000, 2_000, 976].map(|n_left| pipeline.taper(n_left, 1)), [2_048, 2_000, 1_024, 976]);
        let large = PrefillBudget::new(1_024, false, None).of_pipeline();
        assert_eq!((large.alone, large.taper(4_000, 1)), (4_096, 2_048));
    }

    #[test]
    fn chunks_taper_toward_the_end_and_cover_the_prompt() {
        let budget = on_gpu(512);
        let mut n_left = 1999;
        let mut chunks = Vec::new();
        while n_left > 0 {
            chunks.push(budget.taper(n_left, 1));
            n_left -= chunks[chunks.len() - 1];
        }
        assert_eq!(chunks, [512, 512, 496, 240, 128, 64, 47]);
        assert_eq!([budget.taper(199, 1), budget.taper(199, 2), budget.taper(257, 2)], [112, 199, 128]);
        assert_eq!(on_gpu(32).taper(1000, 1), 32);
    }

    #[test]
    fn the_last_chunk_before_states_is_at_least_half_a_step() {
        let budget = on_gpu(512);
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
        let budget = on_gpu(512);
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
