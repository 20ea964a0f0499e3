//! Learns from the requests that an upstream answered: its times, and whether it still has what it had.

use crate::cache_reach::{CacheReach, PrefixRun};
use crate::promises::{KeptPromises, MIN_PROMISED};
use crate::upstream_rates::{SentPrompt, UpstreamRates, UpstreamReply};

/// Rates and cache of one model at one upstream, as its replies have shown them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LearnedUpstream {
    pub rates: UpstreamRates,
    /// The share of the expected tokens that it had cached.
    promises: KeptPromises,
    reach: CacheReach,
}

/// A reply that ended, with what was known of its prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EndedReply<'a> {
    /// Tokens of the prompt, as they were estimated.
    pub n_prompt: u32,
    /// Tokens at its start that should have been cached.
    pub n_promised: u32,
    /// The parts of its beginning that were sent there before.
    pub runs: &'a [PrefixRun],
    /// The share of the prompt that was cached, if the upstream reports it.
    pub cached_share: Option<f64>,
    /// It computed its prompt itself: it is the first choice of its request.
    pub is_first: bool,
    /// Seconds from the measurement before it to the request. Infinite without one.
    pub age: f64,
    pub reply: UpstreamReply,
}

impl LearnedUpstream {
    /// The part of a known prefix that is counted on, from 0 to 1.
    pub fn belief(&self) -> f64 {
        self.promises.belief()
    }

    /// Tokens at the start of a prompt that should be cached, of the parts that were sent there before.
    pub fn held(&self, runs: &[PrefixRun]) -> u32 {
        self.reach.held(runs)
    }

    /// The upstream's work for a prompt of `n_prompt` tokens, of which it should have cached `n_promised`.
    pub fn sent(&self, n_prompt: u32, n_promised: u32, n_others: u32, n_backlog: f64) -> SentPrompt {
        let n_missing = f64::from(n_prompt) - self.belief() * f64::from(n_promised);
        SentPrompt { n_missing: n_missing.max(1.0), n_others, n_backlog }
    }

    /// Learns from a reply. If the upstream does not report cached tokens, they follow from the time to the first token.
    pub fn ended(&mut self, ended: &EndedReply<'_>) {
        let EndedReply { n_prompt, n_promised, runs, cached_share, is_first, reply, age: _ } = *ended;
        let found = match cached_share {
            Some(share) => Some(FoundCache { n_had: share.clamp(0.0, 1.0) * f64::from(n_prompt), is_certain: true }),
            None if n_promised < MIN_PROMISED => Some(FoundCache { n_had: f64::from(n_promised), is_certain: true }),
            None => self.seen(ended),
        };
        let is_seen = is_first && (cached_share.is_some() || n_promised >= MIN_PROMISED);
        if let (true, Some(found)) = (is_seen, found) {
            self.promises.note(n_promised, found.n_had as u32);
            self.reach.learn(runs, found.n_had as u32);
        }
        if ended.age >= STALE_SECONDS && self.is_other_machine(&reply) {
            self.rates.forget_times();
        }
        let n_had = found.map_or(f64::from(n_promised), |found| found.n_had);
        // One that says that it had everything would stay unknown for ever, and what is unknown is tried first. So until its speed is
        // known, nothing counts as cached that was never sent there.
        let n_rest = f64::from(n_prompt.saturating_sub(n_promised).max(1));
        let is_unknown = self.rates.first_token(&SentPrompt { n_missing: n_rest, ..reply.sent }).is_none();
        let n_had = if is_unknown { n_had.min(f64::from(n_promised)) } else { n_had };
        self.rates.learn(&UpstreamReply {
            sent: SentPrompt { n_missing: (f64::from(n_prompt) - n_had).max(1.0), ..reply.sent },
            is_missing_known: reply.is_missing_known && is_first && found.is_none_or(|found| found.is_certain),
            ..reply
        });
    }

    /// Returns true if the reply took so much more or less time than predicted that other figures are as wrong.
    fn is_other_machine(&self, reply: &UpstreamReply) -> bool {
        let first = self.rates.first_token(&reply.sent).map(|first| first.sum());
        let step = self.rates.step(reply.n_running.max(1.0) as u32);
        let steps = f64::from(reply.n_tokens.saturating_sub(1));
        first.is_some_and(|first| {
            let ratio = (reply.first + reply.decode) / (first + steps * step);
            ratio.is_finite() && !(1.0 / DISTINCT..=DISTINCT).contains(&ratio)
        })
    }

    /// Estimates the cached tokens from the time to the first token. `None`: nothing is measured, or that time does not show it.
    fn seen(&self, ended: &EndedReply<'_>) -> Option<FoundCache> {
        let EndedReply { n_prompt, n_promised, runs, reply, .. } = *ended;
        if reply.is_whole {
            return None;
        }
        let first = |n_had: u32| {
            let n_missing = f64::from(n_prompt.saturating_sub(n_had).max(1));
            self.rates.first_token(&SentPrompt { n_missing, ..reply.sent }).map(|first| first.sum())
        };
        let (kept, nothing) = (first(n_promised)?, first(0)?);
        if nothing < DISTINCT * kept {
            return None;
        }
        let known = runs.iter().map(|run| run.n_tokens).filter(|n| *n < n_prompt);
        let parts = known.chain([0, n_promised]).filter_map(|n| Some((n, (reply.first / first(n)?).ln().abs())));
        let (n_had, _) = parts.min_by(|a, b| a.1.total_cmp(&b.1))?;
        // One that takes longer than for the whole prompt is slower than known, whatever it had.
        Some(FoundCache { n_had: n_had.into(), is_certain: n_had == n_promised || reply.first > nothing })
    }
}

