//! Liveness checks of an engine.
//!
//! A node answers them on threads that do not compute, so a long prefill or a slow decode step never makes it silent. A
//! silent node is stopped, swapped out or stuck.

use std::time::Duration;

use baton_link::{Engine, awake};
use baton_schemas::EngineError;
use baton_schemas::node::{NodeInfo, NodeLoad};
use tokio::time::Instant;

/// The interval between two checks. A check is one small request.
pub const INTERVAL: Duration = Duration::from_secs(2);

/// The longest wait for an answer, even from a machine whose cores are all busy.
const DEADLINE: Duration = Duration::from_secs(2);

/// Missed answers in a row until an engine counts as frozen. A busy machine may miss one or two.
const MAX_MISSES: u32 = 3;

/// How often [`has_ended`] asks a node to which no connection can be made, and the pause in between: together longer than
/// a short fault of a link.
const LAST_CALLS: u32 = 5;
const LAST_CALL_PAUSE: Duration = Duration::from_millis(300);

/// The interval, up to a fifth longer or shorter, so that endpoints that started together do not send their checks at the
/// same time.
pub fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(rand::random_range(0.8..1.2))
}

/// The engine's description, if it answers in time.
pub async fn info(engine: &dyn Engine) -> Result<NodeInfo, EngineError> {
    in_time(engine.info()).await
}

/// The description of an engine that has just started. While this process lacks what a connection needs, it asks again, up to
/// this long.
pub async fn first_info(engine: &dyn Engine, longest: Duration) -> Result<NodeInfo, EngineError> {
    let give_up_at = Instant::now() + longest;
    loop {
        match engine.info().await {
            Err(EngineError::NoResources { .. }) if Instant::now() < give_up_at => tokio::time::sleep(INTERVAL).await,
            answer => return answer,
        }
    }
}

/// The engine's load, if it answers in time.
pub async fn load(engine: &dyn Engine) -> Result<NodeLoad, EngineError> {
    in_time(engine.load()).await
}

/// Checks the engine at intervals, reports each outcome to `report`, and returns after three missed answers in a row.
pub async fn until_frozen(engine: &dyn Engine, report: impl Fn(Result<(), EngineError>)) {
    let mut n_missed = 0;
    while n_missed < MAX_MISSES {
        tokio::time::sleep(jittered(INTERVAL)).await;
        let answer = load(engine).await;
        n_missed = match &answer {
            Ok(_) => 0,
            // It was not asked.
            Err(EngineError::NoResources { .. }) => n_missed,
            Err(_) => n_missed + 1,
        };
        report(answer.map(drop));
    }
}

/// Returns true if a process that was lost has ended: another one answers, or nothing listens. A broken link looks like
/// that for a moment only, so the node is asked several times. A node that does not answer may live: it may be frozen, or
/// its machine cut off; and so may one that cannot be asked.
pub async fn has_ended(engine: &dyn Engine, process: u64) -> bool {
    for _ in 0..LAST_CALLS {
        match awake::timeout(DEADLINE, engine.info()).await {
            Ok(Ok(info)) => return info.process != process,
            // A node that served before says this only if it was started again.
            Ok(Err(EngineError::Unavailable { .. })) => return true,
            Ok(Err(EngineError::Lost { .. })) => tokio::time::sleep(LAST_CALL_PAUSE).await,
            Ok(Err(_)) | Err(_) => return false,
        }
    }
    true
}

async fn in_time<T>(answer: impl Future<Output = Result<T, EngineError>>) -> Result<T, EngineError> {
    let silent = || EngineError::lost(format!("no answer within {} s", DEADLINE.as_secs_f32()));
    awake::timeout(DEADLINE, answer).await.unwrap_or_else(|_| Err(silent()))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use async_trait::async_trait;
    use baton_link::wrapper::{EngineWrapper, UnusedEngine};

    use super::*;

    /// Answers the questions whose number is in the list, cannot be asked those in the other list, and is silent on all others.
    struct Moody {
        answers: &'static [u32],
        not_asked: &'static [u32],
        n_asked: AtomicU32,
    }

    #[async_trait]
    impl EngineWrapper for Moody {
        fn inner(&self) -> &dyn Engine {
            &UnusedEngine
        }

        async fn load(&self) -> Result<NodeLoad, EngineError> {
            let question = self.n_asked.fetch_add(1, Ordering::SeqCst);
            if self.not_asked.contains(&question) {
                return Err(EngineError::NoResources { detail: "too many open files".into() });
            }
            if self.answers.contains(&question) { Ok(NodeLoad::default()) } else { std::future::pending().await }
        }

        async fn info(&self) -> Result<NodeInfo, EngineError> {
            EngineWrapper::load(self).await?;
            Err(EngineError::lost("refused"))
        }
    }

    fn moody(answers: &'static [u32], not_asked: &'static [u32]) -> Moody {
        Moody { answers, not_asked, n_asked: AtomicU32::new(0) }
    }

    /// How many questions it takes until an engine with these answers counts as frozen.
    async fn check(answers: &'static [u32], not_asked: &'static [u32], expected: u32) {
        let engine = moody(answers, not_asked);
        until_frozen(&engine, drop).await;
        assert_eq!(engine.n_asked.load(Ordering::SeqCst), expected, "{answers:?} {not_asked:?}");
    }

    #[test]
    fn an_interval_varies_and_stays_about_what_it_is() {
        let waits: Vec<_> = (0..100).map(|_| jittered(INTERVAL)).collect();
        assert!(waits.iter().all(|wait| (INTERVAL.mul_f64(0.79)..INTERVAL.mul_f64(1.21)).contains(wait)), "{waits:?}");
        assert!(waits.iter().any(|wait| *wait != waits[0]), "{waits:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn only_silence_in_a_row_counts() {
        check(&[], &[], 3).await;
        check(&[0, 1], &[], 5).await;
        check(&[2, 5, 6], &[], 10).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_question_that_could_not_be_asked_says_nothing_about_the_engine() {
        check(&[], &[0, 1, 2, 3, 4, 5, 6, 7], 11).await;
        check(&[3], &[2], 7).await;
        assert!(has_ended(&moody(&[0, 1, 2, 3, 4], &[]), 1).await, "nothing listens");
        assert!(!has_ended(&moody(&[0, 1, 2, 4], &[3]), 1).await);
    }
}
