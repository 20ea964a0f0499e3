//! A draft node beside a simulated machine: what its candidates bring, and when they come. Its time and its link's are modelled, the
//! choice of lengths is the engine's.

use super::MAX_DRAFT;
use super::chances::{Chances, DraftPlace};
use super::costs::{ChosenPlan, DraftOffer, DraftPlan, DraftedStep, MAX_EXTRA, StepCosts};
use super::drafter::Confidence;
use super::simulated::{ChosenCost, NOISE, Numbers, TOKENS, second_reply};

/// Streams of a machine that all have the same draft node.
#[derive(Clone, Copy)]
pub struct SimulatedNode<'m> {
    /// The seconds of a step with so many rows, of all streams.
    pub step_seconds: &'m dyn Fn(usize) -> f64,
    /// The seconds of a prompt's row, as prefill shows them.
    pub row_seconds: f64,
    pub n_streams: usize,
    /// The longest draft.
    pub longest: usize,
    /// The probability that a candidate is right if all before it are.
    pub chance: f64,
    /// Seconds from a token to the pass that answers it.
    pub round_trip: f64,
    /// Seconds of a pass, which guesses a token for each stream.
    pub interval: f64,
}

/// A stream's chain of candidates.
#[derive(Clone)]
struct NodeStream {
    chances: Chances,
    /// Candidates that are there.
    n_ready: usize,
    /// When the next pass begins.
    next_pass: f64,
    /// Candidates of the chain that were right.
    n_right: usize,
    /// The steps that drafts have saved it.
    saved: f64,
}

impl NodeStream {
    /// Takes what has come until `now`. A draft node stops when it is far ahead.
    fn advance(&mut self, now: f64, interval: f64) {
        let n_passes = ((now - self.next_pass) / interval).max(0.0) as usize;
        self.n_ready = (self.n_ready + n_passes).min(MAX_DRAFT);
        self.next_pass = if self.n_ready == MAX_DRAFT { now } else { self.next_pass + n_passes as f64 * interval };
    }

    fn place(&self) -> DraftPlace {
        DraftPlace::First(Confidence::of_chain(self.n_right))
    }
}

