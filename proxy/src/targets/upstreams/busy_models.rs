//! The models for which a busy upstream gets no requests for a while. A 429 or 503 concerns only the requested model:
//! hosted services have a quota for each model, and a server of several models may lack memory for one of them.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

/// The maximum number of models kept here. Only configured and listed models are requested.
const MAX_MODELS: usize = 1_000;

/// The models for which an upstream has no capacity now, by the upstream's own names.
#[derive(Debug, Default)]
pub(super) struct BusyModels {
    until: HashMap<String, Instant>,
}

impl BusyModels {
    /// The time until this model may be requested again. `None`: now.
    pub(super) fn left(&self, model: &str, now: Instant) -> Option<Duration> {
        time_left(*self.until.get(model)?, now)
    }

    /// The longest of these times.
    pub(super) fn longest(&self, now: Instant) -> Option<Duration> {
        self.until.values().filter_map(|until| time_left(*until, now)).max()
    }

    /// Keeps requests for this model away for `pause` from `now` on. Returns the time that was left before.
    pub(super) fn add(&mut self, model: &str, pause: Duration, now: Instant) -> Option<Duration> {
        let before = self.left(model, now);
        self.until.retain(|_, until| *until > now);
        if self.until.len() >= MAX_MODELS && before.is_none() {
            // The one that expires first matters least.
            let first = self.until.iter().min_by_key(|(_, until)| **until).map(|(name, _)| name.clone());
            if let Some(name) = first {
                self.until.remove(&name);
            }
        }
        self.until.insert(model.to_owned(), now + pause);
        before
    }
}

fn time_left(until: Instant, now: Instant) -> Option<Duration> {
    Some(until.saturating_duration_since(now)).filter(|left| !left.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn each_model_has_its_own_pause() {
        let mut busy = BusyModels::default();
        let now = Instant::now();
        assert_eq!(busy.add("a", SECOND * 600, now), None);
        assert_eq!(busy.add("b", SECOND, now), None);
        assert_eq!((busy.left("a", now), busy.left("b", now)), (Some(SECOND * 600), Some(SECOND)));
        assert_eq!((busy.left("c", now), busy.longest(now)), (None, Some(SECOND * 600)));
        let later = now + SECOND * 2;
        assert_eq!((busy.left("b", later), busy.longest(later)), (None, Some(SECOND * 598)));
        assert_eq!(busy.add("a", SECOND, later), Some(SECOND * 598), "the last pause counts");
        assert_eq!(busy.longest(later), Some(SECOND));
        assert_eq!(busy.longest(now + SECOND * 600), None);
    }

    #[test]
    fn expired_pauses_are_dropped_and_the_rest_is_bounded() {
        let mut busy = BusyModels::default();
        let now = Instant::now();
        for i in 0..10 {
            busy.add(&format!("short {i}"), SECOND, now);
        }
        let later = now + SECOND * 2;
        busy.add("first", SECOND, later);
        assert_eq!(busy.until.len(), 1);
        for i in 1..=MAX_MODELS {
            busy.add(&format!("long {i}"), SECOND * 600, later);
        }
        assert_eq!((busy.until.len(), busy.left("first", later)), (MAX_MODELS, None));
        assert_eq!(busy.left("long 1", later), Some(SECOND * 600));
        busy.add("long 1", SECOND, later);
        assert_eq!(busy.until.len(), MAX_MODELS, "a known model evicts no other");
    }
}
