//! A line of the log every ten minutes in which somebody used a model: how many requests of how many keys, and their tokens. It names
//! nobody.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior};

use super::UsageLedger;
use super::batch::{KeptSeries, UsageSums};
use crate::log_target::NOTICE;

/// Between two lines at least.
const INTERVAL: Duration = Duration::from_secs(600);

/// The usage between two looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LoggedUsage {
    requests: u64,
    /// Keys that had requests; callers without a key are one.
    keys: usize,
    prompt_tokens: u64,
    generated_tokens: u64,
}

/// Logs the counts until the ledger is dropped.
pub fn log_counts(ledger: &Arc<UsageLedger>) {
    let ledger: Weak<UsageLedger> = Arc::downgrade(ledger);
    let series = move || ledger.upgrade().map(|ledger| ledger.state().series);
    tokio::spawn(watch(series, |LoggedUsage { requests, keys, prompt_tokens, generated_tokens }| {
        let minutes = INTERVAL.as_secs() / 60;
        tracing::info!(
            target: NOTICE,
            requests, keys, prompt_tokens, generated_tokens,
            "requests of the last {minutes} minutes"
        );
    }));
}

/// Looks every ten minutes at the usage since the start, until there is none to look at. Says what was used since the last look, if anything.
async fn watch(series: impl Fn() -> Option<Vec<(KeptSeries, UsageSums)>>, say: impl Fn(LoggedUsage)) {
    let mut ticks = tokio::time::interval_at(Instant::now() + INTERVAL, INTERVAL);
    // After a pause of the process one line is enough.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut before = SeenUsage::default();
    loop {
        ticks.tick().await;
        let Some(series) = series() else { return };
        let now = SeenUsage::of(&series);
        if let Some(counts) = now.since(&before) {
            say(counts);
        }
        before = now;
    }
}

/// The usage since the start at one look.
#[derive(Debug, Default)]
struct SeenUsage {
    requests_of_keys: HashMap<String, u64>,
    all: UsageSums,
}

impl SeenUsage {
    fn of(series: &[(KeptSeries, UsageSums)]) -> SeenUsage {
        let mut seen = SeenUsage::default();
        for (KeptSeries { key, .. }, sums) in series {
            *seen.requests_of_keys.entry(key.clone()).or_default() += sums.requests;
            seen.all += *sums;
        }
        seen
    }

    /// `None`: nothing was used since then.
    fn since(&self, before: &SeenUsage) -> Option<LoggedUsage> {
        let has_more =
            |(key, n): &(&String, &u64)| **n > before.requests_of_keys.get(*key).copied().unwrap_or_default();
        let counts = LoggedUsage {
            requests: self.all.requests.saturating_sub(before.all.requests),
            keys: self.requests_of_keys.iter().filter(has_more).count(),
            prompt_tokens: self.all.prompt_tokens.saturating_sub(before.all.prompt_tokens),
            generated_tokens: self.all.generated_tokens.saturating_sub(before.all.generated_tokens),
        };
        (counts.requests > 0).then_some(counts)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn used(key: &str, model: &str, requests: u64) -> (KeptSeries, UsageSums) {
        let sums =
            UsageSums { requests, prompt_tokens: 10 * requests, generated_tokens: requests, ..UsageSums::default() };
        (KeptSeries { key: key.into(), model: model.into() }, sums)
    }

    #[tokio::test(start_paused = true)]
    async fn ten_minutes_with_requests_have_one_line_and_idle_ones_none() {
        // What each look finds: the usage since the start.
        let looks = [
            vec![],
            vec![used("anna", "a", 2), used("anna", "b", 1), used("ben", "a", 1)],
            vec![used("anna", "a", 2), used("anna", "b", 1), used("ben", "a", 1)],
            vec![used("anna", "a", 2), used("anna", "b", 1), used("ben", "a", 4)],
        ];
        let began = Instant::now();
        let (looks, said) = (Mutex::new(looks.into_iter()), Mutex::new(Vec::new()));
        watch(
            || looks.lock().unwrap().next(),
            |counts| said.lock().unwrap().push((began.elapsed().as_secs() / 60, counts)),
        )
        .await;
        let counts =
            |requests, keys| LoggedUsage { requests, keys, prompt_tokens: 10 * requests, generated_tokens: requests };
        assert_eq!(*said.lock().unwrap(), [(20, counts(4, 2)), (40, counts(3, 1))]);
    }
}
