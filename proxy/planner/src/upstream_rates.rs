//! Measured times of an upstream, of which only requests and replies are seen.
//!
//! A time to first token has four parts: a constant one, the prompt's computation, the prompts that were sent before it, and what
//! other replies cost it beyond that. Each is averaged like a node's rates.

use crate::rates::{Curve, ewma};
use crate::time_fit::TimeFit;
use crate::upstream_work::GeneratedTime;

/// A prompt with fewer tokens to compute measures the constant part of the time to first token, one with more its own rate.
pub const MIN_PREFILL_TOKENS: f64 = 64.0;

/// Fewer steps measure the network and not the rate.
const MIN_STEPS: f64 = 4.0;

/// Unless they took this many seconds: then the network is not the cause.
const MIN_SLOW: f64 = 1.0;

/// The time for a token of a reply that came in one piece, relative to that for a token of its prompt, until both are measured apart.
const REPLY_TOKEN_COST: f64 = 20.0;

/// The smallest part of a time to first token that counts as the prompt's: a constant part that has fallen must not leave nothing.
const MIN_PROMPT_SHARE: f64 = 0.1;

/// The share of its pace that a reply loses while a prompt is computed, until it is measured.
const FIRST_STALL: f64 = 0.5;

/// It is never less: nothing would teach it any more.
const MIN_STALL: f64 = 0.02;

/// The smallest part of a reply's time that counts as its own steps.
const MIN_STEPS_SHARE: f64 = 0.1;

/// The share of a size's change that other sizes follow: mostly a machine's speed changes as a whole.
const FOLLOWING: f64 = 0.5;

/// The share by which prompts of other lengths come nearer to the rate of a measured one.
const APPROACHING: f64 = 0.03;

/// Seconds that count as no wait.
const NO_WAIT: f64 = 1e-4;

/// After this many seconds half of what is known of refusals counts.
const REFUSAL_HALF_LIFE: f64 = 600.0;

/// Measured times of one model at one upstream.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct UpstreamRates {
    /// Seconds to the first token of a prompt with nothing to compute: connection, gateway, template, first step. 0 until a short
    /// prompt measured it; see [`UpstreamRates::constant_seconds`].
    pub constant: f64,
    /// Times to first token by the tokens that were computed.
    pub line: TimeFit,
    /// Prompt tokens per second, by the number of tokens to compute.
    pub prefill: Curve,
    /// 1 ÷ the seconds that replies running there cost a first token beyond their prompts, by their number.
    pub waits: Curve,
    /// Tokens per second of one reply, by the number of replies.
    pub decode: Curve,
    /// The share of its pace that a reply loses while a prompt is computed. 0 until measured.
    pub prompt_stall: f64,
    /// Tokens of a reply, by its client's limit.
    pub output: Curve,
    /// Share of requests that were refused or failed before their first token, the latest counting most.
    pub refused_share: f64,
    /// Seconds until it was refused. 0 until measured.
    pub refused_seconds: f64,
    /// Replies that ended. The first one teaches nothing else: it may have loaded the model.
    pub n_replies: u32,
}

/// The work of an upstream when a prompt is sent.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SentPrompt {
    /// Tokens of the prompt that it has to compute.
    pub n_missing: f64,
    /// Other replies that it generates, or whose prompts it computes.
    pub n_others: u32,
    /// Other prompts that it has not computed yet.
    pub backlog: PromptBacklog,
}

/// Prompts that are not computed yet.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PromptBacklog {
    /// Their tokens that have to be computed.
    pub n_tokens: f64,
    /// The seconds that these probably take.
    pub seconds: f64,
}

/// The parts of a time to first token, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FirstTokenSeconds {
    /// The prompts that were sent before it.
    pub before: f64,
    /// Additional time that other replies cost it.
    pub beyond: f64,
    /// The prompt's computation.
    pub prefill: f64,
    /// The constant part.
    pub constant: f64,
}

impl FirstTokenSeconds {
    /// The wait for others.
    pub fn wait(&self) -> f64 {
        self.before + self.beyond
    }

    /// All of them.
    pub fn sum(&self) -> f64 {
        self.wait() + self.prefill + self.constant
    }
}

