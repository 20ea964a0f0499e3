//! The usage of keys since the start, and facts about the process.

use std::sync::atomic::AtomicU64;
use std::time::UNIX_EPOCH;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::observe::StartTime;
use crate::usage::{KeptSeries, LedgerState};

/// Keys with series of their own; the others share one.
const MAX_KEYS: usize = 200;
const OTHER: &str = "other";

type UsageLabels = Vec<(&'static str, String)>;
type UsageCounts = Family<UsageLabels, Counter>;
type SecondCounts = Family<UsageLabels, Counter<f64, AtomicU64>>;

/// The series of usage.
pub(super) fn registry(state: &LedgerState) -> Registry {
    let mut registry = Registry::with_prefix("baton");
    let (requests, tokens, seconds) = (UsageCounts::default(), UsageCounts::default(), SecondCounts::default());
    let mut keys: Vec<&str> = state.series.iter().map(|(series, _)| series.key.as_str()).collect();
    keys.sort_unstable();
    keys.dedup();
    keys.truncate(MAX_KEYS);
    for (KeptSeries { key, model }, sums) in &state.series {
        let key = if keys.binary_search(&key.as_str()).is_ok() { key } else { OTHER };
        let labels = vec![("key", key.to_owned()), ("model", model.clone())];
        requests.get_or_create(&labels).inc_by(sums.requests);
        seconds.get_or_create(&labels).inc_by(sums.engine_seconds);
        for (kind, n) in
            [("prompt", sums.prompt_tokens), ("cached", sums.cached_tokens), ("generated", sums.generated_tokens)]
        {
            let labels = [&labels[..], &[("kind", kind.to_owned())]].concat();
            tokens.get_or_create(&labels).inc_by(n);
        }
    }
    registry.register("key_requests", "Requests that an engine began, by key", requests);
    registry.register("key_tokens", "Tokens by key and kind; prompt includes cached", tokens);
    registry.register_with_unit("key_engine", "Time of engines by key", Unit::Seconds, seconds);
    let count = |n: u64| {
        let counter = Counter::<u64>::default();
        counter.inc_by(n);
        counter
    };
    let unsaved = Gauge::<i64>::default();
    unsaved.set(i64::try_from(state.n_unsaved).unwrap_or(i64::MAX));
    registry.register("usage_unsaved_requests", "Requests whose usage is not in the file yet", unsaved);
    registry.register("usage_failed_writes", "Commits of usage that failed", count(state.n_failed_writes));
    registry.register("usage_late_replies", "Replies that ended before their usage was written", count(state.n_late));
    registry
}

/// The build, and the start of the process.
pub(super) fn process(started: StartTime) -> Registry {
    let mut registry = Registry::default();
    let build = Family::<UsageLabels, Gauge>::default();
    build.get_or_create(&vec![("version", env!("CARGO_PKG_VERSION").to_owned())]).set(1);
    registry.register("baton_build_info", "This build; always 1", build);
    let start = Gauge::<f64, AtomicU64>::default();
    start.set(started.0.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()));
    let help = "When the process began, since the Unix epoch";
    registry.register_with_unit("process_start_time", help, Unit::Seconds, start);
    registry
}
