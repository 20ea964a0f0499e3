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

/// By how much drafts of others may slow a sequence that has gained nothing before.
const MOST_LOSS: f64 = 0.05;

/// The weight of the newest step in the cost of steps without drafts.
const STEP_WEIGHT: f64 = 0.1;

/// The least weight of the newest step in the relative cost of one with drafts.
const RATIO_WEIGHT: f64 = 0.05;

/// What a row adds to a step while neither it nor a prompt was measured, in steps.
const UNKNOWN_ROW: f64 = 0.3;

/// The share of all steps' time that drafts may lose. Estimates of a draft's worth are off by chance, and those that are too high are
/// followed. So what was lost is counted, and beyond this share drafts must promise more.
const LOSS_SHARE: f64 = 0.01;

/// The gain that they must promise for each step that they have lost.
const GAIN_FOR_LOSS: f64 = 0.02;

/// The most steps that count as gained, and as lost.
const MOST_STEPS_SAVED: f64 = 4.0;
const MOST_STEPS_LOST: f64 = 8.0;

/// After so many decisions another length is tried, if it would be better with rows at [`TRIAL_PRICE`] of theirs: measurements
/// that a busy machine spoiled would else last for ever. After each trial twice as many, up to the second number.
const TRIAL_EVERY: [u32; 2] = [64, 2_048];

const TRIAL_PRICE: f64 = 0.1;

/// The most that a trial may cost, in steps, as far as that is known, with its passes: a reply may be short. One row is tried at any price.
const MOST_FOR_TRIAL: f64 = 0.5;

/// A sequence in a step, and the draft that there is for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DraftOffer {
    /// Tokens of the draft; 0 if there is none.
    pub(crate) n: usize,
    /// The probability that its first token is right.
    pub(crate) first: f64,
    /// The probability that a later one is right if all before it are.
    pub(crate) later: f64,
    /// Each of its tokens takes a pass of the draft model, which all such sequences share. The others cost nothing.
    pub(crate) takes_passes: bool,
    /// The steps without drafts that drafts have saved the sequence.
    pub(crate) saved: f64,
}

impl DraftOffer {
    pub(crate) const NONE: DraftOffer = DraftOffer { n: 0, first: 0.0, later: 0.0, takes_passes: false, saved: 0.0 };
}

/// One way to draft for a step: an offer for each of its sequences, and what making the drafts adds to the step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftPlan<'o> {
    pub(crate) offers: &'o [DraftOffer],
    /// Seconds, if anything is drafted.
    pub(crate) delay_seconds: f64,
    /// Seconds of a pass of the draft model.
    pub(crate) pass_seconds: f64,
}

impl<'o> DraftPlan<'o> {
    /// Drafts that are there already.
    pub(crate) fn at_no_cost(offers: &'o [DraftOffer]) -> DraftPlan<'o> {
        DraftPlan { offers, delay_seconds: 0.0, pass_seconds: 0.0 }
    }
}

/// The plan that a step follows, and how many tokens of each draft it verifies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChosenPlan {
    /// Its index among the plans.
    pub(crate) plan: usize,
    pub(crate) lengths: Vec<usize>,
}

impl ChosenPlan {
    fn n_drafted(&self) -> usize {
        self.lengths.iter().sum()
    }
}

/// What a step costs, in steps without drafts: by its rows, by the time that drafting takes, and by the draft model's passes.
struct PlanCosts<'r> {
    ratios: &'r [f64],
    delay: f64,
    pass: f64,
}

