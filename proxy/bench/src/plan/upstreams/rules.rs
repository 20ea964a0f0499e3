//! The compared choices of upstreams: by Baton's planner, and by the documented rules of other routers.

use std::collections::HashMap;

use baton_planner::cache_reach::PrefixRun;
use baton_planner::snapshot::RequestSize;
use baton_planner::upstream_learning::{EndedReply, LearnedUpstream};
use baton_planner::upstream_rates::{PromptBacklog, SentPrompt, UpstreamReply};
use baton_planner::upstream_work::UpstreamWork;
use baton_planner::upstreams::{PlannedTarget, UpstreamSnapshot, UpstreamView, choose};
use rand::RngExt;
use rand::rngs::StdRng;

use super::machine::{PrefixKey, SimUpstreamSpec};

/// Tokens between two hashes of a prompt's beginnings, as in the endpoint.
const BLOCK: u32 = 64;

/// A request that is to be sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct SimRequest {
    pub id: usize,
    pub conversation: usize,
    pub group: usize,
    pub n_shared: u32,
    pub n_prompt: u32,
    pub limit: u32,
    pub now: f64,
}

impl SimRequest {
    pub(super) fn keys(&self) -> [(PrefixKey, u32); 2] {
        let conversation = PrefixKey::Conversation(self.conversation);
        [(conversation, self.n_prompt), (PrefixKey::Group(self.group), self.n_shared)]
    }
}

/// The end of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct SimEnd {
    pub now: f64,
    /// Tokens of the reply.
    pub n_tokens: u32,
    /// The share of the prompt that was cached.
    pub cached_share: f64,
}

/// A rule that chooses upstreams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RoutingRule {
    Planner,
    /// Olla's `least-connections` (docs/content/concepts/load-balancing.md).
    LeastConnections,
    /// All routers have it; vllm-router calls it `roundrobin`.
    RoundRobin,
    /// llama-swap's selector `spillover`: the first target with a free slot (its issue 933 and pull request 902).
    Spillover,
    /// vLLM production-stack's `prefixaware`: the longest known beginning, whatever the load; of equals any
    /// (src/vllm_router/routers/routing_logic.py).
    LongestPrefix,
    /// `cache_aware` of sglang-router, now smg, and of vllm-router (docs/getting-started/load-balancing.md). If the busiest upstream
    /// has 64 requests more than the idlest, and 1.5 times as many, the least loaded one. Otherwise the longest known beginning
    /// if that is 0.3 of the prompt, else the one with the fewest known tokens.
    CacheAware,
    /// The oracle with the planner's knowledge of caches: the best that can be chosen without asking the upstreams.
    Informed,
    /// The exact times of every upstream, if no request came later.
    Oracle,
}

impl RoutingRule {
    pub(super) const ALL: [RoutingRule; 8] = [
        RoutingRule::Planner,
        RoutingRule::LeastConnections,
        RoutingRule::RoundRobin,
        RoutingRule::Spillover,
        RoutingRule::LongestPrefix,
        RoutingRule::CacheAware,
        RoutingRule::Informed,
        RoutingRule::Oracle,
    ];

    /// Returns true if it follows from replies what is cached. The others take what they have sent for it.
    fn learns_caches(self) -> bool {
        matches!(self, RoutingRule::Planner | RoutingRule::Informed)
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            RoutingRule::Planner => "Baton's planner",
            RoutingRule::LeastConnections => "least connections (Olla)",
            RoutingRule::RoundRobin => "round robin (Olla, vllm-router)",
            RoutingRule::Spillover => "first with a free slot (llama-swap)",
            RoutingRule::LongestPrefix => "longest prefix (vllm-router)",
            RoutingRule::CacheAware => "cache-aware (sglang-router)",
            RoutingRule::Informed => "oracle without the caches",
            RoutingRule::Oracle => "oracle",
        }
    }
}

const CACHE_THRESHOLD: f64 = 0.3;
const BALANCE_ABSOLUTE: u32 = 64;
const BALANCE_RELATIVE: f64 = 1.5;

/// A request under way.
#[derive(Debug, Clone)]
struct RoutedRequest {
    request: SimRequest,
    /// When it was sent, and what its upstream had to do then. `None`: it waits for a slot.
    sent: Option<(f64, SentPrompt)>,
    n_promised: u32,
    runs: Vec<PrefixRun>,
    first: Option<f64>,
}

/// A router's knowledge of one upstream.
#[derive(Debug, Default)]
struct KnownUpstream {
    learned: LearnedUpstream,
    /// Tokens that were sent there, and when they were used last, on the clock of `n_known_tokens`.
    prefixes: HashMap<PrefixKey, (u32, u64)>,
    n_known_tokens: u64,
    measured_at: Option<f64>,
    n_passed_over: u64,
    open: HashMap<usize, RoutedRequest>,
    work: UpstreamWork,
}

