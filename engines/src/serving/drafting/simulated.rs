//! Drafts on a simulated machine: what chosen lengths cost beside fixed ones. Tests hold the regret with it, and `baton-bench` prints
//! what published machines would gain.

use super::MAX_DRAFT;
use super::chances::{Chances, DraftPlace};
use super::costs::{ChosenPlan, DraftOffer, DraftPlan, DraftedStep, MAX_EXTRA, StepCosts};
use super::drafter::Confidence;

/// The longest draft of any machine.
pub const LONGEST_DRAFT: usize = MAX_DRAFT;

/// Streams whose drafts are right with a probability, on a machine with these costs.
#[derive(Clone, Copy)]
pub struct SimulatedDrafts<'m> {
    /// The seconds of a step with so many rows, of all streams.
    pub step_seconds: &'m dyn Fn(usize) -> f64,
    /// The seconds of a prompt's row, as prefill shows them.
    pub row_seconds: f64,
    pub n_streams: usize,
    /// The longest draft: [`LONGEST_DRAFT`], or the states that are kept for taking back.
    pub longest: usize,
    /// The probability that a token of a draft is right if all before it are.
    pub chance: f64,
    /// Seconds that drafting adds to a step.
    pub delay: f64,
    /// Seconds of a pass of a draft model; 0 without one.
    pub pass: f64,
}

/// What a stream cost with chosen lengths.
#[derive(Debug, Clone, Copy)]
pub struct ChosenCost {
    /// Seconds for each of its tokens.
    pub seconds: f64,
    /// Tokens of a draft, in the mean of all steps.
    pub mean_length: f64,
}

/// Tokens of a stream's reply.
pub(super) const TOKENS: usize = 768;

/// How much longer or shorter than its cost a step is measured.
pub(super) const NOISE: f64 = 0.05;

impl SimulatedDrafts<'_> {
    /// Seconds for each token of a stream, if each draft has `n` tokens.
    pub fn fixed(&self, n: usize) -> f64 {
        let delay = if n > 0 { self.delay } else { 0.0 } + self.pass * n as f64;
        let expected: f64 = (0..=n).map(|i| self.chance.powi(i as i32)).sum();
        ((self.step_seconds)(self.n_streams * (1 + n)) + delay) / expected
    }

    /// The best length for all drafts, and the seconds for each token with it.
    pub fn best_fixed(&self) -> (usize, f64) {
        let longest = self.longest.min(MAX_EXTRA / self.n_streams.max(1));
        let of_all = (0..=longest).map(|n| (n, self.fixed(n)));
        of_all.min_by(|(_, a), (_, b)| a.total_cmp(b)).unwrap_or((0, f64::INFINITY))
    }

    /// The cost with chosen lengths, after another reply of as many tokens: what steps cost and what drafts of all sequences are
    /// worth is known then.
    pub fn chosen(&self, seed: u64) -> ChosenCost {
        second_reply(seed, |numbers, costs, all| self.replies(numbers, costs, all))
    }

    /// A reply in each stream.
    fn replies(&self, numbers: &mut Numbers, costs: &mut StepCosts, all: &mut Chances) -> ChosenCost {
        // Each stream's own chances, and whether its draft was right so far.
        let mut streams = vec![(Chances::default(), false); self.n_streams];
        let (mut seconds, mut n_tokens, mut n_drafted, mut n_steps) = (0.0, 0, 0, 0);
        while n_tokens < TOKENS * self.n_streams {
            let lengths = self.lengths(&streams, costs, all);
            let n_extra: usize = lengths.iter().sum();
            let took = (self.step_seconds)(self.n_streams + n_extra);
            let noise = 1.0 - NOISE + 2.0 * NOISE * numbers.next();
            costs.learn(self.n_streams, n_extra, took * noise, self.row_seconds);
            let longest = lengths.iter().copied().max().unwrap_or(0);
            let drafting_seconds = if n_extra > 0 { self.delay } else { 0.0 } + self.pass * longest as f64;
            seconds += took + drafting_seconds;
            n_drafted += n_extra;
            n_steps += self.n_streams;
            let before = n_tokens;
            for (stream, n) in streams.iter_mut().zip(lengths) {
                n_tokens += self.draw(stream, n, numbers, all);
            }
            let n_right = n_tokens - before - self.n_streams;
            let (n_streams, seconds) = (self.n_streams, took * noise);
            costs.settle(DraftedStep { n_streams, n_extra, n_right, seconds, drafting_seconds });
        }
        ChosenCost {
            seconds: seconds * self.n_streams as f64 / n_tokens as f64,
            mean_length: n_drafted as f64 / n_steps as f64,
        }
    }

    fn lengths(&self, streams: &[(Chances, bool)], costs: &mut StepCosts, all: &Chances) -> Vec<usize> {
        let offer = |(chances, goes_on): &(Chances, bool)| DraftOffer {
            n: self.longest,
            first: chances.of(all, place(*goes_on)),
            later: chances.of(all, DraftPlace::Later),
            takes_passes: self.pass > 0.0,
        };
        let offers: Vec<DraftOffer> = streams.iter().map(offer).collect();
        let plan = DraftPlan { offers: &offers, delay_seconds: self.delay, pass_seconds: self.pass };
        let ChosenPlan { lengths, .. } = costs.choose(&[plan], MAX_EXTRA, self.row_seconds);
        lengths
    }

    /// Draws a stream's tokens of a step that verified `n` of its draft. Returns how many they are.
    fn draw(
        &self,
        (chances, goes_on): &mut (Chances, bool),
        n: usize,
        numbers: &mut Numbers,
        all: &mut Chances,
    ) -> usize {
        let mut n_drawn = 1;
        for idx in 0..=n {
            // What was not asked of a draft model is not known. Of other drafts the token after the last right one is compared, too.
            if idx == n && self.pass > 0.0 {
                *goes_on = false;
                break;
            }
            let is_right = numbers.next() < self.chance;
            chances.note(all, place(*goes_on), is_right);
            *goes_on = is_right;
            n_drawn += usize::from(is_right && idx < n);
            if !is_right {
                break;
            }
        }
        n_drawn
    }
}

/// The cost of the second of two replies.
pub(super) fn second_reply(
    seed: u64,
    reply: impl Fn(&mut Numbers, &mut StepCosts, &mut Chances) -> ChosenCost,
) -> ChosenCost {
    let mut numbers = Numbers(seed);
    let (mut costs, mut all) = (StepCosts::default(), Chances::default());
    reply(&mut numbers, &mut costs, &mut all);
    reply(&mut numbers, &mut costs, &mut all)
}

fn place(goes_on: bool) -> DraftPlace {
    if goes_on { DraftPlace::Later } else { DraftPlace::First(Confidence::Medium) }
}

/// Numbers in 0..1, the same ones for each seed.
pub(super) struct Numbers(pub(super) u64);

impl Numbers {
    pub(super) fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) as f64 / u64::MAX as f64
    }
}
