//! Records when the tokens of one choice arrive.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use baton_schemas::draft::DraftReport;
use baton_schemas::sequence::Timings;

use crate::arrived_drafts::ChoiceDrafts;
use crate::token_gaps::TokenGaps;

/// Times a choice for the metrics, and for `timings` where the target reports none.
pub(crate) struct ChoiceClock {
    accepted: Instant,
    slot: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    /// Prompt tokens that were computed.
    pub(crate) n_computed: u32,
    /// Tokens generated so far.
    pub(crate) n_tokens: u32,
    gaps: TokenGaps,
    drafts: ChoiceDrafts,
    /// Counts the tokens of all choices of the request.
    meter: Arc<AtomicU32>,
}

impl ChoiceClock {
    /// Starts the clock when a choice is accepted. `n_prompt` is the length of its prompt in tokens.
    pub(crate) fn start(n_prompt: u32, gaps: TokenGaps, meter: Arc<AtomicU32>) -> Self {
        ChoiceClock {
            accepted: Instant::now(),
            slot: None,
            first_token: None,
            last_token: None,
            n_computed: n_prompt,
            n_tokens: 0,
            gaps,
            drafts: ChoiceDrafts::default(),
            meter,
        }
    }

    /// Notes guesses where the request's watch finds them.
    pub(crate) fn noting(self, drafts: ChoiceDrafts) -> Self {
        ChoiceClock { drafts, ..self }
    }

    /// Records that the choice has a slot and that `n_cached` prompt tokens were cached.
    pub(crate) fn started(&mut self, n_cached: u32) {
        self.slot = Some(Instant::now());
        self.n_computed = self.n_computed.saturating_sub(n_cached);
    }

    /// Records that an upstream began the choice at this time, as observed from here.
    pub(crate) fn started_at(&mut self, at: Instant) {
        self.accepted = at;
        self.slot = Some(at);
        self.first_token = Some(Instant::now());
    }

    /// Records one token of an engine.
    pub(crate) fn token_with(&mut self, drafts: Option<DraftReport>) {
        self.drafts.lock().token(drafts);
        self.token();
    }

    /// Records one token.
    pub(crate) fn token(&mut self) {
        let now = Instant::now();
        self.first_token.get_or_insert(now);
        let last = self.last_token.replace(now);
        self.gaps.token(last.map(|last| now.saturating_duration_since(last)));
        self.n_tokens += 1;
        self.meter.fetch_add(1, Ordering::Relaxed);
    }

    /// Corrects the number of tokens: until now only pieces of text were counted.
    pub(crate) fn correct(&mut self, n_tokens: u32) {
        self.meter.fetch_add(n_tokens.saturating_sub(self.n_tokens), Ordering::Relaxed);
        self.meter.fetch_sub(self.n_tokens.saturating_sub(n_tokens), Ordering::Relaxed);
        self.n_tokens = n_tokens;
    }

    /// Returns the timings of the choice. Right tokens that have not come are not in the reply.
    pub(crate) fn timings(&self) -> Timings {
        let between = |from: Option<Instant>, to: Option<Instant>| {
            from.zip(to).map_or(0.0, |(from, to)| to.saturating_duration_since(from).as_secs_f64() * 1e3)
        };
        let drafts = *self.drafts.lock();
        Timings {
            queue_ms: between(Some(self.accepted), self.slot),
            prompt_n: self.n_computed,
            prompt_ms: between(self.slot, self.first_token),
            predicted_n: self.n_tokens,
            predicted_ms: between(self.first_token, self.last_token),
            drafts: drafts.totals(),
            drafter_lost: drafts.lost(),
            ..Timings::default()
        }
    }
}
