//! Learns from the requests that an upstream answered: its times, and whether it still has what it had.

use crate::cache_reach::{CacheReach, PrefixRun};
use crate::promises::{KeptPromises, MIN_PROMISED};
use crate::upstream_rates::{PromptBacklog, SentPrompt, UpstreamRates, UpstreamReply};

/// Rates and cache of one model at one upstream, as its replies have shown them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LearnedUpstream {
    pub rates: UpstreamRates,
    /// The share of the expected tokens that it had cached.
    promises: KeptPromises,
    reach: CacheReach,
    /// Replies in a row that took much longer or shorter than predicted.
    n_distinct: u32,
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
    pub fn sent(&self, n_prompt: u32, n_promised: u32, n_others: u32, backlog: PromptBacklog) -> SentPrompt {
        let n_missing = f64::from(n_prompt) - self.belief() * f64::from(n_promised);
        SentPrompt { n_missing: n_missing.max(1.0), n_others, backlog }
    }

    /// Learns from a reply. If the upstream does not report cached tokens, they follow from the time to the first token.
    pub fn ended(&mut self, ended: &EndedReply<'_>) {
        let EndedReply { n_prompt, n_promised, runs, cached_share, is_first, reply, age: _ } = *ended;
        let found = match cached_share {
            Some(share) => Some(FoundCache::certain(share.clamp(0.0, 1.0) * f64::from(n_prompt))),
            None => self.seen(ended),
        };
        if let Some(found) = found.filter(|found| is_first && found.is_shown) {
            self.promises.note(n_promised, found.n_had as u32);
            self.reach.learn(runs, found.n_had as u32);
        }
        let is_distinct = is_first && self.is_other_machine(&reply);
        self.n_distinct = if is_distinct { self.n_distinct + 1 } else { 0 };
        if is_distinct && (ended.age >= STALE_SECONDS || self.n_distinct >= MAX_DISTINCT) {
            self.rates.forget_times();
            self.n_distinct = 0;
        }
        let n_had = found.map_or(f64::from(n_promised), |found| found.n_had);
        // One that says that it had everything would stay unknown for ever, and what is unknown is tried first. So until its speed is
        // known, nothing counts as cached that was never sent there.
        let n_rest = f64::from(n_prompt.saturating_sub(n_promised).max(1));
        let is_unknown = self.rates.first_token(&SentPrompt { n_missing: n_rest, ..reply.sent }).is_none();
        let n_had = if is_unknown { n_had.min(f64::from(n_promised)) } else { n_had };
        let n_missing = (f64::from(n_prompt) - n_had).max(1.0);
        // What was in no cache, or in one unexpectedly, was so for the prompts before it, too: nobody knows how long those took.
        let is_surprise = (n_missing - reply.sent.n_missing).abs() > SURPRISE * f64::from(n_prompt);
        let is_wait_known = reply.sent.backlog.n_tokens == 0.0 || !is_surprise;
        let is_certain = found.is_some_and(|found| found.is_certain) || is_unknown;
        self.rates.learn(&UpstreamReply {
            sent: SentPrompt { n_missing, ..reply.sent },
            is_missing_known: reply.is_missing_known && is_first && is_certain && is_wait_known,
            ..reply
        });
    }

    /// Returns true if the reply took so much more or less time than predicted that other figures are as wrong.
    fn is_other_machine(&self, reply: &UpstreamReply) -> bool {
        let first = self.rates.first_token(&reply.sent).map(|first| first.sum());
        let step = self.rates.step(reply.n_running.max(1.0) as u32);
        let steps = f64::from(reply.n_tokens.saturating_sub(1));
        let stalled = self.rates.stall() * reply.prompt_seconds;
        first.is_some_and(|first| {
            let ratio = (reply.first + reply.decode) / (first + steps * step + stalled);
            ratio.is_finite() && !(1.0 / DISTINCT..=DISTINCT).contains(&ratio)
        })
    }

    /// Estimates the cached tokens from the time to the first token. `None`: nothing is measured, or that time does not show it.
    fn seen(&self, ended: &EndedReply<'_>) -> Option<FoundCache> {
        let EndedReply { n_prompt, n_promised, runs, reply, .. } = *ended;
        let first = |n_had: u32| {
            let n_missing = f64::from(n_prompt.saturating_sub(n_had).max(1));
            self.rates.first_token(&SentPrompt { n_missing, ..reply.sent }).map(|first| first.sum())
        };
        let known = runs.iter().map(|run| run.n_tokens).filter(|n| *n < n_prompt && *n >= MIN_PROMISED);
        let parts: Vec<u32> = known.chain([n_promised]).filter(|n| *n > 0).collect();
        if parts.is_empty() {
            return Some(FoundCache::certain(0.0));
        }
        let nothing = first(0)?;
        let most = parts.iter().filter_map(|n| first(*n)).fold(nothing, f64::min);
        let is_alone = reply.sent.n_others == 0 && reply.sent.backlog.n_tokens == 0.0;
        let telling = if is_alone { TELLING_ALONE } else { TELLING };
        if reply.is_whole || nothing < telling * most {
            return None;
        }
        let parts = parts.into_iter().chain([0]).filter_map(|n| Some((n, first(n)?)));
        let off = |predicted: f64| (reply.first / predicted).ln().abs();
        let (n_had, predicted) = parts.clone().min_by(|a, b| off(a.1).total_cmp(&off(b.1)))?;
        let is_like = |other: f64| (1.0 / telling..=telling).contains(&(other / predicted));
        let is_sure = parts.filter(|(n, _)| *n != n_had).all(|(_, other)| !is_like(other));
        // One that takes longer than for the whole prompt is slower than known, whatever it had.
        Some(FoundCache {
            n_had: n_had.into(),
            is_certain: is_sure || n_had == n_promised || reply.first > nothing,
            is_shown: reply.first <= nothing * TELLING_ALONE,
        })
    }
}

