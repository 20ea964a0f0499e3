//! Lengths of drafts on simulated machines, beside the best fixed length.

use proptest::prelude::*;

use super::super::simulated::{Acceptance, LONGEST_DRAFT, SimulatedDrafts};
use super::super::simulated_node::SimulatedNode;
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

/// Seconds that drafting adds to a step, and those of a pass of a draft model: drafts for nothing, from another machine by links with
/// round trips of 0.1 to 5 ms, and of a model with a tenth of a bandwidth-bound machine's weights.
const DRAFTING: [(f64, f64); 5] = [(0.0, 0.0), (0.0001, 0.0), (0.001, 0.0), (0.005, 0.0), (0.0, 0.003)];

/// The most regret that 95 % of the cases may have.
const MOST_REGRET: f64 = 0.05;

/// The least of the speed without drafts.
const LEAST_SPEED: f64 = 0.975;

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
    chance: Acceptance,
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
        let longest = LONGEST_DRAFT;
        measure(SimulatedDrafts { step_seconds, row_seconds, n_streams, longest, chance, delay, pass })
    }

    fn measured(self, seed: u64) -> Measured {
        self.with(|drafts| {
            let seconds = drafts.chosen(seed).seconds;
            Measured { case: self, regret: seconds / drafts.best_fixed().1 - 1.0, speed: drafts.fixed(0) / seconds }
        })
    }
}

/// The cost of chosen lengths in a case.
#[derive(Debug, Clone, Copy)]
struct Measured {
    case: Case,
    /// How much slower they are than the best fixed length.
    regret: f64,
    /// The speed beside that without drafts.
    speed: f64,
}

/// Acceptances that stay the same in a reply.
const CONSTANT: [f64; 9] = [0.0, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95];

const STEPS: [Acceptance; 4] = [
    Acceptance::Step { early: 0.9, n_early: 100, late: 0.0 },
    Acceptance::Step { early: 0.0, n_early: 100, late: 0.9 },
    Acceptance::Step { early: 0.95, n_early: 384, late: 0.3 },
    Acceptance::Step { early: 0.0, n_early: 384, late: 0.8 },
];

const BURSTS: [Acceptance; 5] = [
    Acceptance::Bursts { odd: 0.95, even: 0.0, n_run: 5 },
    Acceptance::Bursts { odd: 0.9, even: 0.0, n_run: 20 },
    Acceptance::Bursts { odd: 0.95, even: 0.3, n_run: 20 },
    Acceptance::Bursts { odd: 0.0, even: 0.95, n_run: 50 },
    Acceptance::Bursts { odd: 0.9, even: 0.0, n_run: 100 },
];

const DRIFTS: [Acceptance; 4] = [
    Acceptance::Drift { from: 0.0, to: 0.95 },
    Acceptance::Drift { from: 0.95, to: 0.0 },
    Acceptance::Drift { from: 0.3, to: 0.8 },
    Acceptance::Drift { from: 0.8, to: 0.3 },
];

/// Every acceptance on each machine, with each number of streams and each cost of drafting.
fn cases(chances: &[Acceptance], n_streams: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for machine in MACHINES {
        for &n_streams in n_streams {
            for &chance in chances {
                cases.extend(DRAFTING.map(|(delay, pass)| Case { machine, n_streams, chance, delay, pass }));
            }
        }
    }
    cases
}

/// The 95th percentile of the regrets.
fn p95(measured: impl Iterator<Item = Measured>) -> f64 {
    let mut regrets: Vec<f64> = measured.map(|it| it.regret).collect();
    regrets.sort_by(f64::total_cmp);
    regrets[((regrets.len() - 1) as f64 * 0.95) as usize]
}

fn check_speed(measured: &[Measured]) {
    let slowest = measured.iter().min_by(|a, b| a.speed.total_cmp(&b.speed)).unwrap();
    println!("the slowest of {}: {slowest:?}", measured.len());
    assert!(slowest.speed >= LEAST_SPEED, "{slowest:?}");
}

