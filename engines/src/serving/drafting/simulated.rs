//! Drafts on a simulated machine: what chosen lengths cost beside fixed ones. Tests hold the regret with it, and `baton-bench` prints
//! what published machines would gain.

use super::MAX_DRAFT;
use super::chances::{Chances, DraftPlace};
use super::costs::{ChosenPlan, DraftOffer, DraftPlan, DraftedStep, MAX_EXTRA, StepCosts};
use super::drafter::Confidence;

/// The longest draft of any machine.
pub const LONGEST_DRAFT: usize = MAX_DRAFT;

/// The probability that a token of a draft is right if all before it are.
#[derive(Debug, Clone, Copy)]
pub enum Acceptance {
    Constant(f64),
    /// The first one for `n_early` tokens of a reply, then the second one.
    Step {
        early: f64,
        n_early: usize,
        late: f64,
    },
    /// Both in turn, each for `n_run` tokens.
    Bursts {
        odd: f64,
        even: f64,
        n_run: usize,
    },
    /// From the first one to the second one over a reply.
    Drift {
        from: f64,
        to: f64,
    },
}

impl Acceptance {
    /// The chance of the token at this place in a reply.
    fn at(self, place: usize) -> f64 {
        match self {
            Acceptance::Constant(chance) => chance,
            Acceptance::Step { early, n_early, late } => {
                if place < n_early {
                    early
                } else {
                    late
                }
            }
            Acceptance::Bursts { odd, even, n_run } => {
                if (place / n_run).is_multiple_of(2) {
                    odd
                } else {
                    even
                }
            }
            Acceptance::Drift { from, to } => from + (to - from) * (place as f64 / TOKENS as f64).min(1.0),
        }
    }
}

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
    pub chance: Acceptance,
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

/// A stream's own chances, whether its draft was right so far, its tokens, and the steps that drafts have saved it.
#[derive(Clone, Default)]
struct DraftedStream {
    chances: Chances,
    goes_on: bool,
    n_tokens: usize,
    saved: f64,
}

impl SimulatedDrafts<'_> {
    /// Seconds for each token of a stream, if each draft has `n` tokens.
    pub fn fixed(&self, n: usize) -> f64 {
        let delay = if n > 0 { self.delay } else { 0.0 } + self.pass * n as f64;
        let step_seconds = (self.step_seconds)(self.n_streams * (1 + n)) + delay;
        // The steps that are expected from each place on: the first one, and those from where it ends.
        let mut n_steps = vec![0.0; TOKENS + n + 1];
        for place in (0..TOKENS).rev() {
            let (mut reached, mut expected) = (1.0, 1.0);
            for n_right in 0..=n {
                let chance = if n_right < n { self.chance.at(place + n_right) } else { 0.0 };
                expected += reached * (1.0 - chance) * n_steps[place + n_right + 1];
                reached *= chance;
            }
            n_steps[place] = expected;
        }
        step_seconds * n_steps[0] / TOKENS as f64
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
        let mut streams = vec![DraftedStream::default(); self.n_streams];
        let (mut seconds, mut n_tokens, mut n_drafted, mut n_steps) = (0.0, 0, 0, 0);
        while n_tokens < TOKENS * self.n_streams {
            let lengths = self.lengths(&streams, costs, all);
            let n_extra: usize = lengths.iter().sum();
            let took = (self.step_seconds)(self.n_streams + n_extra);
            let measured = took * (1.0 - NOISE + 2.0 * NOISE * numbers.next());
            costs.learn(self.n_streams, n_extra, measured, self.row_seconds);
            let longest = lengths.iter().copied().max().unwrap_or(0);
            let drafting_seconds = if n_extra > 0 { self.delay } else { 0.0 } + self.pass * longest as f64;
            seconds += took + drafting_seconds;
            n_drafted += n_extra;
            n_steps += self.n_streams;
            let before = n_tokens;
            for (stream, n) in streams.iter_mut().zip(lengths) {
                let n_drawn = self.draw(stream, n, numbers, all);
                n_tokens += n_drawn;
                if n_extra > 0 {
                    costs.add_saved(&mut stream.saved, self.n_streams, n_drawn, measured + drafting_seconds);
                }
            }
            let n_right = n_tokens - before - self.n_streams;
            let n_streams = self.n_streams;
            costs.settle(DraftedStep { n_streams, n_extra, n_right, seconds: measured, drafting_seconds });
        }
        ChosenCost {
            seconds: seconds * self.n_streams as f64 / n_tokens as f64,
            mean_length: n_drafted as f64 / n_steps as f64,
        }
    }

    fn lengths(&self, streams: &[DraftedStream], costs: &mut StepCosts, all: &Chances) -> Vec<usize> {
        let offer = |DraftedStream { chances, goes_on, saved, .. }: &DraftedStream| DraftOffer {
            saved: *saved,
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
    fn draw(&self, stream: &mut DraftedStream, n: usize, numbers: &mut Numbers, all: &mut Chances) -> usize {
        let DraftedStream { chances, goes_on, n_tokens, .. } = stream;
        let mut n_drawn = 1;
        for idx in 0..=n {
            // What was not asked of a draft model is not known. Of other drafts the token after the last right one is compared, too.
            if idx == n && self.pass > 0.0 {
                *goes_on = false;
                break;
            }
            let is_right = numbers.next() < self.chance.at(*n_tokens + idx);
            chances.note(all, place(*goes_on), is_right);
            *goes_on = is_right;
            n_drawn += usize::from(is_right && idx < n);
            if !is_right {
                break;
            }
        }
        *n_tokens += n_drawn;
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