/// The part of a prompt that an upstream had cached.
#[derive(Debug, Clone, Copy, PartialEq)]
struct FoundCache {
    /// Tokens.
    n_had: f64,
    /// The time to the first token teaches rates.
    is_certain: bool,
    /// It teaches how much is kept.
    is_shown: bool,
}

impl FoundCache {
    fn certain(n_had: f64) -> FoundCache {
        FoundCache { n_had, is_certain: true, is_shown: true }
    }
}

/// Figures are forgotten after so many replies in a row that show others.
const MAX_DISTINCT: u32 = 3;

/// Older figures are forgotten if a reply shows others.
const STALE_SECONDS: f64 = 600.0;

/// A share of a prompt that was cached or missing unexpectedly, from which on other prompts count as mispredicted, too.
const SURPRISE: f64 = 0.1;

/// How many times longer a first token must take without a cache than with it, so that the time shows which it was.
const TELLING: f64 = 1.5;
const TELLING_ALONE: f64 = 1.2;

/// How many times longer or shorter a reply must take so that all figures are as wrong.
const DISTINCT: f64 = 1.5;

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(learned: &LearnedUpstream, n_promised: u32, cached_share: Option<f64>, first: f64) -> EndedReply<'static> {
        let reply = UpstreamReply {
            sent: learned.sent(2_000, n_promised, 0, PromptBacklog::default()),
            is_missing_known: true,
            first,
            decode: 1.0,
            n_tokens: 11,
            is_whole: false,
            n_running: 1.0,
            prompt_seconds: 0.0,
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
        assert_eq!(learned.sent(2_000, 1_500, 0, PromptBacklog::default()).n_missing, 2_000.0);
    }

    #[test]
    fn a_cache_that_is_not_reported_shows_in_the_time_to_the_first_token() {
        let mut learned = measured();
        (0..5).for_each(|_| learn(&mut learned, 1_500, None, 0.5));
        assert_eq!(learned.belief(), 1.0, "the rest took its time");
        let whole = |learned: &LearnedUpstream| {
            learned.rates.first_token(&learned.sent(2_000, 0, 0, PromptBacklog::default())).unwrap().sum()
        };
        (0..3).for_each(|_| learn(&mut learned, 1_500, None, 1.9));
        assert_eq!(learned.belief(), 0.0, "all of it was computed");
        assert!((1.85..=2.0).contains(&whole(&learned)), "at about the known rate: {}", whole(&learned));
        (0..20).for_each(|_| learn(&mut learned, 1_500, None, 8.0));
        let slow = whole(&learned);
        assert!(slow > 6.0, "a machine that is slower than for a whole prompt is slow: {slow}");
    }

    #[test]
    fn a_cache_that_was_given_up_is_found_again() {
        const RUNS: [PrefixRun; 1] = [PrefixRun { n_tokens: 1_500, distance: 9_000 }];
        let mut learned = measured();
        let reply = |learned: &mut LearnedUpstream, first: f64| {
            let n_promised = learned.held(&RUNS);
            let ended = EndedReply { runs: &RUNS, ..ended(learned, n_promised, None, first) };
            learned.ended(&ended);
        };
        (0..9).for_each(|_| reply(&mut learned, 2.0));
        assert_eq!(learned.held(&RUNS), 0, "nothing is expected any more");
        (0..4).for_each(|_| reply(&mut learned, 0.5));
        assert!(learned.held(&RUNS) == 1_500 && learned.belief() > 0.5, "{learned:?}");
    }

    #[test]
    fn what_was_in_no_cache_teaches_nothing_about_the_wait_behind_other_prompts() {
        let mut learned = measured();
        let backlog = PromptBacklog { n_tokens: 500.0, seconds: 0.5 };
        let before = learned.rates;
        let sent = learned.sent(2_000, 1_500, 1, backlog);
        let missing = ended(&learned, 1_500, Some(0.0), 9.0);
        learned.ended(&EndedReply { reply: UpstreamReply { sent, ..missing.reply }, ..missing });
        assert_eq!((learned.rates.waits, learned.rates.prefill), (before.waits, before.prefill));
        let kept = EndedReply { cached_share: Some(0.75), ..missing };
        learned.ended(&EndedReply { reply: UpstreamReply { sent, ..kept.reply }, ..kept });
        assert!(learned.rates.waits.is_known());
    }

    #[test]
    fn a_machine_that_is_other_than_known_three_times_in_a_row_is_known_anew() {
        let mut learned = measured();
        (0..3).for_each(|_| learn(&mut learned, 0, None, 0.25));
        let first = learned.rates.first_token(&learned.sent(2_000, 0, 0, PromptBacklog::default())).unwrap().sum();
        assert!((first - 0.25).abs() < 0.01, "{first}");
    }

    #[test]
    fn an_upstream_that_says_it_had_everything_is_known_to_be_slow() {
        let mut learned = LearnedUpstream::default();
        (0..4).for_each(|_| learn(&mut learned, 0, Some(1.0), 5.0));
        let first =
            learned.rates.first_token(&learned.sent(2_000, 0, 0, PromptBacklog::default())).map(|first| first.sum());
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
        let first = |learned: &LearnedUpstream| {
            learned.rates.first_token(&learned.sent(2_000, 0, 0, PromptBacklog::default())).unwrap().sum()
        };
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