/// Measures the cases, and checks their regret and their speed. `most_of_passes`: the regret of a draft model's guesses alone. Where its
/// acceptance changes, that is seen late, because only guesses that were asked for are compared.
fn check(what: &str, cases: Vec<Case>, most_of_passes: f64) {
    let measured: Vec<Measured> = cases.into_iter().map(|case| case.measured(7)).collect();
    let of_all = p95(measured.iter().copied());
    // What is on where nobody asks for it is held alone, too.
    let of_free = p95(measured.iter().copied().filter(|it| it.case.delay + it.case.pass == 0.0));
    let of_passes = p95(measured.iter().copied().filter(|it| it.case.pass > 0.0));
    let all = format!("{what}: p95 {of_all:.3} of {}, {of_free:.3} of drafts for nothing", measured.len());
    println!("{all}, {of_passes:.3} of a draft model's");
    assert!(of_all <= MOST_REGRET && of_free <= MOST_REGRET, "{all}");
    assert!(of_passes <= most_of_passes, "{what}: {of_passes:.3} of a draft model's");
    check_speed(&measured);
}

#[test]
fn chosen_lengths_are_nearly_as_fast_as_the_best_fixed_length_and_never_slower_than_none() {
    check("constant", cases(&CONSTANT.map(Acceptance::Constant), &[1, 2, 4, 16]), MOST_REGRET);
}

#[test]
fn chosen_lengths_follow_an_acceptance_that_changes_within_a_reply() {
    check("steps", cases(&STEPS, &[1, 4, 16]), 0.2);
    check("bursts", cases(&BURSTS, &[1, 4, 16]), 0.2);
    check("drifts", cases(&DRIFTS, &[1, 4, 16]), 0.3);
}

/// Where drafts promise little and a wrong one costs much, chance decides: other draws, too.
#[test]
fn nothing_is_slower_than_without_drafts_where_each_draft_waits_for_a_slow_link() {
    let likely: Vec<Acceptance> = CONSTANT.into_iter().filter(|c| *c >= 0.5).map(Acceptance::Constant).collect();
    let hard = cases(&likely, &[1, 2]).into_iter().filter(|case| case.delay > 0.001);
    let hard = hard.flat_map(|case| (11..=16).map(move |seed| case.measured(seed)));
    check_speed(&hard.collect::<Vec<_>>());
}

/// The seconds of a round trip to a draft node, and of a pass of its model in steps of the machine.
const DRAFT_NODES: [(f64, f64); 9] = [
    (0.0001, 0.05),
    (0.001, 0.05),
    (0.005, 0.05),
    (0.0001, 0.3),
    (0.001, 0.3),
    (0.005, 0.3),
    (0.0001, 1.5),
    (0.001, 1.5),
    (0.005, 1.5),
];

#[test]
fn a_draft_node_slows_no_stream_whatever_its_link_its_speed_and_its_guesses() {
    let mut slowest = (f64::INFINITY, String::new());
    for machine in MACHINES {
        let step_seconds = &|n_rows| machine.seconds(n_rows);
        for (n_streams, chance) in
            [1, 4, 16].into_iter().flat_map(|n| [0.0, 0.3, 0.6, 0.8, 0.95].map(|chance| (n, chance)))
        {
            let without = machine.seconds(n_streams);
            for (round_trip, pass) in DRAFT_NODES {
                let node = SimulatedNode {
                    step_seconds,
                    row_seconds: machine.row_seconds(),
                    n_streams,
                    longest: LONGEST_DRAFT,
                    chance,
                    round_trip,
                    interval: pass * without,
                };
                let speed = without / node.chosen(7).seconds;
                let case = format!(
                    "{machine:?}, {n_streams} streams, {chance} right, {round_trip} s away, {pass} steps a pass"
                );
                println!("{speed:.3}: {case}");
                if speed < slowest.0 {
                    slowest = (speed, case);
                }
            }
        }
    }
    assert!(slowest.0 >= LEAST_SPEED, "{slowest:?}");
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
            offers.into_iter().map(|(n, first, later)| DraftOffer { n, first, later, ..DraftOffer::NONE }).collect();
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
    let sure = DraftOffer { n: 8, first: 0.9, later: 0.9, ..DraftOffer::NONE };
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
    let sure = DraftOffer { n: 8, first: 0.95, later: 0.95, ..DraftOffer::NONE };
    assert_eq!(lengths(&mut costs, &[sure, DraftOffer::NONE], 64, 0.004, 0.0), [0, 0]);
    assert_ne!(lengths(&mut costs, &[sure, sure], 64, 0.002, 0.0), [0, 0]);
    // Where rows cost nearly nothing, it may.
    assert_ne!(lengths(&mut costs, &[sure, DraftOffer::NONE], 64, 0.000_05, 0.0), [0, 0]);
}

