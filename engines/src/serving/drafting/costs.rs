//! Chooses how long drafts are, from the measured cost of steps and the chances of drafts. Pure.
//!
//! A step that verifies drafts has more rows, and each row costs something: nearly nothing where the weights are read anyway,
//! a token's whole compute on a slow processor, more experts of a mixture. So nothing is assumed but what a prompt's rows
//! cost, and the rest is measured: for each number of decoding sequences, how much longer a step takes with so many rows more.

/// The most rows that drafts add to a step.
pub(crate) const MAX_EXTRA: usize = 64;

/// Above so many decoding sequences nothing is drafted: their rows keep the machine busy.
pub(crate) const MAX_STREAMS: usize = 16;

/// By how much more tokens a step must promise per second. Less is noise.
const LEAST_GAIN: f64 = 0.02;

/// By how much drafts of others may slow a sequence that gains nothing.
const MOST_LOSS: f64 = 0.05;

/// The weight of the newest step in the cost of steps without drafts.
const STEP_WEIGHT: f64 = 0.1;

/// The least weight of the newest step in the relative cost of one with drafts.
const RATIO_WEIGHT: f64 = 0.05;

/// What a row adds to a step while neither it nor a prompt was measured, in steps.
const UNKNOWN_ROW: f64 = 0.3;

/// After so many decisions another length is tried, if it would be better with rows at [`TRIAL_PRICE`] of theirs: measurements
/// that a busy machine spoiled would else last for ever. After each trial twice as many, up to the second number.
const TRIAL_EVERY: [u32; 2] = [64, 2_048];

const TRIAL_PRICE: f64 = 0.1;

/// A sequence in a step, and the draft that there is for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DraftOffer {
    /// Tokens of the draft; 0 if there is none.
    pub(crate) n: usize,
    /// The probability that its first token is right.
    pub(crate) first: f64,
    /// The probability that a later one is right if all before it are.
    pub(crate) later: f64,
}

impl DraftOffer {
    pub(crate) const NONE: DraftOffer = DraftOffer { n: 0, first: 0.0, later: 0.0 };
}

/// The relative cost of steps with a number of rows more.
#[derive(Debug, Clone, Copy, Default)]
struct RowCost {
    /// Times the cost of a step without drafts.
    ratio: f64,
    n_measured: u32,
}

/// The costs of steps with a number of decoding sequences.
#[derive(Debug, Clone)]
struct StreamCosts {
    /// Seconds of a step without drafts; 0 if none was measured.
    plain: f64,
    /// For 1, 2, … rows more.
    rows: [RowCost; MAX_EXTRA],
}

/// The measured costs of steps, and when a length was last tried.
#[derive(Debug, Clone)]
pub(crate) struct StepCosts {
    streams: Vec<StreamCosts>,
    n_decisions: u32,
    trial_at: u32,
    trial_after: u32,
}

impl Default for StepCosts {
    fn default() -> Self {
        let unknown = StreamCosts { plain: 0.0, rows: [RowCost::default(); MAX_EXTRA] };
        let [trial_after, _] = TRIAL_EVERY;
        StepCosts { streams: vec![unknown; MAX_STREAMS], n_decisions: 0, trial_at: trial_after, trial_after }
    }
}

impl StreamCosts {
    /// The relative cost of steps with 0 to `n_max` rows more.
    ///
    /// A prompt's row shows what one costs once the processor is busy and all experts are read. Beyond the measured numbers of
    /// rows each further one costs that at most, and between two of them no number costs more than on the line. Such
    /// estimates are too low rather than too high: a length that seems worth it is tried and measured. One that seems too
    /// dear would never be measured.
    fn ratios(&self, n_max: usize, row_seconds: f64) -> Vec<f64> {
        let row = if row_seconds > 0.0 { row_seconds / self.plain } else { UNKNOWN_ROW };
        let row = row.min(1.0);
        let mut ratios = vec![1.0];
        let is_measured = |n: &usize| self.rows[n - 1].n_measured > 0;
        for above in (1..=MAX_EXTRA).filter(is_measured) {
            let (below, low, high) = (ratios.len() - 1, ratios[ratios.len() - 1], self.rows[above - 1].ratio);
            let slope = (high - low) / (above - below) as f64;
            for n in below + 1..above {
                let at_most = low + slope * (n - below) as f64;
                ratios.push(at_most.min(low.max(high - row * (above - n) as f64)));
            }
            ratios.push(high);
        }
        let (last, known) = (ratios.len() - 1, ratios[ratios.len() - 1]);
        let mean = if last > 0 { (known - 1.0) / last as f64 } else { row };
        let slope = row.min((mean + row) / 2.0);
        ratios.extend((1..=MAX_EXTRA - last).map(|n| known + slope * n as f64));
        ratios.truncate(n_max + 1);
        ratios.iter_mut().for_each(|ratio| *ratio = ratio.max(1.0));
        ratios
    }

