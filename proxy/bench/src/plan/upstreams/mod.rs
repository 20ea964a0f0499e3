//! Four simulated upstreams of different speed, cache and queue: Baton's planner beside other routers' rules and an oracle.
//!
//! The planner's choice and its learning are the endpoint's own functions. Nothing here has a clock: time is the simulation's.

mod machine;
mod rules;
mod traffic;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use baton_tryout::stats::percentile;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::Serialize;

use self::machine::{Happened, SimCache, SimUpstream, SimUpstreamSpec};
use self::rules::{Router, RoutingRule, SimEnd, SimRequest};
use self::traffic::{SimConversation, SimTraffic, TRAFFIC};
use super::cells::{percent, row, seconds};
use crate::report::Report;

/// Requests of all traces, each of which has as many.
const N_REQUESTS: usize = 20_000;

/// The clients' limit of new tokens.
const LIMIT: u32 = 512;

const UPSTREAMS: [SimUpstreamSpec; 4] = [
    SimUpstreamSpec {
        name: "spark",
        prefill_tps: 5_000.0,
        decode_tps: 30.0,
        sharing_cost: 0.05,
        n_slots: 8,
        latency: 0.02,
        cache_tokens: 150_000,
        reports_cached: true,
        slow: None,
    },
    SimUpstreamSpec {
        name: "hosted",
        prefill_tps: 8_000.0,
        decode_tps: 60.0,
        sharing_cost: 0.03,
        n_slots: 16,
        latency: 0.25,
        cache_tokens: 400_000,
        reports_cached: true,
        slow: None,
    },
    SimUpstreamSpec {
        name: "pc",
        prefill_tps: 3_000.0,
        decode_tps: 70.0,
        sharing_cost: 0.2,
        n_slots: 2,
        latency: 0.03,
        cache_tokens: 30_000,
        reports_cached: false,
        slow: Some((3_600.0, 10_800.0, 4.0)),
    },
    SimUpstreamSpec {
        name: "mac",
        prefill_tps: 1_500.0,
        decode_tps: 50.0,
        sharing_cost: 0.1,
        n_slots: 4,
        latency: 0.02,
        cache_tokens: 100_000,
        reports_cached: false,
        slow: None,
    },
];

/// A trace with one rule.
#[derive(Debug, Clone, Serialize)]
pub(super) struct UpstreamLine {
    pub traffic: &'static str,
    pub rule: &'static str,
    pub n_requests: usize,
    /// Time to the last token over that of the best choice at that moment, less 1: median, 95th percentile.
    pub regret: [f64; 2],
    /// Seconds to the first token: median, 99th percentile.
    pub ttft: [f64; 2],
    /// Seconds to the last token, on average.
    pub completion: f64,
    /// The share of all prompts' tokens that were cached.
    pub cached: f64,
    /// The share of requests that each upstream got.
    pub shares: [f64; UPSTREAMS.len()],
}

/// All lines.
#[derive(Debug, Clone, Serialize)]
pub(super) struct UpstreamFigures {
    pub note: &'static str,
    pub lines: Vec<UpstreamLine>,
}

/// Runs every trace with every rule.
pub(super) fn run() -> UpstreamFigures {
    let lines = TRAFFIC
        .iter()
        .flat_map(|traffic| RoutingRule::ALL.map(|rule| simulate(traffic, rule, N_REQUESTS.div_ceil(TRAFFIC.len()))));
    UpstreamFigures { note: "simulation", lines: lines.collect() }
}

/// A request, and what became of it.
#[derive(Debug, Clone, Copy)]
struct Course {
    conversation: usize,
    turn: usize,
    upstream: usize,
    at: f64,
    n_cached: u32,
}

/// Tokens of the prompt that this cache has. The last one is always computed.
fn n_cached(cache: &SimCache, request: &SimRequest) -> u32 {
    let held = request.keys().map(|(key, n)| cache.held(key).min(n));
    held.into_iter().max().unwrap_or(0).min(request.n_prompt - 1)
}

/// A time of the simulation, which has a total order.
#[derive(Debug, Clone, Copy, PartialEq)]
struct At(f64);