/// A reply that ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UpstreamReply {
    pub sent: SentPrompt,
    /// The known number of tokens to compute was right; otherwise the times of the first token teach nothing.
    pub is_missing_known: bool,
    /// From the request to the first token, seconds; to the whole reply if that came in one piece.
    pub first: f64,
    /// From the first token to the last one, seconds. 0 if the reply came in one piece.
    pub decode: f64,
    /// Tokens of the reply.
    pub n_tokens: u32,
    /// The reply came in one piece.
    pub is_whole: bool,
    /// Replies that were generated there, on average, with this one.
    pub n_running: f64,
    /// The part of `decode` in which prompts were computed, seconds.
    pub prompt_seconds: f64,
    /// The client's limit of tokens, or a number larger than any limit.
    pub limit: f64,
}

impl UpstreamRates {
    /// Returns true if a first token can be predicted.
    pub fn is_known(&self) -> bool {
        self.constant > 0.0 || self.prefill.is_known()
    }

    /// The constant part of a time to first token: of short prompts, or what longer ones of different lengths have in common.
    pub fn constant_seconds(&self) -> f64 {
        if self.constant > 0.0 { self.constant } else { self.line.constant() }
    }

    /// The predicted time to first token; `None` if nothing was measured for prompts of about this length.
    pub fn first_token(&self, sent: &SentPrompt) -> Option<FirstTokenSeconds> {
        let SentPrompt { n_missing, n_others, backlog } = *sent;
        let prefill = match self.constant > 0.0 && n_missing < MIN_PREFILL_TOKENS {
            true => 0.0,
            false => n_missing / self.prefill.at(n_missing)?,
        };
        let beyond = if n_others > 0 { self.waits.at(n_others.into()).map_or(0.0, |rate| 1.0 / rate) } else { 0.0 };
        Some(FirstTokenSeconds { before: backlog.seconds, beyond, prefill, constant: self.constant_seconds() })
    }

    /// Seconds in which a prompt with so many tokens to compute is computed. 0 until measured.
    pub fn prompt_seconds(&self, n_missing: f64) -> f64 {
        self.prefill.at(n_missing).map_or(0.0, |rate| n_missing / rate)
    }

    /// The time of prompts with so many tokens to compute.
    pub fn backlog(&self, n_missing: impl Iterator<Item = f64>) -> PromptBacklog {
        n_missing.fold(PromptBacklog::default(), |sum, n| PromptBacklog {
            n_tokens: sum.n_tokens + n,
            seconds: sum.seconds + self.prompt_seconds(n),
        })
    }

    /// Seconds for a token of one of so many replies; 0 until measured, so that it is measured.
    pub fn step(&self, n_replies: u32) -> f64 {
        self.decode.at(n_replies.into()).map_or(0.0, |rate| 1.0 / rate)
    }

    /// The share of its pace that a reply loses while a prompt is computed.
    pub fn stall(&self) -> f64 {
        if self.prompt_stall > 0.0 { self.prompt_stall.min(1.0) } else { FIRST_STALL }
    }

    /// Tokens that a reply probably has after this time.
    pub fn n_generated(&self, time: &GeneratedTime) -> f64 {
        let step = self.step(time.n_together.round().max(1.0) as u32);
        let seconds = (time.seconds - self.stall() * time.prompt_seconds).max(0.0);
        if step > 0.0 { 1.0 + seconds / step } else { 1.0 }
    }

    /// Seconds that refusals are expected to cost a request, `age` seconds after the last measurement.
    pub fn refusal_seconds(&self, age: f64) -> f64 {
        self.refused_share * self.refused_seconds * 0.5f64.powf(age.max(0.0) / REFUSAL_HALF_LIFE)
    }

    /// Forgets all times: the machine has others now.
    pub fn forget_times(&mut self) {
        *self = UpstreamRates {
            constant: 0.0,
            line: TimeFit::default(),
            prefill: Curve::default(),
            waits: Curve::default(),
            decode: Curve::default(),
            prompt_stall: 0.0,
            ..*self
        };
    }