    fn learn(&mut self, n_extra: usize, seconds: f64, row_seconds: f64) {
        if self.plain <= 0.0 {
            self.plain = if n_extra == 0 { seconds } else { 0.0 };
            return;
        }
        let expected = self.ratios(n_extra, row_seconds)[n_extra];
        // One step that something else held up says little.
        let seen = (seconds / self.plain).clamp(expected / 2.0, expected * 2.0);
        let mut weight = 0.0;
        if n_extra > 0 {
            let row = &mut self.rows[n_extra - 1];
            weight = RATIO_WEIGHT.max(1.0 / f64::from(row.n_measured + 1));
            // A step costs no more than as many single ones.
            let bounded = seen.clamp(1.0, (1 + n_extra) as f64);
            row.ratio = if row.n_measured == 0 { bounded } else { row.ratio + weight * (bounded - row.ratio) };
            row.n_measured += 1;
        }
        // As a context grows, all steps become longer: the rest of the surprise is that.
        self.plain *= 1.0 + STEP_WEIGHT * (1.0 - weight) * (seen / expected - 1.0);
    }
}

impl StepCosts {
    /// Takes note of a step of `n_streams` decoding sequences whose drafts had `n_extra` tokens. `row_seconds` is what a
    /// prompt's row costs, 0 if that is unknown.
    pub(crate) fn learn(&mut self, n_streams: usize, n_extra: usize, seconds: f64, row_seconds: f64) {
        if n_extra <= MAX_EXTRA
            && let Some(costs) = n_streams.checked_sub(1).and_then(|idx| self.streams.get_mut(idx))
        {
            costs.learn(n_extra, seconds, row_seconds);
        }
    }

    /// How many tokens of each draft the next step verifies, `n_max` rows at most. `delay_seconds` is what drafting adds to a
    /// step. All are 0 until a step without drafts was measured.
    pub(crate) fn lengths(
        &mut self,
        offers: &[DraftOffer],
        n_max: usize,
        row_seconds: f64,
        delay_seconds: f64,
    ) -> Vec<usize> {
        let costs = offers.len().checked_sub(1).and_then(|idx| self.streams.get(idx)).filter(|costs| costs.plain > 0.0);
        let Some(costs) = costs else { return vec![0; offers.len()] };
        let n_max = n_max.min(MAX_EXTRA);
        let ratios = costs.ratios(n_max, row_seconds);
        let delay = delay_seconds / costs.plain;
        let best = best_lengths(offers, n_max, |n| ratios[n] + delay);
        self.n_decisions = self.n_decisions.wrapping_add(1);
        if offers.iter().all(|offer| offer.n == 0) || self.n_decisions < self.trial_at {
            return best;
        }
        let tried = best_lengths(offers, n_max, |n| 1.0 + (ratios[n] - 1.0) * TRIAL_PRICE + delay);
        let [shortest, longest] = TRIAL_EVERY;
        self.trial_after = if tried == best { shortest } else { (2 * self.trial_after).min(longest) };
        self.trial_at = self.n_decisions.saturating_add(self.trial_after);
        tried
    }
}

/// The lengths that promise the most tokens per second. `cost` is that of a step with so many rows more, in steps without
/// drafts. Rows go to the likeliest tokens first, whosever they are.
fn best_lengths(offers: &[DraftOffer], n_max: usize, cost: impl Fn(usize) -> f64) -> Vec<usize> {
    let mut lengths = vec![0; offers.len()];
    // The chance that a sequence's next row is right, with all before it; and its expected tokens.
    let mut next: Vec<f64> = offers.iter().map(|offer| if offer.n > 0 { offer.first } else { 0.0 }).collect();
    let mut expected = vec![1.0; offers.len()];
    let mut total = offers.len() as f64;
    let (mut order, mut n_best, mut best_rate) = (Vec::new(), 0, total * (1.0 + LEAST_GAIN));
    for n_extra in 1..=n_max {
        let likeliest = next.iter().copied().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
        let Some((idx, value)) = likeliest.filter(|(_, value)| *value > 0.0) else { break };
        order.push(idx);
        lengths[idx] += 1;
        expected[idx] += value;
        total += value;
        next[idx] = if lengths[idx] < offers[idx].n { value * offers[idx].later } else { 0.0 };
        let cost = cost(n_extra);
        let slowest = expected.iter().copied().fold(f64::INFINITY, f64::min) / cost;
        if total / cost > best_rate && slowest >= 1.0 - MOST_LOSS {
            (n_best, best_rate) = (n_extra, total / cost);
        }
    }
    order[n_best..].iter().for_each(|idx: &usize| lengths[*idx] -= 1);
    lengths
}

#[cfg(test)]
#[path = "cost_tests.rs"]
mod tests;