impl Eq for At {}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &At) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for At {
    fn cmp(&self, other: &At) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// The state of a run.
struct Simulation {
    rule: RoutingRule,
    traffic: SimTraffic,
    conversations: Vec<SimConversation>,
    /// Turns that are to come: when, and which.
    coming: BinaryHeap<Reverse<(At, usize, usize)>>,
    upstreams: Vec<SimUpstream>,
    caches: Vec<SimCache>,
    router: Router,
    courses: Vec<Course>,
    regrets: Vec<f64>,
    ttfts: Vec<f64>,
    completions: Vec<f64>,
}

fn simulate(traffic: &SimTraffic, rule: RoutingRule, n_requests: usize) -> UpstreamLine {
    let conversations = traffic.conversations(n_requests, 7);
    let coming = conversations.iter().enumerate().map(|(i, conversation)| Reverse((At(conversation.begins), i, 0)));
    let mut simulation = Simulation {
        rule,
        traffic: *traffic,
        coming: coming.collect(),
        conversations,
        upstreams: UPSTREAMS.iter().map(|spec| SimUpstream::new(*spec)).collect(),
        caches: UPSTREAMS.iter().map(|_| SimCache::default()).collect(),
        router: Router::new(rule, &UPSTREAMS, StdRng::seed_from_u64(11)),
        courses: Vec::new(),
        regrets: Vec::new(),
        ttfts: Vec::new(),
        completions: Vec::new(),
    };
    while simulation.step() {}
    simulation.line()
}

impl Simulation {
    /// Goes to the next event. Returns false if there is none.
    fn step(&mut self) -> bool {
        let arrival = self.coming.peek().map_or(f64::INFINITY, |Reverse((At(at), ..))| *at);
        let now = self.upstreams.iter().map(SimUpstream::next_event).fold(arrival, f64::min);
        if !now.is_finite() || (self.coming.is_empty() && self.completions.len() == self.courses.len()) {
            return false;
        }
        for upstream in 0..self.upstreams.len() {
            for happened in self.upstreams[upstream].advance(now) {
                match happened {
                    Happened::Sent(id) => self.sent(upstream, id, now),
                    Happened::FirstToken(id) => self.began(upstream, id, now),
                    Happened::Done(id) => self.ended(upstream, id, now),
                }
            }
        }
        while let Some(Reverse((At(at), conversation, turn))) = self.coming.peek().copied()
            && at <= now
        {
            self.coming.pop();
            self.arrive(conversation, turn, now);
        }
        true
    }

    fn arrive(&mut self, conversation: usize, turn: usize, now: f64) {
        let id = self.courses.len();
        let request = self.request(id, conversation, turn, now);
        let n_reply = self.conversations[conversation].turns[turn].n_reply;
        let missing: Vec<u32> = self.caches.iter().map(|cache| request.n_prompt - n_cached(cache, &request)).collect();
        let times = |missing: &[u32]| -> Vec<f64> {
            let each = self.upstreams.iter().zip(missing);
            each.map(|(it, n_missing)| it.would_take(*n_missing, self.traffic.n_reply).1).collect()
        };
        let exact = times(&missing);
        let upstream = match self.rule {
            RoutingRule::Informed => {
                let believed = times(&self.router.believed_missing(&request));
                self.router.choose(&request, &believed)
            }
            _ => self.router.choose(&request, &exact),
        };
        let best = exact.iter().copied().fold(f64::INFINITY, f64::min);
        self.regrets.push(exact[upstream] / best - 1.0);
        self.router.chosen(upstream, &request);
        self.upstreams[upstream].wait(id, missing[upstream], n_reply);
        self.courses.push(Course { conversation, turn, upstream, at: now, n_cached: 0 });
    }

    fn request(&self, id: usize, conversation: usize, turn: usize, at: f64) -> SimRequest {
        let SimConversation { group, n_shared, ref turns, .. } = self.conversations[conversation];
        SimRequest { id, conversation, group, n_shared, n_prompt: turns[turn].n_prompt, limit: LIMIT, now: at }
    }

    fn sent(&mut self, upstream: usize, id: usize, now: f64) {
        let Course { conversation, turn, at, .. } = self.courses[id];
        let request = self.request(id, conversation, turn, at);
        let n_cached = n_cached(&self.caches[upstream], &request);
        self.courses[id].n_cached = n_cached;
        self.upstreams[upstream].set_missing(id, request.n_prompt - n_cached);
        self.router.sent(upstream, id, now);
    }

    fn began(&mut self, upstream: usize, id: usize, now: f64) {
        let Course { conversation, turn, at, .. } = self.courses[id];
        self.ttfts.push(now - at);
        for (key, n) in self.request(id, conversation, turn, at).keys() {
            self.caches[upstream].keep(key, n, UPSTREAMS[upstream].cache_tokens);
        }
        self.router.began(upstream, id, now);
    }

    fn ended(&mut self, upstream: usize, id: usize, now: f64) {
        let Course { conversation, turn, at, n_cached, .. } = self.courses[id];
        self.completions.push(now - at);
        let turns = &self.conversations[conversation].turns;
        let cached_share = f64::from(n_cached) / f64::from(turns[turn].n_prompt);
        self.router.ended(upstream, id, SimEnd { now, n_tokens: turns[turn].n_reply, cached_share });
        if let Some(next) = turns.get(turn + 1) {
            self.coming.push(Reverse((At(now + next.pause), conversation, turn + 1)));
        }
    }

