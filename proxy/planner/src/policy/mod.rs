//! Policies: pure choices among predicted routes. To add one, write a file like `direct.rs` and name it in [`POLICIES`].

mod always_handoff;
mod direct;
mod fastest;
mod least_loaded;
mod round_robin;

use super::cost::Candidate;
use super::snapshot::Snapshot;

/// What a policy chose, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Index into the candidates.
    pub candidate: usize,
    /// In one word, for counting.
    pub reason: &'static str,
}

/// A way to choose. Called for each request; must be quick and may keep nothing.
pub trait Policy: Send + Sync + std::fmt::Debug {
    /// As it is configured and asked for.
    fn name(&self) -> &'static str;

    /// Chooses among the candidates that are not barred; `None` if all are.
    fn choose(&self, snapshot: &Snapshot, candidates: &[Candidate]) -> Option<Choice>;
}

/// Every policy there is, the default first.
pub const POLICIES: [&dyn Policy; 5] = [
    &fastest::Fastest,
    &always_handoff::AlwaysHandoff,
    &direct::Direct,
    &round_robin::RoundRobin,
    &least_loaded::LeastLoaded,
];

/// The policy of that name.
pub fn by_name(name: &str) -> Option<&'static dyn Policy> {
    POLICIES.into_iter().find(|policy| policy.name() == name)
}

/// Candidates that can be taken, with their places.
fn open(candidates: &[Candidate]) -> impl Iterator<Item = (usize, &Candidate)> {
    candidates.iter().enumerate().filter(|(_, candidate)| candidate.barred.is_none())
}

/// Predicted completion; a route of which nothing is known comes after all others.
fn completion(candidate: &Candidate) -> f64 {
    candidate.prediction.map_or(f64::INFINITY, |prediction| prediction.completion_ms)
}