/// The part of a prompt that an upstream had cached.
#[derive(Debug, Clone, Copy, PartialEq)]
struct FoundCache {
    /// Tokens.
    n_had: f64,
    /// The time to the first token teaches rates.
    is_certain: bool,
}

/// Older figures are forgotten if a reply shows others.
const STALE_SECONDS: f64 = 600.0;

/// How many times longer a first token must take without a cache than with it, so that the time shows which it was.
const DISTINCT: f64 = 1.5;

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(learned: &LearnedUpstream, n_promised: u32, cached_share: Option<f64>, first: f64) -> EndedReply<'static> {
        let reply = UpstreamReply {
            sent: learned.sent(2_000, n_promised, 0, 0.0),
            is_missing_known: true,
            first,
            decode: 1.0,
            n_tokens: 11,
            is_whole: false,
            n_running: 1.0,
            limit: 100.0,
        };
        EndedReply { n_prompt: 2_000, n_promised, runs: &[], cached_share, is_first: true, age: 0.0, reply }
    }

    fn learn(learned: &mut LearnedUpstream, n_promised: u32, cached_share: Option<f64>, first: f64) {
        let ended = ended(learned, n_promised, cached_share, first);
        learned.ended(&ended);
    }

    /// An upstream that computes 2,000 tokens in two seconds.
    fn measured() -> LearnedUpstream {
        let mut learned = LearnedUpstream::default();
        (0..4).for_each(|_| learn(&mut learned, 0, None, 2.0));
        learned
    }

    #[test]
    fn a_cache_that_is_reported_is_believed_as_it_was_kept() {
        let mut learned = measured();
        learn(&mut learned, 1_500, Some(0.75), 0.5);
        assert_eq!(learned.belief(), 1.0);
        (0..3).for_each(|_| learn(&mut learned, 1_500, Some(0.0), 2.0));
        assert_eq!(learned.belief(), 0.0);
        assert_eq!(learned.sent(2_000, 1_500, 0, 0.0).n_missing, 2_000.0);
    }

    #[test]
    fn a_cache_that_is_not_reported_shows_in_the_time_to_the_first_token() {
        let mut learned = measured();
        (0..5).for_each(|_| learn(&mut learned, 1_500, None, 0.5));
        assert_eq!(learned.belief(), 1.0, "the rest took its time");
        let before = learned.rates.prefill;
        (0..3).for_each(|_| learn(&mut learned, 1_500, None, 1.9));
        assert_eq!(learned.belief(), 0.0, "all of it was computed");
        assert_eq!(learned.rates.prefill, before, "which says nothing about the rate");
        (0..20).for_each(|_| learn(&mut learned, 1_500, None, 8.0));
        let slow = learned.rates.first_token(&learned.sent(2_000, 0, 0, 0.0)).unwrap().sum();
        assert!(slow > 6.0, "a machine that is slower than for a whole prompt is slow: {slow}");
    }

    #[test]
    fn an_upstream_that_says_it_had_everything_is_known_to_be_slow() {
        let mut learned = LearnedUpstream::default();
        (0..4).for_each(|_| learn(&mut learned, 0, Some(1.0), 5.0));
        let first = learned.rates.first_token(&learned.sent(2_000, 0, 0, 0.0)).map(|first| first.sum());
        assert!(first.is_some_and(|first| first >= 5.0), "{first:?}");
    }

    #[test]
    fn a_cache_that_saves_little_time_shows_nothing() {
        let mut learned = measured();
        (0..9).for_each(|_| learn(&mut learned, 200, None, 2.0));
        assert_eq!(learned.belief(), 1.0);
    }

    #[test]
    fn a_machine_that_was_not_measured_for_long_is_known_anew_from_one_reply() {
        let mut learned = measured();
        let first =
            |learned: &LearnedUpstream| learned.rates.first_token(&learned.sent(2_000, 0, 0, 0.0)).unwrap().sum();
        learn(&mut learned, 0, None, 0.5);
        assert!(first(&learned) > 1.0, "one of many");
        let later = EndedReply { age: 601.0, ..ended(&learned, 0, None, 0.5) };
        learned.ended(&later);
        assert!((first(&learned) - 0.5).abs() < 0.01, "{}", first(&learned));
    }

    #[test]
    fn later_choices_teach_nothing_about_the_prompt() {
        let mut learned = measured();
        let before = learned;
        let ended = EndedReply { is_first: false, ..ended(&learned, 1_500, Some(0.0), 50.0) };
        learned.ended(&ended);
        assert_eq!((learned.belief(), learned.rates.prefill), (1.0, before.rates.prefill));
    }
}
