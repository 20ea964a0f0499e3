//! Lengths of drafts on simulated machines, beside the best fixed length.

use proptest::prelude::*;

use super::super::simulated::SimulatedDrafts;
use super::*;

/// A machine: the seconds of a step by its rows.
#[derive(Debug, Clone, Copy)]
enum Machine {
    /// Weights are read once for all rows, which cost little until the processor is busy.
    BandwidthBound,
    /// Each row costs the same.
    ComputeBound,
    /// Further rows read further experts: 8 of 128 each.
    Mixture,
}

const MACHINES: [Machine; 3] = [Machine::BandwidthBound, Machine::ComputeBound, Machine::Mixture];

/// Seconds that drafting adds to a step, and those of a pass of a draft model: drafts for nothing, from another machine by a fast and
/// by a slow link, and of a model with a tenth of a bandwidth-bound machine's weights.
const DRAFTING: [(f64, f64); 4] = [(0.0, 0.0), (0.0001, 0.0), (0.005, 0.0), (0.0, 0.003)];

/// The most regret that 95 % of the cases may have.
const MOST_REGRET: f64 = 0.05;

impl Machine {
    fn seconds(self, n_rows: usize) -> f64 {
        let n = n_rows as f64;
        match self {
            Machine::BandwidthBound => 0.002 + f64::max(0.028, 0.0007 * n),
            Machine::ComputeBound => 0.003 + 0.004 * n,
            Machine::Mixture => 0.004 + 0.0003 * n + 0.05 * (1.0 - (1.0 - 8.0 / 128.0f64).powf(n)),
        }
    }

    /// The seconds of a prompt's row, as prefill shows them.
    fn row_seconds(self) -> f64 {
        self.seconds(512) / 512.0
    }
}

/// Streams whose drafts are right with a probability, on a machine whose drafter adds a delay to a step.
#[derive(Debug, Clone, Copy)]
struct Case {
    machine: Machine,
    n_streams: usize,
    chance: f64,
    delay: f64,
    /// Seconds of a pass of a draft model; 0 without one.
    pass: f64,
}

