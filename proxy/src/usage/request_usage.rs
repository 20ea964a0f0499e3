//! The usage of one request: from the reservation of its tokens to its record in the ledger.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Instant, SystemTime};

use super::batch::{SecretId, UsageRecord, UsageSums};
use super::{BatchNumber, UsageLedger};
use crate::account::Account;
use crate::account::budget::{BudgetHold, MAX_RESERVED_REPLY};
use crate::error::RequestError;
use crate::reply_counts::ReplyCounts;
use crate::reply_event::{EventKind, ReplyEvent};

/// The most time of an engine for one choice, in milliseconds: a day. Nodes report it, and a sum must stay finite.
const MAX_ENGINE_MS: f64 = 86_400_000.0;

/// Travels with a request. Dropping it records what was used, and gives back what was reserved.
pub struct RequestUsage {
    ledger: Arc<UsageLedger>,
    account: Arc<Account>,
    secret: Option<SecretId>,
    model: String,
    reserved: Option<BudgetHold>,
    /// `None` before an engine was asked, and after the record.
    begun: Option<BegunUsage>,
}

/// The usage of a request that an engine has begun.
struct BegunUsage {
    at: Instant,
    counts: ReplyCounts,
    /// Counts the tokens of all choices, also of those that have not finished.
    n_generated: Arc<AtomicU32>,
    n_open_choices: u32,
    engine_ms: f64,
}

impl RequestUsage {
    /// A request of this key, by this one of its secrets.
    pub fn new(ledger: &Arc<UsageLedger>, account: &Arc<Account>, secret: Option<SecretId>) -> RequestUsage {
        let (ledger, account) = (Arc::clone(ledger), Arc::clone(account));
        RequestUsage { ledger, account, secret, model: String::new(), reserved: None, begun: None }
    }

    /// The name of the caller's key; `anyone` without keys.
    pub fn key(&self) -> &str {
        &self.account.name
    }

    /// The model's public name is known.
    pub fn is_for(&mut self, model: &str) {
        model.clone_into(&mut self.model);
    }

    /// Reserves tokens of the key's budgets, instead of an earlier attempt's: for the prompt, and for `n` choices of at most
    /// `max_tokens`. Errors: a budget has fewer left.
    pub fn reserve(&mut self, n_prompt: usize, max_tokens: Option<u32>, n: u32) -> Result<(), RequestError> {
        self.reserved = None;
        let a_choice = max_tokens.unwrap_or(MAX_RESERVED_REPLY).min(MAX_RESERVED_REPLY);
        self.reserved = self.account.reserve(n_prompt as u64 + u64::from(a_choice) * u64::from(n))?;
        Ok(())
    }

    /// An engine works for a prompt of `n_prompt` tokens and `n` choices, whose tokens `n_generated` counts.
    pub fn begin(&mut self, n_prompt: u32, n: u32, n_generated: Arc<AtomicU32>) {
        let counts = ReplyCounts::of_prompt(n_prompt);
        let at = Instant::now();
        self.begun = Some(BegunUsage { at, counts, n_generated, n_open_choices: n, engine_ms: 0.0 });
    }

    /// The reply goes on at another engine.
    pub fn rerouted(&mut self) {
        if let Some(begun) = &mut self.begun {
            begun.counts.rerouted();
        }
    }

    /// Counts an event of the reply. Returns the batch of the record if it is the last event: it has to wait for it.
    pub fn event(&mut self, event: &ReplyEvent) -> Option<BatchNumber> {
        let begun = self.begun.as_mut()?;
        begun.counts.record(event, u32::MAX);
        let EventKind::Finished { timings, .. } = &event.kind else { return None };
        begun.engine_ms += plausible_ms(timings.prompt_ms) + plausible_ms(timings.predicted_ms);
        begun.n_open_choices = begun.n_open_choices.saturating_sub(1);
        if begun.n_open_choices == 0 { self.record() } else { None }
    }

    /// The request ends with an error. An engine that began nothing, because the request is wrong, was not used.
    pub fn failed(&mut self, error: &RequestError) {
        let has_tokens = |begun: &BegunUsage| begun.n_generated.load(Ordering::Relaxed) > 0;
        if error.is_the_clients() && !self.begun.as_ref().is_some_and(has_tokens) {
            self.begun = None;
        }
    }

    /// No engine worked for it after all: the attempt failed, for no fault of the client's.
    pub fn never_began(&mut self) {
        self.begun = None;
    }

    /// Records texts whose vectors are computed, and waits until that is written.
    pub async fn embedded(&mut self, n_tokens: u32, compute_ms: f64) {
        self.begin(n_tokens, 0, Arc::default());
        if let Some(begun) = &mut self.begun {
            begun.engine_ms = plausible_ms(compute_ms);
        }
        if let Some(batch) = self.record() {
            self.ledger.written(batch).await;
        }
    }

    /// Waits until a batch is written.
    pub async fn written(&self, batch: BatchNumber) {
        self.ledger.written(batch).await;
    }

    /// Records what was used, and settles it with the key's budgets.
    fn record(&mut self) -> Option<BatchNumber> {
        let BegunUsage { at, counts, n_generated, n_open_choices, engine_ms } = self.begun.take()?;
        let (generated, engine_ms) = match n_open_choices {
            0 => (counts.n_completion, engine_ms),
            // Choices that have not finished report no times.
            _ => (counts.n_completion.max(n_generated.load(Ordering::Relaxed)), at.elapsed().as_secs_f64() * 1e3),
        };
        let sums = UsageSums {
            requests: 1,
            prompt_tokens: counts.n_prompt.into(),
            cached_tokens: counts.n_cached().min(counts.n_prompt).into(),
            generated_tokens: generated.into(),
            engine_seconds: engine_ms / 1e3,
        };
        self.account.settle(self.reserved.take(), sums.prompt_tokens + sums.generated_tokens);
        let (key, model, secret) = (&*self.account.name, &*self.model, self.secret);
        Some(self.ledger.record(UsageRecord { key, model, secret, at: SystemTime::now(), sums }))
    }
}

/// A time that a node reports, within what can be true; 0 if it is no number.
fn plausible_ms(ms: f64) -> f64 {
    if ms.is_nan() { 0.0 } else { ms.clamp(0.0, MAX_ENGINE_MS) }
}

impl Drop for RequestUsage {
    fn drop(&mut self) {
        // Nobody was told an end, so nobody waits for it to be written.
        let _ = self.record();
    }
}