impl SimulatedNode<'_> {
    /// The cost with chosen lengths, after another reply of as many tokens.
    pub fn chosen(&self, seed: u64) -> ChosenCost {
        second_reply(seed, |numbers, costs, all| self.replies(numbers, costs, all))
    }

    /// A reply in each stream.
    fn replies(&self, numbers: &mut Numbers, costs: &mut StepCosts, all: &mut Chances) -> ChosenCost {
        let begun =
            NodeStream { chances: Chances::default(), n_ready: 0, next_pass: self.round_trip, n_right: 0, saved: 0.0 };
        let mut streams = vec![begun; self.n_streams];
        let (mut now, mut n_tokens, mut n_drafted, mut n_steps) = (0.0, 0, 0, 0);
        while n_tokens < TOKENS * self.n_streams {
            let began = now;
            let lengths = self.lengths(&mut streams, &mut now, costs, all);
            let n_extra: usize = lengths.iter().sum();
            let took = (self.step_seconds)(self.n_streams + n_extra);
            let drafting_seconds = now - began;
            let seconds = took * (1.0 - NOISE + 2.0 * NOISE * numbers.next());
            costs.learn(self.n_streams, n_extra, seconds, self.row_seconds);
            now += took;
            // Candidates that have come meanwhile are compared with the tokens that are drawn, too.
            streams.iter_mut().for_each(|stream| stream.advance(now, self.interval));
            let before = n_tokens;
            for (stream, n) in streams.iter_mut().zip(lengths) {
                let n_drawn = self.draw((stream, n), now, numbers, all);
                n_tokens += n_drawn;
                if n_extra > 0 {
                    costs.add_saved(&mut stream.saved, self.n_streams, n_drawn, seconds + drafting_seconds);
                }
            }
            let (n_streams, n_right) = (self.n_streams, n_tokens - before - self.n_streams);
            costs.settle(DraftedStep { n_streams, n_extra, n_right, seconds, drafting_seconds });
            n_drafted += n_extra;
            n_steps += self.n_streams;
        }
        ChosenCost {
            seconds: now * self.n_streams as f64 / n_tokens as f64,
            mean_length: n_drafted as f64 / n_steps as f64,
        }
    }

    /// The candidates that a step verifies, some of which it may have awaited.
    fn lengths(&self, streams: &mut [NodeStream], now: &mut f64, costs: &mut StepCosts, all: &Chances) -> Vec<usize> {
        streams.iter_mut().for_each(|stream| stream.advance(*now, self.interval));
        let offer = |stream: &NodeStream, n: usize, takes_passes: bool| DraftOffer {
            n: n.min(self.longest),
            first: stream.chances.of(all, stream.place()),
            later: stream.chances.of(all, DraftPlace::Later),
            takes_passes,
            saved: stream.saved,
        };
        let free: Vec<DraftOffer> = streams.iter().map(|stream| offer(stream, stream.n_ready, false)).collect();
        let awaited: Vec<DraftOffer> = streams.iter().map(|stream| offer(stream, MAX_DRAFT, true)).collect();
        // The candidates that are there cost nothing.
        let delay = |stream: &NodeStream| stream.next_pass - *now - self.interval * stream.n_ready as f64;
        let delay_seconds = streams.iter().map(delay).fold(0.0, f64::max);
        let awaited = DraftPlan { offers: &awaited, delay_seconds, pass_seconds: self.interval };
        let plans = [DraftPlan::at_no_cost(&free), awaited];
        let ChosenPlan { plan, mut lengths } = costs.choose(&plans, MAX_EXTRA, self.row_seconds);
        if plan == 1 && lengths.iter().any(|n| *n > 0) {
            let ready_at = |(stream, n): (&NodeStream, &usize)| {
                stream.next_pass + self.interval * n.saturating_sub(stream.n_ready) as f64
            };
            let wanted = streams.iter().zip(&lengths).filter(|(stream, n)| **n > stream.n_ready).map(ready_at);
            let longest = lengths.iter().copied().max().unwrap_or(0);
            let expected = delay_seconds + self.interval * longest as f64;
            let most = (2.0 * expected).min(costs.step_seconds(self.n_streams));
            *now = wanted.fold(*now, f64::max).min(*now + most);
            streams.iter_mut().for_each(|stream| stream.advance(*now, self.interval));
        }
        lengths.iter_mut().zip(streams).for_each(|(n, stream)| *n = (*n).min(stream.n_ready));
        lengths
    }

    /// Draws a stream's tokens of a step that verified `n` candidates and ended now. Returns how many they are.
    fn draw(&self, (stream, n): (&mut NodeStream, usize), now: f64, numbers: &mut Numbers, all: &mut Chances) -> usize {
        let mut n_drawn = 0;
        for idx in 0..=n {
            n_drawn += 1;
            // A token for which there is no candidate ends the chain, too.
            let is_right = idx < stream.n_ready && {
                let is_right = numbers.next() < self.chance;
                let place = if idx == 0 { stream.place() } else { DraftPlace::Later };
                stream.chances.note(all, place, is_right);
                is_right
            };
            if !is_right {
                (stream.n_ready, stream.n_right, stream.next_pass) = (0, 0, now + self.round_trip);
                return n_drawn;
            }
            stream.n_right += 1;
        }
        stream.n_ready -= n_drawn;
        n_drawn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(chance: f64, interval: f64, step_seconds: &dyn Fn(usize) -> f64) -> ChosenCost {
        let row_seconds = step_seconds(512) / 512.0;
        let node = SimulatedNode {
            step_seconds,
            row_seconds,
            n_streams: 1,
            longest: MAX_DRAFT,
            chance,
            round_trip: 0.000_3,
            interval,
        };
        node.chosen(3)
    }

    #[test]
    fn a_draft_node_gains_where_it_is_fast_and_right_and_costs_nothing_where_not() {
        let step_seconds = |n: usize| 0.02 + 0.000_7 * n as f64;
        let alone = step_seconds(1);
        let fast = node(0.8, 0.002, &step_seconds);
        assert!(alone / fast.seconds > 1.8, "{fast:?}");
        for (chance, interval) in [(0.0, 0.002), (0.8, 0.2), (0.3, 0.02)] {
            let found = node(chance, interval, &step_seconds);
            assert!(found.seconds <= 1.03 * alone, "{chance}, {interval}: {found:?}");
        }
    }
}
