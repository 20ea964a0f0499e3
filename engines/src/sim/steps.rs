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
        self.join(n, cost).computed().await
    }

    /// Puts `n` prompt tokens into a step after all earlier ones.
    pub(super) fn join(&self, n: usize, cost: StepCost) -> JoinedStep {
        JoinedStep { step: self.step_of(n, &cost), n, cost }
    }

    fn step_of(&self, n: usize, cost: &StepCost) -> Arc<PrefillStep> {
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

/// Tokens in a step.
pub(super) struct JoinedStep {
    step: Arc<PrefillStep>,
    n: usize,
    cost: StepCost,
}

impl JoinedStep {
    /// Waits until the step begins. Others join it until then.
    pub(super) async fn begun(&self) {
        sleep_until(self.step.begins_at).await;
    }

    /// Waits until the step has ended. Returns the tokens' share of its time.
    pub(super) async fn computed(self) -> Duration {
        self.begun().await;
        sleep_until(self.step.ends_at(&self.cost)).await;
        let n_all = self.step.n_tokens();
        self.cost.of(n_all).mul_f64(self.n as f64 / n_all.max(1) as f64)
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
