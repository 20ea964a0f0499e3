//! A choice that was sent to an upstream: what it shows of the upstream's speed and cache.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_planner::cache_reach::PrefixRun;
use baton_planner::upstream_learning::EndedReply;
use baton_planner::upstream_rates::{SentPrompt, UpstreamReply};
use baton_upstream::TextUsage;

use super::UpstreamServer;
use crate::targets::models::expected_output;
use crate::targets::text_prefixes::PromptOutline;

/// A limit of tokens larger than any that a client sets, for requests without one.
const NO_LIMIT: f64 = u32::MAX as f64;

/// A choice that was sent to an upstream. Dropping it before its end teaches nothing about its speed.
pub struct SentChoice {
    server: Arc<UpstreamServer>,
    model: String,
    prompt: Arc<PromptOutline>,
    sent: SentPrompt,
    /// Its number among the upstream's requests.
    ticket: u64,
    /// Tokens that it should have cached, and the parts that were sent there before.
    n_promised: u32,
    runs: Vec<PrefixRun>,
    /// Only the first choice of a request computes the prompt.
    is_first: bool,
    /// The reply comes in one piece.
    is_whole: bool,
    at: Instant,
    /// Seconds since the upstream was measured.
    age: f64,
    first: Option<Duration>,
    /// The time in which what had come was not read on.
    unread: Duration,
    has_ended: bool,
}

impl SentChoice {
    /// The choice of this index is about to be sent. It has its place.
    pub(super) fn begin(
        server: &Arc<UpstreamServer>,
        model: &str,
        prompt: &Arc<PromptOutline>,
        choice: u32,
        is_whole: bool,
    ) -> SentChoice {
        let known = server.measures.of(model);
        let runs = server.measures.runs(prompt);
        let n_promised = known.learned.held(&runs).min(prompt.n_tokens.saturating_sub(1));
        let n_others = u32::try_from(server.places.n_taken().saturating_sub(1)).unwrap_or(u32::MAX);
        let sent = known.learned.sent(prompt.n_tokens, n_promised, n_others, known.sent);
        // The other choices have the prompt from the first one.
        let n_missing = if choice == 0 { sent.n_missing } else { 0.0 };
        let n_output = expected_output(&known.learned.rates.output, prompt.max_tokens);
        SentChoice {
            server: Arc::clone(server),
            model: model.to_owned(),
            prompt: Arc::clone(prompt),
            sent,
            ticket: server.measures.sent(model, n_missing, n_output),
            n_promised,
            runs,
            is_first: choice == 0,
            is_whole,
            at: Instant::now(),
            age: known.age,
            first: None,
            unread: Duration::ZERO,
            has_ended: false,
        }
    }

    /// Its first piece has come.
    pub(super) fn begun(&mut self) {
        if self.first.is_none() {
            self.first = Some(self.at.elapsed());
            self.server.measures.begun(&self.model, self.ticket);
            self.server.measures.computed(&self.prompt);
        }
    }

    /// The client let what had come wait for this time before it read on.
    pub(super) fn unread(&mut self, time: Duration) {
        self.unread += time;
    }

    /// It is complete, with so many tokens that were seen. Its end counts, and not its last token: nobody has the reply before.
    pub(super) fn ended(&mut self, usage: &TextUsage, n_tokens: u32) {
        let Some(first) = self.first else { return };
        self.has_ended = true;
        let since_first = self.at.elapsed().saturating_sub(first);
        let decode = if self.is_whole { Duration::ZERO } else { known_decode(since_first, self.unread) };
        let n_prompt = usage.n_prompt.unwrap_or(self.prompt.n_tokens).max(1);
        let generated = self.server.measures.gone(&self.model, self.ticket).unwrap_or_default();
        let n_now = self.server.places.n_taken().max(1) as f64;
        let n_running = match self.is_whole {
            true => (f64::from(self.sent.n_others) + 1.0 + n_now) / 2.0,
            false => generated.n_together,
        };
        let reply = UpstreamReply {
            sent: self.sent,
            is_missing_known: self.is_first,
            first: first.as_secs_f64(),
            decode: decode.as_secs_f64(),
            n_tokens,
            is_whole: self.is_whole,
            n_running,
            prompt_seconds: generated.prompt_seconds,
            limit: self.prompt.max_tokens.map_or(NO_LIMIT, |limit| f64::from(limit.max(1))),
        };
        let ended = EndedReply {
            n_prompt: self.prompt.n_tokens,
            n_promised: self.n_promised,
            runs: &self.runs,
            cached_share: usage.n_cached.map(|n_cached| f64::from(n_cached) / f64::from(n_prompt)),
            is_first: self.is_first,
            age: self.age,
            reply,
        };
        self.server.measures.ended(&self.model, &ended);
    }
}

/// The time from the first token to the end as the upstream's own; zero, which teaches nothing, if the client was slow for much of it.
/// Otherwise one key could make an upstream look slow to all.
fn known_decode(since_first: Duration, unread: Duration) -> Duration {
    let is_the_clients = unread > BRIEF && unread > since_first / SLOW_PART;
    if is_the_clients { Duration::ZERO } else { since_first }
}

/// Unread for as long, a reply still shows its upstream's speed: also a part of it.
const BRIEF: Duration = Duration::from_millis(200);
const SLOW_PART: u32 = 4;

impl Drop for SentChoice {
    fn drop(&mut self) {
        if !self.has_ended {
            self.server.measures.gone(&self.model, self.ticket);
            if self.first.is_some() {
                self.server.measures.left(&self.model);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_reads_slowly_makes_no_upstream_look_slow() {
        let ms = Duration::from_millis;
        for (since_first, unread, expected) in
            [(100, 100, 100), (2_000, 400, 2_000), (2_000, 600, 0), (60_000, 59_000, 0)]
        {
            assert_eq!(known_decode(ms(since_first), ms(unread)), ms(expected), "{since_first} {unread}");
        }
    }
}