/// Why the best of the direct routes is taken: what bars the handoffs that there are; or where there are none, what the
/// direct routes were compared by.
fn why_direct(candidates: &[Candidate]) -> &'static str {
    let mut handoffs = candidates.iter().filter(|c| c.route.prefill.is_some()).peekable();
    if handoffs.peek().is_none() {
        return match open(candidates).count() {
            0 | 1 => "only_route",
            _ if open(candidates).all(|(_, c)| c.prediction.is_none()) => "rates_unknown",
            _ => "least_time",
        };
    }
    // What keeps one decode node from everything says nothing of the handoffs to another that may generate.
    let (may_decode, others): (Vec<_>, Vec<_>) =
        handoffs.partition(|c| open(candidates).any(|(_, direct)| direct.route.decode == c.route.decode));
    let of_interest = if may_decode.is_empty() { others } else { may_decode };
    let reasons: Option<Vec<&'static str>> = of_interest.iter().map(|c| c.barred).collect();
    let Some(reasons) = reasons else { return "not_worth_it" };
    // Nodes of another model are no reason while there are some of this one.
    let of_this_model = reasons.iter().find(|reason| **reason != "fingerprint_mismatch");
    of_this_model.or(reasons.first()).copied().unwrap_or("not_worth_it")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::candidates;
    use crate::cost::tests::{node, spark_and_mac};
    use crate::rates::LinkRates;

    fn choose(policy: &str, snapshot: &Snapshot) -> Option<(usize, Option<usize>, &'static str)> {
        let candidates = candidates(snapshot);
        let choice = by_name(policy).unwrap().choose(snapshot, &candidates)?;
        let route = candidates[choice.candidate].route;
        Some((route.decode, route.prefill, choice.reason))
    }

    /// Two prefill and two decode nodes, the second of each twice as fast.
    fn two_of_each(n_prompt: u32) -> Snapshot {
        let mut snapshot = spark_and_mac(n_prompt, 100.0);
        snapshot.decode.push(node("mac-2", 2_940.0, 78.0));
        snapshot.prefill.push(node("spark-2", 11_140.0, 24.0));
        snapshot.links =
            vec![vec![LinkRates { bytes_per_second: 1.25e9, rtt_ms: 0.3, tail_ms: 5.0, ..LinkRates::default() }; 2]; 2];
        snapshot
    }

    #[test]
    fn names_are_found_and_the_default_comes_first() {
        assert_eq!(POLICIES.map(|p| p.name()), ["fastest", "always_handoff", "direct", "round_robin", "least_loaded"]);
        assert!(by_name("quickest").is_none());
    }

    #[test]
    fn fastest_hands_over_what_pays_and_nothing_else() {
        assert_eq!(choose("fastest", &spark_and_mac(8_192, 100.0)), Some((0, Some(0), "faster")));
        assert_eq!(choose("fastest", &spark_and_mac(4, 100.0)), Some((0, None, "not_worth_it")));
        let mut slow_link = spark_and_mac(8_192, 100.0);
        slow_link.links[0][0].bytes_per_second = 1e8;
        assert_eq!(choose("fastest", &slow_link), Some((0, None, "not_worth_it")));
        let mut cached = spark_and_mac(8_192, 100.0);
        cached.decode[0].n_cached = 8_128;
        assert_eq!(choose("fastest", &cached), Some((0, None, "not_worth_it")));
        assert_eq!(choose("fastest", &two_of_each(8_192)), Some((1, Some(1), "faster")));
    }

    #[test]
    fn fastest_leaves_a_busy_node_alone() {
        let mut snapshot = two_of_each(8_192);
        (snapshot.prefill[1].n_active, snapshot.prefill[1].n_backlog) = (3, 60_000);
        (snapshot.decode[1].n_active, snapshot.decode[1].n_queued) = (4, 4);
        assert_eq!(choose("fastest", &snapshot), Some((0, Some(0), "faster")));
    }

    #[test]
    fn a_broken_prefill_node_is_named_as_the_reason() {
        let mut snapshot = spark_and_mac(8_192, 100.0);
        snapshot.prefill[0].barred = Some("prefill_down");
        for policy in ["fastest", "always_handoff"] {
            assert_eq!(choose(policy, &snapshot), Some((0, None, "prefill_down")), "{policy}");
        }
        snapshot.prefill.clear();
        snapshot.links.clear();
        assert_eq!(choose("fastest", &snapshot), Some((0, None, "only_route")));
        snapshot.decode.push(node("mac-2", 2_940.0, 78.0));
        for policy in ["fastest", "always_handoff"] {
            assert_eq!(choose(policy, &snapshot), Some((1, None, "least_time")), "{policy}");
        }
        snapshot.decode[1].barred = Some("down");
        assert_eq!(choose("fastest", &snapshot), Some((0, None, "only_route")), "the other cannot be taken");
        snapshot.decode[1].barred = None;
        snapshot.decode.iter_mut().for_each(|node| node.rates = Default::default());
        assert_eq!(choose("fastest", &snapshot), Some((0, None, "rates_unknown")));
        snapshot.decode.truncate(1);
        snapshot.decode[0].barred = Some("down");
        for policy in POLICIES {
            assert_eq!(choose(policy.name(), &snapshot), None);
        }
    }

    #[test]
    fn the_other_policies_do_what_they_are_called() {
        assert_eq!(choose("always_handoff", &spark_and_mac(4, 1.0)), Some((0, Some(0), "policy")));
        assert_eq!(choose("direct", &two_of_each(8_192)), Some((1, None, "policy")));
        let mut snapshot = two_of_each(8_192);
        let turns: Vec<_> = (0..6)
            .map(|turn| {
                snapshot.turn = turn;
                choose("round_robin", &snapshot).unwrap()
            })
            .map(|(decode, prefill, _)| (decode, prefill))
            .collect();
        assert_eq!(turns[..4], [(0, Some(0)), (1, Some(0)), (0, Some(1)), (1, Some(1))]);
        assert_eq!(turns[4..], turns[..2]);
        snapshot.decode[1].n_active = 2;
        snapshot.prefill[0].n_backlog = 100;
        assert_eq!(choose("least_loaded", &snapshot), Some((0, Some(1), "policy")));
    }

    #[test]
    fn without_any_measurement_a_request_is_served_directly() {
        let mut snapshot = spark_and_mac(8_192, 100.0);
        snapshot.decode[0].rates = Default::default();
        snapshot.prefill[0].rates = Default::default();
        assert_eq!(choose("fastest", &snapshot), Some((0, None, "rates_unknown")));
    }
}