    /// Learns from a request that was refused, or failed, after so many seconds.
    pub fn learn_refusal(&mut self, seconds: f64) {
        if seconds.is_finite() && seconds >= 0.0 {
            self.refused_seconds = ewma(self.refused_seconds, seconds.max(NO_WAIT));
            self.refused_share = share(self.refused_share, 1.0);
        }
    }

    /// Learns from a reply that ended. Ignores times that are not positive and finite.
    pub fn learn(&mut self, reply: &UpstreamReply) {
        self.output.learn(reply.limit, f64::from(reply.n_tokens.max(1)));
        self.refused_share = share(self.refused_share, 0.0);
        self.n_replies = self.n_replies.saturating_add(1);
        if self.n_replies == 1 || !(reply.first > 0.0 && reply.first.is_finite() && reply.decode >= 0.0) {
            return;
        }
        let steps = f64::from(reply.n_tokens.saturating_sub(1));
        if !reply.is_whole {
            if reply.decode > 0.0 && (steps >= MIN_STEPS || reply.decode >= MIN_SLOW) {
                self.learn_decode(reply, steps.max(1.0));
            }
            self.learn_first(reply, reply.first);
            return;
        }
        let known_step = self.decode.at(reply.n_running.max(1.0)).map(|rate| 1.0 / rate);
        let of_tokens = reply.first / (reply.sent.n_missing + REPLY_TOKEN_COST * steps).max(1.0);
        let decode =
            (steps * known_step.unwrap_or(REPLY_TOKEN_COST * of_tokens)).min((1.0 - MIN_PROMPT_SHARE) * reply.first);
        if steps >= MIN_STEPS {
            let predicted = self.first_token(&reply.sent).map_or(0.0, |first| first.sum());
            let rest = if known_step.is_some() { (reply.first - predicted).max(0.5 * decode) } else { decode };
            self.decode.learn_with_others(reply.n_running.max(1.0), steps / rest, FOLLOWING);
        }
        self.learn_first(reply, reply.first - decode);
    }

    /// What a reply took longer or shorter than predicted belongs to its steps and to its stalls by prompts, by the size of each.
    fn learn_decode(&mut self, reply: &UpstreamReply, steps: f64) {
        let n_running = reply.n_running.max(1.0);
        let stalled = self.stall() * reply.prompt_seconds.clamp(0.0, reply.decode);
        let Some(rate) = self.decode.at(n_running) else {
            let own = (reply.decode - stalled).max(MIN_STEPS_SHARE * reply.decode);
            return self.decode.learn(n_running, steps / own);
        };
        let own = steps / rate;
        let ratio = reply.decode / (own + stalled);
        let weight = stalled / (own + stalled);
        let of_steps = 1.0 + (1.0 - weight) * (ratio - 1.0);
        self.decode.learn_with_others(n_running, rate / of_steps, FOLLOWING);
        if stalled > 0.0 {
            let measured = self.stall() * (1.0 + weight * (ratio - 1.0));
            self.prompt_stall = ewma(self.stall(), measured).clamp(MIN_STALL, 1.0);
        }
    }

    fn learn_first(&mut self, reply: &UpstreamReply, first: f64) {
        if !reply.is_missing_known {
            return;
        }
        let SentPrompt { n_missing, n_others, mut backlog } = reply.sent;
        if backlog.seconds == 0.0 {
            // No rate was known when it was sent.
            backlog.seconds = self.prompt_seconds(n_missing) * backlog.n_tokens / n_missing.max(1.0);
        }
        let is_alone = n_others == 0 && backlog.n_tokens == 0.0;
        if backlog.n_tokens == 0.0 {
            self.line.learn(n_missing, first);
        }
        let of_prompt = |first: f64, constant: f64| (first - constant).max(MIN_PROMPT_SHARE * first);
        match self.first_token(&SentPrompt { n_others: 0, n_missing, backlog }) {
            // Other requests cause the time beyond its own prompt and those before it.
            Some(explained) if !is_alone && first > explained.sum() => {
                self.waits.learn(f64::from(n_others.max(1)), 1.0 / (first - explained.sum()).max(NO_WAIT));
            }
            _ if n_missing < MIN_PREFILL_TOKENS => {
                if is_alone || self.constant == 0.0 || first < self.constant {
                    self.constant = ewma(self.constant, first);
                } else {
                    self.waits.learn(f64::from(n_others.max(1)), 1.0 / NO_WAIT);
                }
            }
            _ => {
                // Its share of the time in which it and those before it were computed.
                let share = match self.prompt_seconds(n_missing) {
                    own if own > 0.0 => own / (own + backlog.seconds),
                    _ => n_missing / (n_missing + backlog.n_tokens),
                };
                let seconds = share * of_prompt(first, self.constant_seconds());
                self.prefill.learn_with_others(n_missing, n_missing / seconds, FOLLOWING);
                self.prefill.approach(n_missing, APPROACHING);
                if !is_alone {
                    self.waits.learn(f64::from(n_others.max(1)), 1.0 / NO_WAIT);
                }
            }
        }
    }
}