impl Case {
    /// Calls `measure` with the case's simulation.
    fn with<T>(self, measure: impl FnOnce(SimulatedDrafts<'_>) -> T) -> T {
        let Case { machine, n_streams, chance, delay, pass } = self;
        let step_seconds = &|n_rows| machine.seconds(n_rows);
        let row_seconds = machine.row_seconds();
        measure(SimulatedDrafts { step_seconds, row_seconds, n_streams, chance, delay, pass })
    }

    fn regret(self, seed: u64) -> f64 {
        self.with(|drafts| drafts.chosen(seed).seconds / drafts.best_fixed().1 - 1.0)
    }
}

fn cases() -> impl Iterator<Item = Case> {
    let chances = [0.0, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95];
    let of_machine = move |machine| {
        [1, 2, 4, 16].into_iter().flat_map(move |n_streams| {
            chances
                .into_iter()
                .flat_map(move |chance| DRAFTING.map(|(delay, pass)| Case { machine, n_streams, chance, delay, pass }))
        })
    };
    MACHINES.into_iter().flat_map(of_machine)
}

#[test]
fn chosen_lengths_are_nearly_as_fast_as_the_best_fixed_length_on_every_machine() {
    let mut regrets: Vec<(f64, Case)> = cases().map(|case| (case.regret(7), case)).collect();
    regrets.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let at = |share: f64| regrets[((regrets.len() - 1) as f64 * share) as usize];
    let worst = &regrets[regrets.len() - 12..];
    println!("p50 {:.3}, p95 {:.3} of {}, {worst:#?}", at(0.5).0, at(0.95).0, regrets.len());
    assert!(at(0.95).0 <= MOST_REGRET, "p95 {:.3} of {} cases; the worst: {worst:#?}", at(0.95).0, regrets.len());
    // What is on where nobody asks for it is held alone, too.
    let free: Vec<f64> =
        regrets.iter().filter(|(_, case)| case.delay + case.pass == 0.0).map(|(regret, _)| *regret).collect();
    let p95 = free[((free.len() - 1) as f64 * 0.95) as usize];
    println!("drafts for nothing: p95 {p95:.3} of {}, at most {:.3}", free.len(), free[free.len() - 1]);
    assert!(p95 <= MOST_REGRET, "p95 {p95:.3} of {} cases without a draft's own cost", free.len());
}

#[test]
fn no_chosen_length_is_slower_than_none() {
    for case in cases() {
        let slower = case.with(|drafts| drafts.chosen(3).seconds / drafts.fixed(0) - 1.0);
        assert!(slower <= 0.03, "{slower:.3} slower: {case:?}");
    }
}

/// The lengths for drafts of which each takes this delay.
fn lengths(
    costs: &mut StepCosts,
    offers: &[DraftOffer],
    n_max: usize,
    row_seconds: f64,
    delay_seconds: f64,
) -> Vec<usize> {
    let plan = DraftPlan { delay_seconds, ..DraftPlan::at_no_cost(offers) };
    costs.choose(&[plan], n_max, row_seconds).lengths
}

proptest! {
    #[test]
    fn lengths_stay_within_their_offers_and_the_rows(
        offers in proptest::collection::vec((0usize..40, 0.0f64..1.0, 0.0f64..1.0), 0..20),
        n_max in 0usize..100,
        steps in proptest::collection::vec((0usize..20, 0usize..80, 0.0f64..10.0), 0..40),
    ) {
        let mut costs = StepCosts::default();
        for (n_streams, n_extra, seconds) in steps {
            costs.learn(n_streams, n_extra, seconds, 0.001);
        }
        let offers: Vec<DraftOffer> =
            offers.into_iter().map(|(n, first, later)| DraftOffer { n, first, later, takes_passes: false }).collect();
        let lengths = lengths(&mut costs, &offers, n_max, 0.001, 0.0);
        prop_assert_eq!(lengths.len(), offers.len());
        prop_assert!(lengths.iter().sum::<usize>() <= n_max.min(MAX_EXTRA));
        prop_assert!(lengths.iter().zip(&offers).all(|(n, offer)| *n <= offer.n));
        if offers.len() > MAX_STREAMS {
            prop_assert!(lengths.iter().all(|n| *n == 0), "too many streams");
        }
    }
}

#[test]
fn nothing_is_drafted_before_a_plain_step_was_measured_or_where_it_is_never_right() {
    let sure = DraftOffer { n: 8, first: 0.9, later: 0.9, takes_passes: false };
    let mut costs = StepCosts::default();
    assert_eq!(lengths(&mut costs, &[sure], 64, 0.0, 0.0), [0]);
    costs.learn(1, 0, 0.01, 0.0);
    assert!(lengths(&mut costs, &[sure], 64, 0.0, 0.0)[0] > 0);
    assert_eq!(lengths(&mut costs, &[DraftOffer { first: 0.0, ..sure }], 64, 0.0, 0.0), [0]);
    assert_eq!(lengths(&mut costs, &[sure], 64, 0.0, 1.0), [0], "a drafter that takes longer than the steps");
}

#[test]
fn a_sequence_without_a_draft_is_not_slowed_by_the_drafts_of_another() {
    let mut costs = StepCosts::default();
    costs.learn(2, 0, 0.01, 0.004);
    let sure = DraftOffer { n: 8, first: 0.95, later: 0.95, takes_passes: false };
    assert_eq!(lengths(&mut costs, &[sure, DraftOffer::NONE], 64, 0.004, 0.0), [0, 0]);
    assert_ne!(lengths(&mut costs, &[sure, sure], 64, 0.002, 0.0), [0, 0]);
    // Where rows cost nearly nothing, it may.
    assert_ne!(lengths(&mut costs, &[sure, DraftOffer::NONE], 64, 0.000_05, 0.0), [0, 0]);
}

#[test]
fn a_draft_model_is_asked_where_its_passes_bring_more_than_what_there_is_for_nothing() {
    let mut costs = StepCosts::default();
    costs.learn(1, 0, 0.03, 0.0007);
    let unsure = DraftOffer { n: 8, first: 0.2, later: 0.5, takes_passes: false };
    let wish = DraftOffer { n: 32, first: 0.8, later: 0.8, takes_passes: true };
    let mut chosen = |free: DraftOffer, pass_seconds: f64| {
        let plans = [[free], [wish]];
        let plans = [DraftPlan::at_no_cost(&plans[0]), DraftPlan { pass_seconds, ..DraftPlan::at_no_cost(&plans[1]) }];
        let ChosenPlan { plan, lengths } = costs.choose(&plans, 64, 0.0007);
        (plan, lengths[0])
    };
    let (plan, n) = chosen(unsure, 0.003);
    assert!(plan == 1 && (2..16).contains(&n), "{plan}, {n}");
    assert!(chosen(unsure, 0.001).1 > n, "cheaper passes, longer drafts");
    assert_eq!(
        chosen(DraftOffer { n: 32, first: 0.9, later: 0.9, takes_passes: false }, 0.003).0,
        0,
        "a good one for nothing"
    );
    assert_eq!(chosen(DraftOffer::NONE, 0.04), (0, 0), "passes that take longer than steps");
    assert!(costs.may_pay(wish, 1, 0.0007, 0.003) && !costs.may_pay(wish, 2, 0.0007, 0.003), "two were not measured");
    assert!(!costs.may_pay(DraftOffer { first: 0.0, ..wish }, 1, 0.0007, 0.003));
}
