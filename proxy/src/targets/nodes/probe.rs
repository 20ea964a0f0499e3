//! Liveness checks of an engine.
//!
//! A node answers them from other threads than the one that computes, so a long prefill or a slow decode step never
//! makes it silent. A silent node is stopped, swapped out or stuck.

use std::time::Duration;

use baton_engines::Engine;
use baton_schemas::EngineError;
use baton_schemas::node::{NodeInfo, NodeLoad};

/// Between two checks. A check is one small request.
pub const INTERVAL: Duration = Duration::from_secs(2);

/// How long an answer may take, even on a machine whose cores are all busy.
const DEADLINE: Duration = Duration::from_secs(2);

/// Missed answers in a row until an engine counts as frozen. One or two may be lost while the machine is busy.
const MAX_MISSES: u32 = 3;

/// The interval, up to a fifth longer or shorter, so that endpoints and nodes that started together do not ask in step.
pub fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(rand::random_range(0.8..1.2))
}

/// What the engine runs, if it answers in time.
pub async fn info(engine: &dyn Engine) -> Result<NodeInfo, EngineError> {
    in_time(DEADLINE, engine.info()).await
}

/// The engine's load, if it answers in time.
pub async fn load(engine: &dyn Engine) -> Result<NodeLoad, EngineError> {
    in_time(DEADLINE, engine.load()).await
}

/// Checks the engine again and again, reports each outcome to `report`, and returns after three missed answers in a row.
pub async fn until_frozen(engine: &dyn Engine, report: impl Fn(Result<(), EngineError>)) {
    until_frozen_within(engine, INTERVAL, DEADLINE, report).await;
}

async fn until_frozen_within(
    engine: &dyn Engine,
    interval: Duration,
    deadline: Duration,
    report: impl Fn(Result<(), EngineError>),
) {
    let mut n_missed = 0;
    while n_missed < MAX_MISSES {
        tokio::time::sleep(jittered(interval)).await;
        let answer = in_time(deadline, engine.load()).await;
        n_missed = if answer.is_ok() { 0 } else { n_missed + 1 };
        report(answer.map(drop));
    }
}

async fn in_time<T>(
    deadline: Duration,
    answer: impl Future<Output = Result<T, EngineError>>,
) -> Result<T, EngineError> {
    let silent = || EngineError::lost(format!("no answer within {} s", deadline.as_secs_f32()));
    tokio::time::timeout(deadline, answer).await.unwrap_or_else(|_| Err(silent()))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use async_trait::async_trait;
    use baton_engines::sim::{EngineWrapper, UnusedEngine};

    use super::*;

    /// Answers the questions whose number is in the list, and is silent on all others.
    struct Moody {
        answers: &'static [u32],
        n_asked: AtomicU32,
    }

    #[async_trait]
    impl EngineWrapper for Moody {
        fn inner(&self) -> &dyn Engine {
            &UnusedEngine
        }

        async fn load(&self) -> Result<NodeLoad, EngineError> {
            let question = self.n_asked.fetch_add(1, Ordering::SeqCst);
            if self.answers.contains(&question) { Ok(NodeLoad::default()) } else { std::future::pending().await }
        }
    }

    /// How many questions it takes until an engine with these answers counts as frozen.
    async fn check(answers: &'static [u32], expected: u32) {
        let engine = Moody { answers, n_asked: AtomicU32::new(0) };
        let soon = Duration::from_millis(10);
        until_frozen_within(&engine, soon, soon, drop).await;
        assert_eq!(engine.n_asked.load(Ordering::SeqCst), expected, "{answers:?}");
    }

    #[test]
    fn an_interval_varies_and_stays_about_what_it_is() {
        let waits: Vec<_> = (0..100).map(|_| jittered(INTERVAL)).collect();
        assert!(waits.iter().all(|wait| (INTERVAL.mul_f64(0.79)..INTERVAL.mul_f64(1.21)).contains(wait)), "{waits:?}");
        assert!(waits.iter().any(|wait| *wait != waits[0]), "{waits:?}");
    }

    #[tokio::test]
    async fn only_silence_in_a_row_counts() {
        check(&[], 3).await;
        check(&[0, 1], 5).await;
        check(&[2, 5, 6], 10).await;
    }
}