fn share(mean: f64, new: f64) -> f64 {
    mean + 0.3 * (new - mean)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(n_missing: f64, first: f64) -> UpstreamReply {
        UpstreamReply {
            sent: SentPrompt { n_missing, ..SentPrompt::default() },
            is_missing_known: true,
            first,
            decode: 9.9,
            n_tokens: 100,
            is_whole: false,
            n_running: 1.0,
            prompt_seconds: 0.0,
            limit: 100.0,
        }
    }

    /// An upstream that takes 0.2 s, and computes 1,000 tokens a second.
    fn measured() -> UpstreamRates {
        let mut rates = UpstreamRates::default();
        for n in [10.0, 10.0, 100.0, 1_000.0, 8_000.0] {
            rates.learn(&reply(n, if n < MIN_PREFILL_TOKENS { 0.2 } else { 0.2 + n / 1_000.0 }));
        }
        rates
    }

    fn first(rates: &UpstreamRates, sent: SentPrompt) -> f64 {
        rates.first_token(&sent).unwrap().sum()
    }

    #[test]
    fn a_first_token_is_predicted_by_the_prompts_length_and_a_token_by_the_load() {
        let rates = measured();
        for (n, expected) in [(1.0, 0.2), (100.0, 0.3), (2_000.0, 2.2), (16_000.0, 16.2)] {
            let sent = SentPrompt { n_missing: n, ..SentPrompt::default() };
            assert!((first(&rates, sent) / expected - 1.0).abs() < 0.01, "{n}: {}", first(&rates, sent));
        }
        assert!((rates.step(1) - 0.1).abs() < 1e-9);
        assert_eq!(rates.output.at(100.0), Some(100.0));
    }

    #[test]
    fn the_first_reply_may_have_loaded_the_model() {
        let mut rates = UpstreamRates::default();
        rates.learn(&reply(1_000.0, 30.0));
        assert!(!rates.is_known());
        rates.learn(&reply(1_000.0, 1.0));
        assert!((first(&rates, SentPrompt { n_missing: 1_000.0, ..SentPrompt::default() }) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_long_prompt_is_unknown_until_one_was_measured() {
        let mut rates = UpstreamRates::default();
        (0..3).for_each(|_| rates.learn(&reply(10.0, 0.2)));
        assert!(rates.first_token(&SentPrompt { n_missing: 10.0, ..SentPrompt::default() }).is_some());
        assert_eq!(rates.first_token(&SentPrompt { n_missing: 5_000.0, ..SentPrompt::default() }), None);
    }

    #[test]
    fn what_others_cost_is_learned_apart_from_the_prompts_that_are_known() {
        let mut rates = measured();
        let busy =
            SentPrompt { n_missing: 1_000.0, n_others: 4, backlog: PromptBacklog { n_tokens: 2_000.0, seconds: 2.0 } };
        assert!((first(&rates, busy) - 3.2).abs() < 0.01, "the prompts before it");
        for _ in 0..20 {
            rates.learn(&UpstreamReply { sent: busy, ..reply(0.0, 5.2) });
        }
        assert!((first(&rates, busy) - 5.2).abs() < 0.05, "{}", first(&rates, busy));
        let idle = SentPrompt { n_missing: 1_000.0, ..SentPrompt::default() };
        assert!((first(&rates, idle) - 1.2).abs() < 0.01, "an idle upstream is as fast as before");
    }

    #[test]
    fn a_machine_that_is_faster_than_known_is_noticed_under_load_too() {
        let mut rates = measured();
        let busy = SentPrompt { n_missing: 1_000.0, n_others: 2, ..SentPrompt::default() };
        for _ in 0..20 {
            rates.learn(&UpstreamReply { sent: busy, ..reply(0.0, 0.7) });
        }
        assert!((first(&rates, busy) - 0.7).abs() < 0.05, "{}", first(&rates, busy));
    }

    #[test]
    fn a_reply_in_one_piece_teaches_both_parts() {
        let mut rates = measured();
        let whole = UpstreamReply { first: 1.2 + 9.9, decode: 0.0, is_whole: true, ..reply(1_000.0, 0.0) };
        for _ in 0..20 {
            rates.learn(&whole);
        }
        let sent = SentPrompt { n_missing: 1_000.0, ..SentPrompt::default() };
        assert!((first(&rates, sent) - 1.2).abs() < 0.1 && (rates.step(1) - 0.1).abs() < 0.01, "{rates:?}");
        let mut new = UpstreamRates::default();
        (0..3).for_each(|_| new.learn(&whole));
        let sum = first(&new, sent) + 99.0 * new.step(1);
        assert!((sum - 11.1).abs() < 0.5, "the sum is right even before the parts are: {sum}");
    }

    #[test]
    fn the_time_of_others_prompts_is_learned_apart_from_that_of_its_own_tokens() {
        for (kept, pace) in [(0.2, 20.0), (0.9, 5.0)] {
            let mut rates = measured();
            for round in 0..300 {
                // A reply of 100 tokens, during which prompts are computed for none to nearly all of its time.
                let own = 99.0 / pace;
                let prompt_seconds = own / kept * [0.0, 0.3, 0.6, 0.95][round % 4];
                let decode = own + (1.0 - kept) * prompt_seconds;
                rates.learn(&UpstreamReply { decode, prompt_seconds, ..reply(10.0, 0.2) });
            }
            assert!((rates.stall() - (1.0 - kept)).abs() < 0.15, "{kept}: {}", rates.stall());
            assert!((rates.step(1) * pace - 1.0).abs() < 0.1, "{kept}: {}", rates.step(1));
        }
    }

    #[test]
    fn refusals_cost_what_they_took_and_fade() {
        let mut rates = measured();
        (0..20).for_each(|_| rates.learn_refusal(2.0));
        assert!((rates.refusal_seconds(0.0) - 2.0).abs() < 0.01);
        assert!((rates.refusal_seconds(REFUSAL_HALF_LIFE) - 1.0).abs() < 0.01);
        (0..20).for_each(|_| rates.learn(&reply(10.0, 0.2)));
        assert!(rates.refusal_seconds(0.0) < 0.01);
    }

    #[test]
    fn few_tokens_that_take_long_are_a_slow_reply() {
        let mut rates = measured();
        let few = |n_tokens, decode| UpstreamReply { n_tokens, decode, ..reply(10.0, 0.2) };
        rates.learn(&few(3, 0.001));
        assert!((rates.step(1) - 0.1).abs() < 1e-9, "two steps on a fast network");
        (0..20).for_each(|_| rates.learn(&few(1, 60.0)));
        assert!(rates.step(1) > 30.0, "its end was kept back: {}", rates.step(1));
    }

    #[test]
    fn nonsense_teaches_nothing() {
        let before = measured();
        for (first, decode) in [(0.0, 1.0), (f64::NAN, 1.0), (f64::INFINITY, 1.0), (-1.0, 1.0), (1.0, -1.0)] {
            let mut rates = before;
            rates.learn(&UpstreamReply { decode, ..reply(1_000.0, first) });
            assert_eq!((rates.prefill, rates.decode, rates.constant), (before.prefill, before.decode, before.constant));
        }
        let mut rates = before;
        rates.learn(&UpstreamReply { is_missing_known: false, ..reply(1_000.0, 50.0) });
        assert_eq!(rates.prefill, before.prefill);
    }
}
