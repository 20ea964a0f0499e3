//! Policies choose among predicted routes. To add one, write a file like `direct.rs`, and add its `mod` line and its
//! variant of [`PolicyName`] here.

mod always_handoff;
mod direct;
mod fastest;
mod least_loaded;
mod round_robin;

use std::fmt;

use baton_schemas::model_difference::ModelDifference;

use super::cost::RouteCandidate;
use super::snapshot::Snapshot;
use crate::reason::{BarReason, RouteKind, RouteReason};

/// The names of the policies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum PolicyName {
    /// The route that is predicted to complete first.
    #[default]
    Fastest,
    /// A handoff wherever one is possible.
    AlwaysHandoff,
    /// No handoffs.
    Direct,
    /// Nodes take turns.
    RoundRobin,
    /// The least loaded nodes.
    LeastLoaded,
}

impl PolicyName {
    /// All of them, the default first.
    pub const ALL: [PolicyName; 5] = [
        PolicyName::Fastest,
        PolicyName::AlwaysHandoff,
        PolicyName::Direct,
        PolicyName::RoundRobin,
        PolicyName::LeastLoaded,
    ];

    /// The word in configurations, headers and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Parses the word of a configuration or a header; `None` if there is no such policy.
    pub fn parse(word: &str) -> Option<PolicyName> {
        PolicyName::ALL.into_iter().find(|name| name.as_str() == word)
    }