impl KnownUpstream {
    fn n_open(&self) -> u32 {
        self.open.len() as u32
    }

    /// Requests that have a slot.
    fn n_sent(&self) -> u32 {
        self.open.values().filter(|open| open.sent.is_some()).count() as u32
    }

    /// Tokens that a reply is expected to have.
    fn n_output(&self, request: &SimRequest) -> f64 {
        self.learned.rates.output.at(request.limit.into()).unwrap_or_else(|| request.limit.into())
    }

    /// The parts of the prompt's beginning that were sent there before, the shorter first.
    fn runs(&self, request: &SimRequest) -> Vec<PrefixRun> {
        let run = |(key, n): (PrefixKey, u32)| {
            let (n_known, used) = self.prefixes.get(&key)?;
            let n_tokens = n.min(*n_known) / BLOCK * BLOCK;
            Some(PrefixRun { n_tokens, distance: self.n_known_tokens - used })
        };
        let mut runs: Vec<PrefixRun> = request.keys().into_iter().filter_map(run).collect();
        runs.sort_unstable_by_key(|run| run.n_tokens);
        runs
    }

    /// Tokens at the start of the prompt that were sent there before.
    fn n_held(&self, request: &SimRequest) -> u32 {
        self.runs(request).last().map_or(0, |run| run.n_tokens)
    }
}

/// A router with one rule.
pub(super) struct Router {
    rule: RoutingRule,
    specs: Vec<SimUpstreamSpec>,
    known: Vec<KnownUpstream>,
    turn: usize,
    rng: StdRng,
}

impl Router {
    pub(super) fn new(rule: RoutingRule, specs: &[SimUpstreamSpec], rng: StdRng) -> Router {
        let known = specs.iter().map(|_| KnownUpstream::default()).collect();
        Router { rule, specs: specs.to_vec(), known, turn: 0, rng }
    }

    /// Tokens of the prompt that each upstream probably has to compute.
    pub(super) fn believed_missing(&self, request: &SimRequest) -> Vec<u32> {
        let missing = |known: &KnownUpstream| {
            let n_promised = known.learned.held(&known.runs(request)).min(request.n_prompt - 1);
            known.learned.sent(request.n_prompt, n_promised, 0, PromptBacklog::default()).n_missing as u32
        };
        self.known.iter().map(missing).collect()
    }

    /// The upstream that gets this request. `exact` has the seconds to its end at each, by exact speeds.
    pub(super) fn choose(&mut self, request: &SimRequest, exact: &[f64]) -> usize {
        let all = 0..self.specs.len();
        let n_open = |i: &usize| self.known[*i].n_open();
        let n_held = |i: &usize| self.known[*i].n_held(request);
        let chosen = match self.rule {
            RoutingRule::Planner => self.planned(request),
            RoutingRule::LeastConnections => all.min_by_key(n_open),
            RoutingRule::RoundRobin => Some(self.turn % self.specs.len()),
            RoutingRule::Spillover => all.clone().find(|i| n_open(i) < self.specs[*i].n_slots).or(Some(0)),
            RoutingRule::LongestPrefix => {
                let longest = all.clone().map(|i| n_held(&i)).max();
                let equals: Vec<usize> = all.filter(|i| Some(n_held(i)) == longest).collect();
                equals.get(self.rng.random_range(0..equals.len())).copied()
            }
            RoutingRule::CacheAware => {
                let (busiest, idlest) = (all.clone().map(|i| n_open(&i)).max(), all.clone().map(|i| n_open(&i)).min());
                let (busiest, idlest) = (busiest.unwrap_or(0), idlest.unwrap_or(0));
                let is_unbalanced =
                    busiest - idlest > BALANCE_ABSOLUTE && f64::from(busiest) > BALANCE_RELATIVE * f64::from(idlest);
                let longest = all.clone().max_by_key(n_held);
                let matches = longest.filter(|i| f64::from(n_held(i)) > CACHE_THRESHOLD * f64::from(request.n_prompt));
                match matches {
                    _ if is_unbalanced => all.min_by_key(n_open),
                    Some(longest) => Some(longest),
                    None => all.min_by_key(|i| self.known[*i].n_known_tokens),
                }
            }
            RoutingRule::Informed | RoutingRule::Oracle => all.min_by(|a, b| exact[*a].total_cmp(&exact[*b])),
        };
        self.turn += 1;
        chosen.unwrap_or(0)
    }

    fn planned(&self, request: &SimRequest) -> Option<usize> {
        match choose(&self.snapshot(request))?.target {
            PlannedTarget::Upstream(i) => Some(i),
            PlannedTarget::Own => None,
        }
    }