#[test]
fn a_sequence_that_has_gained_by_drafts_may_lose_as_much_by_those_of_another() {
    let mut costs = StepCosts::default();
    costs.learn(2, 0, 0.01, 0.004);
    let sure = DraftOffer { n: 8, first: 0.95, later: 0.95, ..DraftOffer::NONE };
    let mut chosen =
        |saved: f64| lengths(&mut costs, &[sure, DraftOffer { saved, ..DraftOffer::NONE }], 64, 0.004, 0.0);
    assert_eq!([chosen(0.0), chosen(-2.0)], [[0, 0], [0, 0]]);
    let [some, more] = [chosen(1.0)[0], chosen(4.0)[0]];
    assert!(some > 0 && more > some, "{some}, {more}");
    let mut saved = 0.0;
    // Two steps' time for five tokens, then three for one.
    costs.add_saved(&mut saved, 2, 5, 0.02);
    assert!((saved - 3.0).abs() < 1e-9);
    costs.add_saved(&mut saved, 2, 1, 0.03);
    assert!((saved - 1.0).abs() < 1e-9);
    (0..9).for_each(|_| costs.add_saved(&mut saved, 2, 5, 0.01));
    assert_eq!(saved, MOST_STEPS_SAVED);
}

#[test]
fn a_draft_model_is_asked_where_its_passes_bring_more_than_what_there_is_for_nothing() {
    let mut costs = StepCosts::default();
    costs.learn(1, 0, 0.03, 0.0007);
    let unsure = DraftOffer { n: 8, first: 0.2, later: 0.5, ..DraftOffer::NONE };
    let wish = DraftOffer { n: 32, first: 0.8, later: 0.8, takes_passes: true, ..DraftOffer::NONE };
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
        chosen(DraftOffer { n: 32, first: 0.9, later: 0.9, ..DraftOffer::NONE }, 0.003).0,
        0,
        "a good one for nothing"
    );
    assert_eq!(chosen(DraftOffer::NONE, 0.04), (0, 0), "passes that take longer than steps");
    assert!(costs.may_pay(wish, 1, 0.0007, 0.003) && !costs.may_pay(wish, 2, 0.0007, 0.003), "two were not measured");
    assert!(!costs.may_pay(DraftOffer { first: 0.0, ..wish }, 1, 0.0007, 0.003));
}

#[test]
fn a_trial_costs_half_a_step_at_most_with_its_passes() {
    let mut costs = StepCosts::default();
    costs.learn(1, 0, 0.1, 0.001);
    let unlikely = [DraftOffer { n: 32, first: 0.2, later: 0.7, takes_passes: true, ..DraftOffer::NONE }];
    let plan = DraftPlan { pass_seconds: 0.02, ..DraftPlan::at_no_cost(&unlikely) };
    let lengths: Vec<usize> = (0..64).map(|_| costs.choose(&[plan], 64, 0.001).lengths[0]).collect();
    assert_eq!(lengths[..63], [0; 63], "it promises nothing");
    assert_eq!(lengths[63], 2, "each token costs 0.21 steps");
}

#[test]
fn drafts_that_have_lost_time_must_promise_more_until_that_is_made_up_for() {
    let mut costs = StepCosts::default();
    costs.learn(1, 0, 0.01, 0.004);
    let offer = DraftOffer { n: 4, first: 0.5, later: 0.5, ..DraftOffer::NONE };
    let mut step = DraftedStep { n_streams: 1, n_extra: 1, n_right: 0, seconds: 0.04, drafting_seconds: 0.0 };
    assert_ne!(lengths(&mut costs, &[offer], 64, 0.004, 0.0), [0], "it promises 7 %");
    // Each takes as long as four steps, and brings one token.
    (0..3).for_each(|_| costs.settle(step));
    assert_eq!(lengths(&mut costs, &[offer], 64, 0.004, 0.0), [0]);
    let sure = DraftOffer { n: 8, first: 0.95, later: 0.95, ..DraftOffer::NONE };
    assert_ne!(lengths(&mut costs, &[sure], 64, 0.004, 0.0), [0], "what promises more is tried");
    step = DraftedStep { n_extra: 0, seconds: 0.01, ..step };
    (0..1_000).for_each(|_| costs.settle(step));
    assert_ne!(lengths(&mut costs, &[offer], 64, 0.004, 0.0), [0], "a hundredth of the time may be lost");
}