/// The tokens and the time of a step of decoding sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DraftedStep {
    pub(crate) n_streams: usize,
    /// Tokens of drafts that were verified, and those of them that were right.
    pub(crate) n_extra: usize,
    pub(crate) n_right: usize,
    /// Seconds of the step.
    pub(crate) seconds: f64,
    /// Seconds in which drafts were made or awaited before it.
    pub(crate) drafting_seconds: f64,
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
    /// The steps without drafts that drafts have gained; negative: lost.
    saved: f64,
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
        let unknown = StreamCosts { plain: 0.0, rows: [RowCost::default(); MAX_EXTRA], saved: 1.0 };
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

    fn settle(&mut self, step: DraftedStep) {
        if self.plain <= 0.0 {
            return;
        }
        let DraftedStep { n_streams, n_extra, n_right, seconds, drafting_seconds } = step;
        let gained =
            if n_extra > 0 { (n_streams + n_right) as f64 / n_streams as f64 - seconds / self.plain } else { 0.0 };
        let saved = self.saved + LOSS_SHARE + gained - drafting_seconds / self.plain;
        self.saved = saved.clamp(-MOST_STEPS_LOST, MOST_STEPS_SAVED);
    }

    /// By how much more tokens a step must promise per second.
    fn least_gain(&self) -> f64 {
        LEAST_GAIN + GAIN_FOR_LOSS * (-self.saved).max(0.0)
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

    /// Takes note of what came of a step's drafts.
    pub(crate) fn settle(&mut self, step: DraftedStep) {
        if let Some(costs) = step.n_streams.checked_sub(1).and_then(|idx| self.streams.get_mut(idx)) {
            costs.settle(step);
        }
    }

    /// Adds what a step with drafts has saved one of `n_streams` sequences, which drew `n_drawn` tokens in so many seconds.
    pub(crate) fn add_saved(&self, saved: &mut f64, n_streams: usize, n_drawn: usize, seconds: f64) {
        if let Some(costs) = self.of_streams(n_streams) {
            *saved = (*saved + n_drawn as f64 - seconds / costs.plain).clamp(-MOST_STEPS_LOST, MOST_STEPS_SAVED);
        }
    }

    /// Seconds of a step of `n_streams` sequences without drafts; 0 if none was measured.
    pub(crate) fn step_seconds(&self, n_streams: usize) -> f64 {
        self.of_streams(n_streams).map_or(0.0, |costs| costs.plain)
    }

    fn of_streams(&self, n_streams: usize) -> Option<&StreamCosts> {
        n_streams.checked_sub(1).and_then(|idx| self.streams.get(idx)).filter(|costs| costs.plain > 0.0)
    }

    /// Returns true if a draft like this for each of `n_streams` sequences may be tried.
    pub(crate) fn may_pay(&self, offer: DraftOffer, n_streams: usize, row_seconds: f64, pass_seconds: f64) -> bool {
        let Some(costs) = self.of_streams(n_streams) else { return false };
        let offers = vec![offer; n_streams];
        let plan = DraftPlan { offers: &offers, delay_seconds: 0.0, pass_seconds };
        let ratios = costs.ratios_at(TRIAL_PRICE, MAX_EXTRA, row_seconds);
        let (_, rate) = best_lengths(&offers, &costs.of_plan(&plan, &ratios, TRIAL_PRICE), costs.least_gain());
        rate > n_streams as f64
    }

    /// Chooses the plan and the lengths that promise the most tokens per second, `n_max` rows at most. Plans are for the same
    /// sequences; of equal ones the first is chosen. All lengths are 0 until a step without drafts was measured.
    pub(crate) fn choose(&mut self, plans: &[DraftPlan<'_>], n_max: usize, row_seconds: f64) -> ChosenPlan {
        let n_streams = plans.first().map_or(0, |plan| plan.offers.len());
        let Some(costs) = self.of_streams(n_streams) else {
            return ChosenPlan { plan: 0, lengths: vec![0; n_streams] };
        };
        let n_max = n_max.min(MAX_EXTRA);
        let best = costs.best_plan(plans, n_max, row_seconds, 1.0);
        let is_time = self.n_decisions.wrapping_add(1) >= self.trial_at;
        let tried = is_time.then(|| {
            let pass_seconds = plans.iter().map(|plan| plan.pass_seconds).fold(0.0, f64::max);
            let n_affordable = costs.n_affordable(n_max, row_seconds, pass_seconds);
            costs.best_plan(plans, n_affordable, row_seconds, TRIAL_PRICE)
        });
        self.n_decisions = self.n_decisions.wrapping_add(1);
        let has_drafts = plans.iter().any(|plan| plan.offers.iter().any(|offer| offer.n > 0));
        // Later there may be something to try: a draft model has caught up, or a text repeats itself. Less than the best plan is no trial.
        let is_more = |tried: &ChosenPlan| tried.plan != best.plan || tried.n_drafted() > best.n_drafted();
        let Some(tried) = tried.filter(|tried| has_drafts && is_more(tried)) else { return best };
        let [_, longest] = TRIAL_EVERY;
        self.trial_after = (2 * self.trial_after).min(longest);
        self.trial_at = self.n_decisions.saturating_add(self.trial_after);
        tried
    }
}

impl StreamCosts {
    /// The same, if further rows cost this share of what they do.
    fn ratios_at(&self, price: f64, n_max: usize, row_seconds: f64) -> Vec<f64> {
        self.ratios(n_max, row_seconds).iter().map(|ratio| 1.0 + (ratio - 1.0) * price).collect()
    }

    /// The most rows, but at least one, that cost no more than a trial may, each with a pass.
    fn n_affordable(&self, n_max: usize, row_seconds: f64, pass_seconds: f64) -> usize {
        let ratios = self.ratios(n_max, row_seconds);
        let pass = pass_seconds / self.plain;
        let is_cheap = |(n, ratio): &(usize, &f64)| **ratio + pass * *n as f64 <= 1.0 + MOST_FOR_TRIAL;
        ratios.iter().enumerate().skip(1).take_while(is_cheap).count().max(1).min(n_max)
    }

    fn of_plan<'r>(&self, plan: &DraftPlan<'_>, ratios: &'r [f64], price: f64) -> PlanCosts<'r> {
        PlanCosts { ratios, delay: plan.delay_seconds / self.plain, pass: plan.pass_seconds * price / self.plain }
    }

    fn best_plan(&self, plans: &[DraftPlan<'_>], n_max: usize, row_seconds: f64, price: f64) -> ChosenPlan {
        let mut best = (ChosenPlan { plan: 0, lengths: Vec::new() }, f64::NEG_INFINITY);
        let ratios = self.ratios_at(price, n_max, row_seconds);
        for (idx, plan) in plans.iter().enumerate() {
            let (lengths, rate) = best_lengths(plan.offers, &self.of_plan(plan, &ratios, price), self.least_gain());
            if rate > best.1 {
                best = (ChosenPlan { plan: idx, lengths }, rate);
            }
        }
        best.0
    }
}

impl PlanCosts<'_> {
    /// The cost of a step with so many rows more, whose longest draft of the draft model has `n_passes` tokens.
    fn of(&self, n_extra: usize, n_passes: usize) -> f64 {
        self.ratios[n_extra] + self.delay + self.pass * n_passes as f64
    }
}

/// The lengths that promise the most tokens per second, and at least `least_gain` more than none, and these tokens, in the time of a
/// step without drafts. Rows go to the likeliest tokens first, whosever they are; those of the draft model are taken to be equally
/// likely, since each of its passes guesses for all. What it is not asked for is not compared, so a sequence with bad luck would else never be tried again.
fn best_lengths(offers: &[DraftOffer], costs: &PlanCosts<'_>, least_gain: f64) -> (Vec<usize>, f64) {
    let mut lengths = vec![0; offers.len()];
    // The chance that a sequence's next row is right, with all before it; and its expected tokens.
    let mut next: Vec<f64> = offers.iter().map(|offer| if offer.n > 0 { offer.first } else { 0.0 }).collect();
    let mut expected = vec![1.0; offers.len()];
    let mean = |of: fn(&DraftOffer) -> f64| {
        let guessed = || offers.iter().filter(|offer| offer.takes_passes && offer.n > 0);
        guessed().map(of).sum::<f64>() / guessed().count().max(1) as f64
    };
    let (mean_first, mean_later) = (mean(|offer| offer.first), mean(|offer| offer.later));
    let (mut total, mut n_passes) = (offers.len() as f64, 0);
    let (mut order, mut n_best, mut best_rate) = (Vec::new(), 0, total);
    for n_extra in 1..costs.ratios.len() {
        let rank = |idx: usize| match offers[idx].takes_passes && next[idx] > 0.0 {
            true => mean_first * mean_later.powi(lengths[idx] as i32),
            false => next[idx],
        };
        let Some(idx) = (0..offers.len()).max_by(|a, b| rank(*a).total_cmp(&rank(*b))) else { break };
        let value = next[idx];
        if value <= 0.0 {
            break;
        }
        order.push(idx);
        lengths[idx] += 1;
        expected[idx] += value;
        total += value;
        next[idx] = if lengths[idx] < offers[idx].n { value * offers[idx].later } else { 0.0 };
        if offers[idx].takes_passes {
            n_passes = n_passes.max(lengths[idx]);
        }
        let cost = costs.of(n_extra, n_passes);
        // Each sequence loses little, or no more than it has gained before: text changes, and seldom in all of them at once.
        let is_fair = |(offer, expected): (&DraftOffer, &f64)| cost - expected <= offer.saved.max(MOST_LOSS * cost);
        let least = if n_best == 0 { best_rate * (1.0 + least_gain) } else { best_rate };
        if total / cost > least && offers.iter().zip(&expected).all(is_fair) {
            (n_best, best_rate) = (n_extra, total / cost);
        }
    }
    order[n_best..].iter().for_each(|idx: &usize| lengths[*idx] -= 1);
    (lengths, best_rate)
}

#[cfg(test)]
#[path = "cost_tests.rs"]
mod tests;
