//! The last hour of the endpoint, as samples of ten seconds each, kept in memory.
//!
//! [`RequestWatch`](super::RequestWatch) and the clocks of choices report what happens; [`History::tick`] closes the samples. The
//! page's charts show them. Nothing is written to disk: a restart begins anew.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{RequestOutcome, RouteRecord};
use crate::latency_buckets::{LatencyBuckets, Percentiles};
use crate::token_gaps::RecentTokens;

/// The interval between two ticks, in which the most requests at once are noted.
pub const TICK: Duration = Duration::from_secs(1);

/// Ticks of one sample.
const TICKS_PER_SAMPLE: u32 = 10;

/// Samples that are kept: one hour.
pub const MAX_SAMPLES: usize = 360;

/// The events of ten seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HistorySample {
    /// The end of the interval, milliseconds since the Unix epoch. Ascends, even if the clock is set back.
    pub at_ms: u64,
    /// The length of the interval, seconds.
    pub seconds: f64,
    /// The most requests that ran at once.
    pub running: u64,
    /// The most requests that waited at once.
    pub waiting: u64,
    /// Requests with a route that ended.
    pub ended: u32,
    /// The number of these that failed.
    pub failed: u32,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Guessed tokens that were verified, of requests that ended.
    #[serde(default)]
    pub drafted_tokens: u64,
    /// The number of these that were right.
    #[serde(default)]
    pub accepted_tokens: u64,
    /// Tokens of the prompts of requests that ended.
    pub prompt_tokens: u64,
    /// The number of these tokens whose KV the node that generates had, in a slot or in its store.
    pub cached_tokens: u64,
    /// The number of these that came from the memory of its store.
    #[serde(default)]
    pub memory_tokens: u64,
    /// The number of these that came from the disk of its store.
    #[serde(default)]
    pub disk_tokens: u64,
    /// The number of these tokens whose KV came from another node.
    pub handoff_tokens: u64,
    /// Requests that ended and were handed over, whose time is compared with one machine's alone.
    #[serde(default)]
    pub compared: u32,
    /// How much earlier these were done than was predicted for one machine alone, milliseconds, all together; negative: later.
    #[serde(default)]
    pub saved_ms: f64,
    /// Times from arrival to the first token. Missing if there was none.
    pub first_token_ms: Option<Percentiles>,
    /// Gaps between tokens of a choice. Missing if there was none.
    pub itl_ms: Option<Percentiles>,
    /// Requests that departed from their plan, by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fallbacks: BTreeMap<String, u64>,
}

/// The endpoint's report at a tick.
#[derive(Debug, Clone, Default)]
pub struct TickReport {
    /// Requests that run now.
    pub running: u64,
    /// Requests that wait now.
    pub waiting: u64,
    /// Fallbacks since the start, by reason.
    pub fallbacks: BTreeMap<String, u64>,
}

/// The last hour, and the sample that is open.
#[derive(Debug, Default)]
pub struct History {
    samples: Mutex<Samples>,
    /// Shared with the clocks of all choices.
    pub tokens: Arc<RecentTokens>,
    ttft: LatencyBuckets,
}

#[derive(Debug, Default)]
struct Samples {
    /// At most [`MAX_SAMPLES`], the oldest first.
    closed: VecDeque<HistorySample>,
    open: HistorySample,
    n_ticks: u32,
    fallbacks_before: BTreeMap<String, u64>,
}

impl History {
    /// The samples that ended after this time, milliseconds since the Unix epoch; the oldest first.
    pub fn since(&self, after_ms: u64) -> Vec<HistorySample> {
        let samples = self.lock();
        samples.closed.iter().filter(|sample| sample.at_ms > after_ms).cloned().collect()
    }

