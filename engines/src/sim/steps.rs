//! Steps that compute prompts, one after another.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// The steps of an engine.
pub(super) struct StepQueue(Mutex<Arc<PrefillStep>>);

/// What a step costs.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepCost {
    /// Beside its tokens. Prompts share steps only if this is not zero.
    pub(super) launch: Duration,
    /// Tokens per second.
    pub(super) tps: f64,
    /// The most tokens of a shared step.
    pub(super) n_max: usize,
}

impl StepCost {
    fn of(&self, n_tokens: usize) -> Duration {
        self.launch + seconds(n_tokens as f64, self.tps)
    }
}

struct PrefillStep {
    begins_at: Instant,
    n_tokens: AtomicUsize,
}

impl PrefillStep {
    fn new(begins_at: Instant, n_tokens: usize) -> Arc<PrefillStep> {
        Arc::new(PrefillStep { begins_at, n_tokens: n_tokens.into() })
    }

    fn n_tokens(&self) -> usize {
        self.n_tokens.load(Ordering::Acquire)
    }

    fn ends_at(&self, cost: &StepCost) -> Instant {
        let cost = if self.n_tokens() == 0 { Duration::ZERO } else { cost.of(self.n_tokens()) };
        self.begins_at + cost
    }
}

impl StepQueue {
    pub(super) fn new() -> StepQueue {
        StepQueue(Mutex::new(PrefillStep::new(Instant::now(), 0)))
    }

    fn last(&self) -> MutexGuard<'_, Arc<PrefillStep>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `n` prompt tokens are computed, after all earlier ones. Returns their share of the step's time.
    pub(super) async fn compute(&self, n: usize, cost: StepCost) -> Duration {
        let step = self.join(n, &cost);
        // Others join a step until it begins.
        sleep_until(step.begins_at).await;
        sleep_until(step.ends_at(&cost)).await;
        cost.of(step.n_tokens()).mul_f64(n as f64 / step.n_tokens().max(1) as f64)
    }

    fn join(&self, n: usize, cost: &StepCost) -> Arc<PrefillStep> {
        let mut last = self.last();
        let has_room = cost.launch > Duration::ZERO && last.n_tokens() + n <= cost.n_max;
        if has_room && last.begins_at > Instant::now() {
            last.n_tokens.fetch_add(n, Ordering::AcqRel);
        } else {
            *last = PrefillStep::new(last.ends_at(cost).max(Instant::now()), n);
        }
        Arc::clone(&last)
    }
}

/// The time of `n` tokens at a rate, at most a day. A rate that is not positive takes no time.
pub(super) fn seconds(n: f64, tps: f64) -> Duration {
    let seconds = if tps > 0.0 { n / tps } else { 0.0 };
    Duration::from_secs_f64(seconds.clamp(0.0, 86_400.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn prompts_that_wait_for_a_step_share_it() {
        let cost = StepCost { launch: Duration::from_millis(40), tps: 1_000.0, n_max: 512 };
        let steps = StepQueue::new();
        let began = Instant::now();
        // The first begins at once, the next four share a step, and the last has no room in it.
        let ends = [100, 100, 100, 100, 100, 200].map(|n| {
            let computed = steps.compute(n, cost);
            async move {
                let took = computed.await;
                (began.elapsed().as_millis(), took.as_millis())
            }
        });
        let ends = futures::future::join_all(ends).await;
        assert_eq!(ends, [(140, 140), (580, 110), (580, 110), (580, 110), (580, 110), (820, 240)]);
        let alone = StepCost { launch: Duration::ZERO, ..cost };
        let began = Instant::now();
        futures::future::join_all([100, 200].map(|n| steps.compute(n, alone))).await;
        assert_eq!(began.elapsed().as_millis(), 300);
    }
}