    pub fn policy(self) -> &'static dyn Policy {
        match self {
            PolicyName::Fastest => &fastest::Fastest,
            PolicyName::AlwaysHandoff => &always_handoff::AlwaysHandoff,
            PolicyName::Direct => &direct::Direct,
            PolicyName::RoundRobin => &round_robin::RoundRobin,
            PolicyName::LeastLoaded => &least_loaded::LeastLoaded,
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteChoice {
    /// Index into the candidates.
    pub candidate: usize,
    pub reason: RouteReason,
}

/// Chooses routes. Called for each request, so it must be quick. It keeps no state.
pub trait Policy: Send + Sync + std::fmt::Debug {
    fn name(&self) -> PolicyName;

    /// Chooses among the candidates that are not barred; `None` if all are barred.
    fn choose(&self, snapshot: &Snapshot, candidates: &[RouteCandidate]) -> Option<RouteChoice>;
}

/// The candidates that are not barred, each with its index.
fn open(candidates: &[RouteCandidate]) -> impl Iterator<Item = (usize, &RouteCandidate)> {
    candidates.iter().enumerate().filter(|(_, candidate)| candidate.barred.is_none())
}

/// The candidate of this kind that is predicted to complete first, among those that are not barred.
fn first_to_complete(candidates: &[RouteCandidate], kind: RouteKind) -> Option<usize> {
    let of_kind = open(candidates).filter(|(_, c)| c.route.kind() == kind);
    of_kind.min_by(|a, b| completion(a.1).total_cmp(&completion(b.1))).map(|(i, _)| i)
}

/// The predicted completion time in milliseconds; infinite without a prediction, so that such a route comes last.
fn completion(candidate: &RouteCandidate) -> f64 {
    candidate.prediction.map_or(f64::INFINITY, |prediction| prediction.completion_ms)
}

/// How loaded a route's machines are, to compare: streams of the decode node first, then prompt tokens that wait to be computed; a
/// handoff before the decode node alone.
fn load(snapshot: &Snapshot, candidate: &RouteCandidate) -> (u32, u32, bool) {
    let decode = &snapshot.decode[candidate.route.decode];
    let prefill = candidate.route.prefill.map(|p| &snapshot.prefill[p]);
    // Without a prefill node, the decode node computes the prompt while its streams run.
    (decode.n_active + decode.n_queued, prefill.unwrap_or(decode).n_backlog, prefill.is_none())
}

/// The reason for a direct route: why the handoffs are barred, or, if there are none, how the direct routes were compared.
fn why_direct(candidates: &[RouteCandidate]) -> RouteReason {
    let mut handoffs = candidates.iter().filter(|c| c.route.prefill.is_some()).peekable();
    if handoffs.peek().is_none() {
        return match open(candidates).count() {
            0 | 1 => RouteReason::OnlyRoute,
            _ if open(candidates).all(|(_, c)| c.prediction.is_none()) => RouteReason::RatesUnknown,
            _ => RouteReason::LeastTime,
        };
    }
    // Prefer handoffs to usable decode nodes: the reason that bars a decode node also bars its handoffs, and does not
    // explain this choice.
    let (may_decode, others): (Vec<_>, Vec<_>) =
        handoffs.partition(|c| open(candidates).any(|(_, direct)| direct.route.decode == c.route.decode));
    let relevant = if may_decode.is_empty() { others } else { may_decode };
    let reasons: Option<Vec<BarReason>> = relevant.iter().map(|c| c.barred).collect();
    let Some(reasons) = reasons else { return RouteReason::NotWorthIt };
    // Report another model only if no node runs this one.
    let of_this_model = reasons.iter().find(|reason| **reason != BarReason::Differs(ModelDifference::OtherModel));
    of_this_model.or(reasons.first()).map_or(RouteReason::NotWorthIt, |reason| RouteReason::Barred(*reason))
}

#[cfg(test)]
mod tests {
    use baton_schemas::no_handoff::NoHandoffReason;

    use super::*;
    use crate::cost::tests::{node, spark_and_mac};
    use crate::cost::{candidates, worthwhile_gain_ms};
    use crate::rates::TransferRates;
    use crate::reason::{BarReason, RouteReason};
    use crate::snapshot::NodeView;

    fn choose(policy: PolicyName, snapshot: &Snapshot) -> Option<(usize, Option<usize>, RouteReason)> {
        let candidates = candidates(snapshot);
        let choice = policy.policy().choose(snapshot, &candidates)?;
        let route = candidates[choice.candidate].route;
        Some((route.decode, route.prefill, choice.reason))
    }

    /// Two prefill and two decode nodes, the second of each twice as fast.
    fn two_of_each(n_prompt: u32) -> Snapshot {
        let mut snapshot = spark_and_mac(n_prompt, 100.0);
        snapshot.decode.push(node("mac-2", 2_940.0, 78.0));
        snapshot.prefill.push(node("spark-2", 11_140.0, 24.0));
        snapshot.links =
            vec![
                vec![
                    TransferRates { bytes_per_second: 1.25e9, rtt_ms: 0.3, tail_ms: 5.0, ..TransferRates::default() };
                    2
                ];
                2
            ];
        snapshot
    }

    #[test]
    fn a_model_that_is_not_handed_over_is_served_directly_and_the_route_says_why() {
        for reason in NoHandoffReason::ALL {
            let mut snapshot = spark_and_mac(8_192, 100.0);
            snapshot.decode[0].kv = Err(reason);
            for policy in [PolicyName::Fastest, PolicyName::AlwaysHandoff] {
                let (_, prefill, why) = choose(policy, &snapshot).unwrap();
                assert_eq!((prefill, why.as_str()), (None, reason.as_str()));
            }
        }
    }

    #[test]
    fn every_policy_is_found_by_its_name() {
        for name in PolicyName::ALL {
            assert_eq!((PolicyName::parse(name.as_str()), name.policy().name()), (Some(name), name));
        }
        assert_eq!(PolicyName::ALL[0], PolicyName::default());
        assert_eq!(PolicyName::parse("quickest"), None);
    }

    #[test]
    fn fastest_hands_over_what_pays_and_nothing_else() {
        assert_eq!(choose(PolicyName::Fastest, &spark_and_mac(8_192, 100.0)), Some((0, Some(0), RouteReason::Faster)));
        assert_eq!(choose(PolicyName::Fastest, &spark_and_mac(4, 100.0)), Some((0, None, RouteReason::NotWorthIt)));
        let mut slow_link = spark_and_mac(8_192, 100.0);
        slow_link.links[0][0].bytes_per_second = 1e8;
        assert_eq!(choose(PolicyName::Fastest, &slow_link), Some((0, None, RouteReason::NotWorthIt)));
        let mut cached = spark_and_mac(8_192, 100.0);
        cached.decode[0].held.slot = 8_128;
        assert_eq!(choose(PolicyName::Fastest, &cached), Some((0, None, RouteReason::NotWorthIt)));
        assert_eq!(choose(PolicyName::Fastest, &two_of_each(8_192)), Some((1, Some(1), RouteReason::Faster)));
    }

    #[test]
    fn fastest_leaves_a_busy_node_alone() {
        let mut snapshot = two_of_each(8_192);
        (snapshot.prefill[1].n_active, snapshot.prefill[1].n_backlog) = (3, 60_000);
        (snapshot.decode[1].n_active, snapshot.decode[1].n_queued) = (4, 4);
        assert_eq!(choose(PolicyName::Fastest, &snapshot), Some((0, Some(0), RouteReason::Faster)));
    }

    #[test]
    fn a_broken_prefill_node_is_named_as_the_reason() {
        let mut snapshot = spark_and_mac(8_192, 100.0);
        snapshot.prefill[0].barred = Some(BarReason::PREFILL_DOWN);
        for policy in [PolicyName::Fastest, PolicyName::AlwaysHandoff] {
            assert_eq!(
                choose(policy, &snapshot),
                Some((0, None, RouteReason::Barred(BarReason::PREFILL_DOWN))),
                "{policy}"
            );
        }
        snapshot.prefill.clear();
        snapshot.links.clear();
        assert_eq!(choose(PolicyName::Fastest, &snapshot), Some((0, None, RouteReason::OnlyRoute)));
        snapshot.decode.push(node("mac-2", 2_940.0, 78.0));
        for policy in [PolicyName::Fastest, PolicyName::AlwaysHandoff] {
            assert_eq!(choose(policy, &snapshot), Some((1, None, RouteReason::LeastTime)), "{policy}");
        }
        snapshot.decode[1].barred = Some(BarReason::Down);
        assert_eq!(
            choose(PolicyName::Fastest, &snapshot),
            Some((0, None, RouteReason::OnlyRoute)),
            "the other cannot be taken"
        );
        snapshot.decode[1].barred = None;
        snapshot.decode.iter_mut().for_each(|node| node.rates = Default::default());
        assert_eq!(choose(PolicyName::Fastest, &snapshot), Some((0, None, RouteReason::RatesUnknown)));
        snapshot.decode.truncate(1);
        snapshot.decode[0].barred = Some(BarReason::Down);
        for policy in PolicyName::ALL {
            assert_eq!(choose(policy, &snapshot), None);
        }
    }

    #[test]
    fn the_other_policies_do_what_they_are_called() {
        assert_eq!(choose(PolicyName::AlwaysHandoff, &spark_and_mac(4, 1.0)), Some((0, Some(0), RouteReason::Policy)));
        assert_eq!(choose(PolicyName::Direct, &two_of_each(8_192)), Some((1, None, RouteReason::Policy)));
        let mut snapshot = two_of_each(8_192);
        let turns: Vec<_> = (0..6)
            .map(|turn| {
                snapshot.turn = turn;
                choose(PolicyName::RoundRobin, &snapshot).unwrap()
            })
            .map(|(decode, prefill, _)| (decode, prefill))
            .collect();
        assert_eq!(turns[..4], [(0, Some(0)), (1, Some(0)), (0, Some(1)), (1, Some(1))]);
        assert_eq!(turns[4..], turns[..2]);
        snapshot.decode[1].n_active = 2;
        snapshot.prefill[0].n_backlog = 100;
        assert_eq!(choose(PolicyName::LeastLoaded, &snapshot), Some((0, Some(1), RouteReason::Policy)));
    }

    #[test]
    fn nothing_is_called_not_faster_than_what_is_not_measured() {
        let measured = spark_and_mac(8_192, 100.0);
        let unmeasured = |forget: fn(&mut Snapshot)| {
            let mut snapshot = measured.clone();
            forget(&mut snapshot);
            choose(PolicyName::Fastest, &snapshot)
        };
        let unknown = Some((0, None, RouteReason::RatesUnknown));
        assert_eq!(unmeasured(|it| it.decode[0].rates.prefill = Default::default()), unknown, "the direct route");
        assert_eq!(unmeasured(|it| it.prefill[0].rates = Default::default()), unknown, "the handoff");
        assert_eq!(unmeasured(|it| it.links[0][0].bytes_per_second = 0.0), unknown, "the link");
        let mut second = two_of_each(4);
        second.prefill[1].rates = Default::default();
        assert_eq!(choose(PolicyName::Fastest, &second).unwrap().2, RouteReason::RatesUnknown, "one of two handoffs");
    }

    #[test]
    fn without_any_measurement_a_request_is_served_directly() {
        let mut snapshot = spark_and_mac(8_192, 100.0);
        snapshot.decode[0].rates = Default::default();
        snapshot.prefill[0].rates = Default::default();
        assert_eq!(choose(PolicyName::Fastest, &snapshot), Some((0, None, RouteReason::RatesUnknown)));
    }

    #[test]
    fn equal_nodes_share_streams_though_their_predictions_differ_a_little_or_are_unknown() {
        let mut snapshot = spark_and_mac(64, 32.0);
        snapshot.prefill.clear();
        snapshot.links.clear();
        // Predictions of the first are the best by half a percent.
        snapshot.decode = [1.0, 0.997, 0.995].map(|speed| node("mac", 2_940.0 * speed, 78.0 * speed)).to_vec();
        let spread = |mut snapshot: Snapshot, n: u32| {
            for _ in 0..n {
                let chosen = choose(PolicyName::Fastest, &snapshot).unwrap().0;
                snapshot.decode[chosen].n_active += 1;
            }
            snapshot.decode.iter().map(|node| node.n_active).collect::<Vec<_>>()
        };
        assert_eq!(spread(snapshot.clone(), 6), [2, 2, 2]);
        snapshot.decode[2].held.slot = 63;
        assert_eq!(spread(snapshot.clone(), 1), [0, 0, 1], "the one that holds the prompt is faster");
        snapshot.decode.iter_mut().for_each(|node| node.rates = crate::rates::NodeRates::default());
        assert_eq!(spread(snapshot, 6), [2, 2, 2], "nothing is known of their speed");
    }

    proptest::proptest! {
        #[test]
        fn a_machine_is_woken_only_if_that_is_predicted_to_be_done_first_or_it_is_alone(
            n_prompt in 2u32..20_000, wake_ms in 0f64..120_000.0, n_queued in 0u32..40,
            prefill in proptest::array::uniform2(20f64..10_000.0), decode in proptest::array::uniform2(1f64..100.0),
            name in 0usize..PolicyName::ALL.len(),
        ) {
            let policy = PolicyName::ALL[name];
            let asleep = NodeView { wake_ms: Some(wake_ms), ..node("asleep", prefill[1], decode[1]) };
            let mut snapshot = spark_and_mac(n_prompt, 100.0);
            (snapshot.prefill, snapshot.links, snapshot.decode) = (Vec::new(), Vec::new(), vec![asleep.clone()]);
            let alone = candidates(&snapshot)[0].prediction.unwrap();
            proptest::prop_assert_eq!(alone.wake_ms, wake_ms);
            proptest::prop_assert!(choose(policy, &snapshot).is_some(), "nothing else can answer");
            let awake = NodeView { n_active: 4, n_queued, ..node("awake", prefill[0], decode[0]) };
            snapshot.decode = vec![asleep, awake];
            let routes = candidates(&snapshot);
            let awake = routes[1].prediction.unwrap();
            let pays = alone.completion_ms + worthwhile_gain_ms(awake.ttft_ms) < awake.completion_ms;
            proptest::prop_assert_eq!(routes[0].barred, (!pays).then_some(BarReason::Asleep));
            let chosen = choose(policy, &snapshot).unwrap().0;
            proptest::prop_assert!(chosen == 1 || pays, "{policy} wakes a machine that is done at {alone:?} for {awake:?}");
            // Nearly equal completions are decided by the first token.
            let is_clear = pays && alone.completion_ms < 0.98 * awake.completion_ms;
            proptest::prop_assert!(policy != PolicyName::Fastest || !is_clear || chosen == 0);
            // Nothing shows that it pays while the speed of the other one is not known.
            snapshot.decode[1].rates = crate::rates::NodeRates::default();
            proptest::prop_assert_eq!(choose(policy, &snapshot).unwrap().0, 1);
        }
    }

    #[test]
    fn a_handoff_waits_for_the_later_of_two_machines() {
        let mut snapshot = spark_and_mac(8_192, 32.0);
        let awake = candidates(&snapshot)[1].prediction.unwrap();
        snapshot.prefill[0].wake_ms = Some(40_000.0);
        assert_eq!(candidates(&snapshot)[1].barred, Some(BarReason::Asleep), "the Mac alone is done before");
        snapshot.decode[0].wake_ms = Some(30_000.0);
        let both = candidates(&snapshot)[1].prediction.unwrap();
        assert_eq!((both.wake_ms, both.ttft_ms), (40_000.0, awake.ttft_ms + 40_000.0));
        assert!((both.own_ms() - awake.own_ms()).abs() < 1e-6, "waking teaches no correction");
        let chosen = choose(PolicyName::Fastest, &snapshot).unwrap();
        assert_eq!((chosen.0, chosen.1), (0, None), "30 s and the Mac's own prefill are less");
    }
}