    fn snapshot(&self, request: &SimRequest) -> UpstreamSnapshot {
        let views = self.specs.iter().zip(&self.known).map(|(spec, known)| UpstreamView {
            name: spec.name.to_owned(),
            barred: None,
            n_slots: spec.n_slots,
            n_running: known.n_sent(),
            n_waiting: known.n_open() - known.n_sent(),
            n_backlog: known.work.n_backlog() as u32,
            open: known.work.open(request.now, known.learned.rates.constant_seconds()),
            n_held: known.learned.held(&known.runs(request)),
            belief: known.learned.belief(),
            rates: known.learned.rates,
            age: known.measured_at.map_or(f64::INFINITY, |at| request.now - at),
            n_passed_over: known.n_passed_over,
            n_untaught: 0,
        });
        let upstreams: Vec<UpstreamView> = views.collect();
        let lengths = upstreams.iter().filter_map(|view| view.rates.output.at(request.limit.into()));
        let lengths: Vec<f64> = lengths.collect();
        let n_output = lengths.iter().sum::<f64>() / lengths.len().max(1) as f64;
        let size = RequestSize { n_prompt: request.n_prompt, n_replayed: 0, n_output: n_output.max(1.0) };
        UpstreamSnapshot { request: size, upstreams, own: None, turn: self.turn }
    }

    /// The request waits for a slot of this upstream.
    pub(super) fn chosen(&mut self, upstream: usize, request: &SimRequest) {
        for (i, known) in self.known.iter_mut().enumerate() {
            known.n_passed_over += u64::from(i != upstream);
        }
        let known = &mut self.known[upstream];
        let runs = known.runs(request);
        let n_promised = known.learned.held(&runs).min(request.n_prompt - 1);
        let n_missing = known.learned.sent(request.n_prompt, n_promised, 0, PromptBacklog::default()).n_missing;
        let n_output = known.n_output(request);
        known.work.wait(request.id as u64, n_missing, n_output);
        let open = RoutedRequest { request: *request, sent: None, n_promised, runs, first: None };
        known.open.insert(request.id, open);
        if !self.rule.learns_caches() {
            known.remember(request);
        }
    }

    /// The request has a slot, and is sent.
    pub(super) fn sent(&mut self, upstream: usize, id: usize, now: f64) {
        let known = &mut self.known[upstream];
        let (n_others, backlog) = (known.n_sent(), known.learned.rates.backlog(known.work.sent_prompts()));
        let Some(open) = known.open.get(&id) else { return };
        let runs = known.runs(&open.request);
        let n_promised = known.learned.held(&runs).min(open.request.n_prompt - 1);
        let sent = known.learned.sent(open.request.n_prompt, n_promised, n_others, backlog);
        let n_output = known.n_output(&open.request);
        known.work.send(id as u64, sent.n_missing, n_output, now);
        if let Some(open) = known.open.get_mut(&id) {
            (open.sent, open.n_promised, open.runs) = (Some((now, sent)), n_promised, runs);
        }
    }

    /// The first token of a request has come.
    pub(super) fn began(&mut self, upstream: usize, id: usize, now: f64) {
        let known = &mut self.known[upstream];
        known.work.begin(id as u64, now, known.learned.rates.constant_seconds());
        let Some(open) = known.open.get_mut(&id) else { return };
        open.first = Some(now);
        let request = open.request;
        known.remember(&request);
    }

    /// The request has ended.
    pub(super) fn ended(&mut self, upstream: usize, id: usize, end: SimEnd) {
        let SimEnd { now, n_tokens, cached_share } = end;
        let reports = self.specs[upstream].reports_cached;
        let known = &mut self.known[upstream];
        let generated = known.work.end(id as u64, now, known.learned.rates.constant_seconds()).unwrap_or_default();
        let Some(open) = known.open.remove(&id) else { return };
        let Some((first, (at, sent))) = open.first.zip(open.sent) else { return };
        let reply = UpstreamReply {
            sent,
            is_missing_known: true,
            first: first - at,
            decode: now - first,
            n_tokens,
            is_whole: false,
            n_running: generated.n_together,
            prompt_seconds: generated.prompt_seconds,
            limit: open.request.limit.into(),
        };
        let ended = EndedReply {
            n_prompt: open.request.n_prompt,
            n_promised: open.n_promised,
            runs: &open.runs,
            cached_share: reports.then_some(cached_share),
            is_first: true,
            age: known.measured_at.map_or(f64::INFINITY, |before| at - before),
            reply,
        };
        known.learned.ended(&ended);
        known.measured_at = Some(now);
        known.n_passed_over = 0;
    }
}

impl KnownUpstream {
    fn remember(&mut self, request: &SimRequest) {
        self.n_known_tokens += u64::from(request.n_prompt - self.n_held(request).min(request.n_prompt));
        for (key, n) in request.keys() {
            let (known, used) = self.prefixes.entry(key).or_default();
            (*known, *used) = (n.max(*known), self.n_known_tokens);
        }
    }
}