    /// Notes the present, and closes the sample if it is complete. Called every [`TICK`].
    pub fn tick(&self, now: SystemTime, report: TickReport) {
        let mut samples = self.lock();
        samples.open.running = samples.open.running.max(report.running);
        samples.open.waiting = samples.open.waiting.max(report.waiting);
        samples.n_ticks += 1;
        if samples.n_ticks < TICKS_PER_SAMPLE {
            return;
        }
        samples.n_ticks = 0;
        let before = mem::replace(&mut samples.fallbacks_before, report.fallbacks);
        let new = |(reason, n): (&String, &u64)| {
            let n_new = n.saturating_sub(before.get(reason).copied().unwrap_or_default());
            (n_new > 0).then(|| (reason.clone(), n_new))
        };
        let fallbacks = samples.fallbacks_before.iter().filter_map(new).collect();
        let (generated_tokens, itl_ms) = self.tokens.drain();
        let now_ms = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let sample = HistorySample {
            at_ms: samples.closed.back().map_or(now_ms, |last| now_ms.max(last.at_ms + 1)),
            seconds: (TICK * TICKS_PER_SAMPLE).as_secs_f64(),
            generated_tokens,
            first_token_ms: self.ttft.drain(),
            itl_ms,
            fallbacks,
            ..mem::take(&mut samples.open)
        };
        if samples.closed.len() >= MAX_SAMPLES {
            samples.closed.pop_front();
        }
        samples.closed.push_back(sample);
    }

    /// A request's first token came this long after its arrival.
    pub(super) fn first_token(&self, ms: f64) {
        self.ttft.observe(ms);
    }

    /// A request with a route has ended.
    pub(super) fn ended(&self, record: &RouteRecord) {
        let open = &mut self.lock().open;
        open.ended += 1;
        open.failed += u32::from(record.outcome == Some(RequestOutcome::Failed));
        open.drafted_tokens += u64::from(record.drafts.n);
        open.accepted_tokens += u64::from(record.drafts.n_accepted);
        open.prompt_tokens += u64::from(record.n_prompt);
        open.cached_tokens += u64::from(record.n_cached);
        open.memory_tokens += u64::from(record.sources.memory);
        open.disk_tokens += u64::from(record.sources.disk);
        open.handoff_tokens += record.handoff.map_or(0, |handoff| u64::from(handoff.n_tokens));
        open.compared += u32::from(record.saved_ms.is_some());
        open.saved_ms += record.saved_ms.unwrap_or_default();
    }

    fn lock(&self) -> MutexGuard<'_, Samples> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::sequence::DraftCounts;

    use super::*;
    use crate::token_gaps::TokenGaps;

    fn report(running: u64, n_lost: u64) -> TickReport {
        TickReport { running, waiting: 0, fallbacks: [("prefill_lost".to_owned(), n_lost)].into() }
    }

    #[test]
    fn a_sample_has_what_happened_in_its_ten_seconds_and_the_hour_is_bounded() {
        let history = History::default();
        let gaps = TokenGaps { recent: Arc::clone(&history.tokens), ..TokenGaps::unread() };
        gaps.token(None);
        gaps.token(Some(Duration::from_millis(20)));
        history.first_token(300.0);
        history.ended(&RouteRecord { drafts: DraftCounts { n: 9, n_accepted: 4 }, ..RouteRecord::default() });
        let at = |second| UNIX_EPOCH + Duration::from_secs(second);
        for second in 1..=10 {
            history.tick(at(second), report(if second == 4 { 7 } else { 1 }, 2));
        }
        let [sample] = &history.since(0)[..] else { panic!("one sample") };
        assert_eq!((sample.at_ms, sample.seconds, sample.running), (10_000, 10.0, 7));
        assert_eq!((sample.generated_tokens, sample.fallbacks["prefill_lost"]), (2, 2));
        assert_eq!((sample.ended, sample.drafted_tokens, sample.accepted_tokens), (1, 9, 4));
        assert!((sample.first_token_ms.unwrap().p50 / 300.0 - 1.0).abs() < 0.05);
        assert!((sample.itl_ms.unwrap().p50 / 20.0 - 1.0).abs() < 0.05);

        for second in 11..=20 {
            history.tick(at(second), report(0, 2));
        }
        let [sample] = &history.since(10_000)[..] else { panic!("one new sample") };
        assert_eq!(*sample, HistorySample { at_ms: 20_000, seconds: 10.0, ..HistorySample::default() });

        for second in 21..=5_000 {
            history.tick(at(second), report(0, 2));
        }
        let samples = history.since(0);
        assert_eq!((samples.len(), samples[0].at_ms), (MAX_SAMPLES, (5_000 - 3_590) * 1_000));

        // The clock is set back by an hour.
        for second in 1_401..=1_420 {
            history.tick(at(second), report(0, 2));
        }
        let after: Vec<u64> = history.since(5_000_000).iter().map(|sample| sample.at_ms).collect();
        assert_eq!(after, [5_000_001, 5_000_002]);
    }
}