    fn line(&self) -> UpstreamLine {
        let n = self.courses.len();
        let n_prompt = |course: &Course| f64::from(self.conversations[course.conversation].turns[course.turn].n_prompt);
        let n_cached: f64 = self.courses.iter().map(|course| f64::from(course.n_cached)).sum();
        let mut shares = [0.0; UPSTREAMS.len()];
        self.courses.iter().for_each(|course| shares[course.upstream] += 1.0 / n as f64);
        UpstreamLine {
            traffic: self.traffic.name,
            rule: self.rule.as_str(),
            n_requests: n,
            regret: [50.0, 95.0].map(|p| percentile(&self.regrets, p)),
            ttft: [50.0, 99.0].map(|p| percentile(&self.ttfts, p)),
            completion: self.completions.iter().sum::<f64>() / n as f64,
            cached: n_cached / self.courses.iter().map(n_prompt).sum::<f64>(),
            shares,
        }
    }
}

/// The regret at p95 that is aimed at.
const AIM: f64 = 0.05;

impl UpstreamFigures {
    /// Describes the planner's result in this trace.
    fn beside_oracle(&self, traffic: &str) -> String {
        let line =
            |rule: RoutingRule| self.lines.iter().find(|line| (line.traffic, line.rule) == (traffic, rule.as_str()));
        let (Some(planned), Some(oracle)) = (line(RoutingRule::Planner), line(RoutingRule::Oracle)) else {
            return format!("{traffic} were not run");
        };
        let ratio = planned.completion / oracle.completion;
        let [_, p95] = planned.regret;
        let aim = if p95 <= AIM { "within" } else { "not within" };
        format!(
            "{traffic} take {ratio:.3} times the oracle's time on average, regret at p95 {} ({aim} the aim of {})",
            percent(p95),
            percent(AIM)
        )
    }

    pub(super) fn report(&self) -> Report {
        let mut report = Report::new("Upstreams, simulated");
        report.text(
            "**A simulation**: the endpoint's own planning and learning, and four made-up servers: `spark` (5,000 prompt tokens/s, \
             30 tokens/s of one reply, 8 slots), `hosted` (8,000, 60, 16, and 0.25 s to reach it), `pc` (3,000, 70, 2; four times \
             slower in its second and third hour) and `mac` (1,500, 50, 4). `pc` and `mac` do not report cached tokens; the caches \
             keep 150,000, 400,000, 30,000 and 100,000 tokens.",
        );
        report.text(
            "Regret is the time to the last token at the chosen upstream, over that at the best one, less 1: exact times of the \
             machines, their queues and caches, as if no request came later and every reply were as long as \
             others are on average. The oracle chooses the best one for each request. It knows nothing of the future, and so its \
             choice is not the best for requests after it; but it sees into caches and knows a machine's speed before the first \
             reply shows it, which no router can. `oracle without the caches` has exact speeds and queues, and of the caches what \
             the planner has learned.",
        );
        report.text(
            "The other rules were written from what their projects say: Olla's docs/content/concepts/load-balancing.md; llama-swap's \
             selector `spillover` (issue 933, pull request 902), which follows the order of the configuration; `prefixaware` of vLLM's \
             production-stack (src/vllm_router/routers/routing_logic.py); `cache_aware` of sglang-router, now smg \
             (docs/getting-started/load-balancing.md), which vllm-router has, too, with their defaults 0.3, 64 and 1.5. None of these programs was run, and \
             most of these rules are made for equal machines.",
        );
        report.text(format!(
            "Beside the oracle: {}.",
            TRAFFIC.map(|traffic| self.beside_oracle(traffic.name)).join("; ")
        ));
        for traffic in &TRAFFIC {
            let lines = || self.lines.iter().filter(|line| line.traffic == traffic.name);
            let n_requests = lines().map(|line| line.n_requests).max().unwrap_or(0);
            report.text(format!("{}, {n_requests} requests:", traffic.name));
            let shares = UPSTREAMS.map(|spec| format!("to {}", spec.name));
            let head = ["rule", "regret, p50", "p95", "TTFT, p50", "p99", "completion, mean", "cached"];
            let head = head.map(str::to_owned).into_iter().chain(shares);
            let rows = lines().map(|line| {
                let times = [line.ttft[0], line.ttft[1], line.completion].map(seconds);
                let cells = line.regret.map(percent).into_iter().chain(times).chain([percent(line.cached)]);
                row(line.rule, cells.chain(line.shares.map(percent)))
            });
            report.table(&head.collect::<Vec<_>>(), rows);
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fewer requests than are reported, in which the planner has to learn all the same.
    const N: usize = 3_000;

    #[test]
    fn the_planner_completes_as_early_as_an_oracle_and_earlier_than_every_rule() {
        for traffic in &TRAFFIC {
            let lines = RoutingRule::ALL.map(|rule| simulate(traffic, rule, N));
            lines.iter().for_each(|line| println!("{line:?}"));
            let [planned, others @ .., _, oracle] = &lines;
            assert!(planned.n_requests >= N && oracle.regret == [0.0, 0.0], "{oracle:?}");
            assert!(planned.completion <= 1.05 * oracle.completion, "{planned:?} {oracle:?}");
            assert!(planned.regret[0] <= 0.01, "{planned:?}");
            for other in others {
                assert!(planned.completion <= other.completion, "{planned:?} {other:?}");
            }
        }
    }

    #[test]
    fn agents_and_chats_are_planned_within_five_percent_of_the_best_choice_and_batches_within_fifteen() {
        for (traffic, most) in TRAFFIC.iter().zip([AIM, AIM, 0.15]) {
            let planned = simulate(traffic, RoutingRule::Planner, N);
            assert!(planned.regret[1] <= most, "{planned:?}");
        }
    }
}
