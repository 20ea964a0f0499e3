//! A simulated upstream: slots, a prompt at a time, replies that share steps, and a cache of prompts.

use std::collections::{HashMap, VecDeque};

/// The properties of a simulated upstream.
#[derive(Debug, Clone, Copy)]
pub(super) struct SimUpstreamSpec {
    pub name: &'static str,
    /// Prompt tokens per second.
    pub prefill_tps: f64,
    /// Tokens per second of one reply alone.
    pub decode_tps: f64,
    /// The share by which each further reply lengthens a step.
    pub sharing_cost: f64,
    pub n_slots: u32,
    /// Seconds from a request to the begin of its work.
    pub latency: f64,
    /// Tokens that its cache keeps.
    pub cache_tokens: u64,
    /// Its usage has the number of cached tokens.
    pub reports_cached: bool,
    /// From the first to the second second it is this many times slower.
    pub slow: Option<(f64, f64, f64)>,
}

/// The share of its rate that a prompt keeps while replies are generated, and replies while a prompt is computed.
const PREFILL_SHARE: f64 = 0.8;
const DECODE_SHARE: f64 = 0.5;

/// A request that was sent to an upstream.
#[derive(Debug, Clone, Copy)]
pub(super) struct SimJob {
    pub id: usize,
    /// When its prompt can be computed.
    pub ready: f64,
    /// Prompt tokens to compute.
    pub prompt_left: f64,
    /// Tokens to generate after the first one, and those that were.
    pub tokens_left: f64,
    pub n_generated: f64,
    pub is_begun: bool,
}

/// The outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Happened {
    /// It has a slot, and is sent.
    Sent(usize),
    FirstToken(usize),
    Done(usize),
}

/// The requests of one upstream.
#[derive(Debug, Clone)]
pub(super) struct SimUpstream {
    pub spec: SimUpstreamSpec,
    pub now: f64,
    waiting: VecDeque<SimJob>,
    running: Vec<SimJob>,
}

/// The rates of a moment.
struct SimPace {
    prefill: f64,
    decode: f64,
}

impl SimUpstream {
    pub(super) fn new(spec: SimUpstreamSpec) -> SimUpstream {
        SimUpstream { spec, now: 0.0, waiting: VecDeque::new(), running: Vec::new() }
    }

    /// A request waits for a slot. It has so many prompt tokens to compute, and so many in its reply.
    pub(super) fn wait(&mut self, id: usize, n_missing: u32, n_tokens: u32) {
        let job = SimJob {
            id,
            ready: f64::INFINITY,
            prompt_left: f64::from(n_missing.max(1)),
            tokens_left: f64::from(n_tokens.saturating_sub(1)),
            n_generated: 0.0,
            is_begun: false,
        };
        self.waiting.push_back(job);
    }

    /// A request that has just got its slot has so many prompt tokens to compute.
    pub(super) fn set_missing(&mut self, id: usize, n_missing: u32) {
        let job = self.running.iter_mut().find(|job| job.id == id);
        job.into_iter().for_each(|job| job.prompt_left = f64::from(n_missing.max(1)));
    }

    /// Seconds until a request that is sent now would have its first and its last token, if none came after it. Nobody knows how long
    /// a reply will be: each is as long as replies from `least` to `most` tokens are on average that have as many as it has.
    pub(super) fn would_take(&self, n_missing: u32, [least, most]: [u32; 2]) -> (f64, f64) {
        const TRIED: usize = usize::MAX;
        let mut copy = self.clone();
        for job in copy.running.iter_mut().chain(&mut copy.waiting) {
            let so_far = job.n_generated + 1.0;
            job.tokens_left = ((f64::from(least).max(so_far) + f64::from(most)) / 2.0 - so_far).max(1.0);
        }
        copy.wait(TRIED, n_missing, least.midpoint(most));
        let mut first = f64::INFINITY;
        let mut next = copy.now;
        loop {
            for happened in copy.advance(next) {
                match happened {
                    Happened::FirstToken(TRIED) => first = copy.now - self.now,
                    Happened::Done(TRIED) => return (first, copy.now - self.now),
                    Happened::Sent(_) | Happened::FirstToken(_) | Happened::Done(_) => {}
                }
            }
            next = copy.next_event();
        }
    }

    /// The request whose prompt is being computed.
    fn prompt(&self) -> Option<usize> {
        self.running.iter().position(|job| !job.is_begun && job.ready <= self.now + TINY)
    }

    fn pace(&self) -> SimPace {
        let slow = self.spec.slow.filter(|(from, to, _)| (*from..*to).contains(&self.now));
        let speed = 1.0 / slow.map_or(1.0, |(_, _, factor)| factor);
        let n_decoding = self.running.iter().filter(|job| job.is_begun).count();
        let has_prompt = self.prompt().is_some();
        let step = 1.0 + self.spec.sharing_cost * n_decoding.saturating_sub(1) as f64;
        SimPace {
            prefill: speed * self.spec.prefill_tps * if n_decoding > 0 { PREFILL_SHARE } else { 1.0 },
            decode: speed * self.spec.decode_tps / step * if has_prompt { DECODE_SHARE } else { 1.0 },
        }
    }

    /// When something happens next. Infinite if nothing is to be done.
    pub(super) fn next_event(&self) -> f64 {
        let SimPace { prefill, decode } = self.pace();
        let slot = (!self.waiting.is_empty() && self.running.len() < self.spec.n_slots as usize).then_some(self.now);
        let ready = self.running.iter().map(|job| job.ready).filter(|ready| *ready > self.now + TINY);
        let prompt = self.prompt().map(|i| self.now + self.running[i].prompt_left / prefill);
        let replies = self.running.iter().filter(|job| job.is_begun).map(|job| self.now + job.tokens_left / decode);
        let speed = self.spec.slow.into_iter().flat_map(|(from, to, _)| [from, to]).filter(|at| *at > self.now);
        slot.into_iter().chain(ready).chain(prompt).chain(replies).chain(speed).fold(f64::INFINITY, f64::min)
    }

    /// Lets time pass until `to`, which is not after the next event.
    pub(super) fn advance(&mut self, to: f64) -> Vec<Happened> {
        let SimPace { prefill, decode } = self.pace();
        let seconds = to - self.now;
        let mut happened = Vec::new();
        if let Some(i) = self.prompt() {
            self.running[i].prompt_left -= seconds * prefill;
        }
        for job in self.running.iter_mut().filter(|job| job.is_begun) {
            job.tokens_left -= seconds * decode;
            job.n_generated += seconds * decode;
        }
        self.now = to;
        for job in &mut self.running {
            if !job.is_begun && job.prompt_left <= TINY {
                job.is_begun = true;
                happened.push(Happened::FirstToken(job.id));
            }
        }
        let is_done = |job: &SimJob| job.is_begun && job.tokens_left <= TINY;
        happened.extend(self.running.iter().filter(|job| is_done(job)).map(|job| Happened::Done(job.id)));
        self.running.retain(|job| !is_done(job));
        while self.running.len() < self.spec.n_slots as usize
            && let Some(job) = self.waiting.pop_front()
        {
            happened.push(Happened::Sent(job.id));
            self.running.push(SimJob { ready: to + self.spec.latency, ..job });
        }
        happened
    }
}

/// Less of a token or a second counts as none.
const TINY: f64 = 1e-6;

/// The prompts that an upstream has cached: tokens at the beginning of conversations, and of groups that share one. Those that were
/// used least recently go first.
#[derive(Debug, Clone, Default)]
pub(super) struct SimCache {
    kept: HashMap<PrefixKey, (u32, u64)>,
    n_tokens: u64,
    clock: u64,
}

/// The owner of a cached beginning of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum PrefixKey {
    Conversation(usize),
    Group(usize),
}

impl SimCache {
    pub(super) fn held(&self, key: PrefixKey) -> u32 {
        self.kept.get(&key).map_or(0, |(n, _)| *n)
    }

    /// The prompt's beginning was computed, or read.
    pub(super) fn keep(&mut self, key: PrefixKey, n_tokens: u32, most: u64) {
        self.clock += 1;
        let (n, used) = self.kept.entry(key).or_default();
        self.n_tokens += u64::from(n_tokens.saturating_sub(*n));
        (*n, *used) = (n_tokens.max(*n), self.clock);
        while self.n_tokens > most
            && let Some(oldest) = self.kept.iter().min_by_key(|(key, (_, used))| (*used, **key)).map(|(key, _)| *key)
        {
            self.n_tokens -= self.kept.remove(&oldest).map_or(0, |(n, _)| u64::from(n));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const SPEC: SimUpstreamSpec = SimUpstreamSpec {
        name: "it",
        prefill_tps: 1_000.0,
        decode_tps: 10.0,
        sharing_cost: 0.0,
        n_slots: 1,
        latency: 0.1,
        cache_tokens: 1_000,
        reports_cached: true,
        slow: None,
    };

    fn close(found: (f64, f64), expected: (f64, f64)) {
        assert!((found.0 - expected.0).abs() < 1e-3 && (found.1 - expected.1).abs() < 1e-3, "{found:?} {expected:?}");
    }

    #[test]
    fn a_request_waits_for_its_slot_and_takes_its_time() {
        let mut upstream = SimUpstream::new(SPEC);
        close(upstream.would_take(1_000, [11, 11]), (1.1, 2.1));
        upstream.wait(0, 1_000, 11);
        close(upstream.would_take(1_000, [11, 11]), (3.2, 4.2));
        let two = SimUpstream::new(SimUpstreamSpec { n_slots: 2, ..SPEC });
        let mut both = two.clone();
        both.wait(0, 1_000, 11);
        let (first, _) = both.would_take(1_000, [11, 11]);
        assert!(first > 2.1 && first < 2.5, "the second prompt follows the first one: {first}");
        let slow = SimUpstream::new(SimUpstreamSpec { slow: Some((0.0, 100.0, 2.0)), ..SPEC });
        close(slow.would_take(1_000, [11, 11]), (2.1, 4.1));
    }

    #[test]
    fn a_cache_keeps_what_was_used_last() {
        let mut cache = SimCache::default();
        let [a, b, c] = [0, 1, 2].map(PrefixKey::Conversation);
        cache.keep(a, 400, 1_000);
        cache.keep(b, 400, 1_000);
        cache.keep(a, 500, 1_000);
        assert_eq!((cache.held(a), cache.held(b)), (500, 400));
        cache.keep(c, 300, 1_000);
        assert_eq!((cache.held(a), cache.held(b), cache.held(c)), (500, 0, 300));
    }
}
