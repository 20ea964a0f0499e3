//! A bounded queue for work that only a few threads may do at once.

use std::sync::Arc;
use std::time::Duration;

use baton_schemas::EngineError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How long work waits for its turn.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(10);

/// Some work runs, some waits in order, and more is refused.
pub(crate) struct Lane {
    turns: Arc<Semaphore>,
    places: Semaphore,
    max_waiting: u32,
}

impl Lane {
    pub(crate) fn new(n_turns: u32, max_waiting: u32) -> Self {
        Lane {
            turns: Arc::new(Semaphore::new(n_turns as usize)),
            places: Semaphore::new(max_waiting as usize),
            max_waiting,
        }
    }

    /// Waits for a turn. It ends when the permit is dropped, so work that cannot be interrupted holds the permit itself.
    /// Dropping the future leaves the queue.
    ///
    /// Errors: too much work waits, or no turn came within [`MAX_WAIT`].
    pub(crate) async fn turn(&self) -> Result<OwnedSemaphorePermit, EngineError> {
        let full = || EngineError::QueueFull { limit: self.max_waiting };
        let _place = self.places.try_acquire().map_err(|_| full())?;
        let turn = tokio::time::timeout(MAX_WAIT, Arc::clone(&self.turns).acquire_owned()).await;
        turn.ok().and_then(Result::ok).ok_or_else(full)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use futures::future::join_all;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn no_more_wait_than_there_are_places_and_nobody_for_ever() {
        let lane = Lane::new(1, 2);
        let turn = lane.turn().await.unwrap();
        let full = Err(EngineError::QueueFull { limit: 2 });
        let mut waiting: Vec<_> = (0..2).map(|_| Box::pin(lane.turn().map(|turn| turn.map(drop)))).collect();
        assert!(waiting.iter_mut().all(|one| one.now_or_never().is_none()));
        assert_eq!(lane.turn().await.map(drop), full, "no place is free");
        drop(turn);
        assert_eq!(join_all(waiting).await, [Ok(()), Ok(())]);
        let _turn = lane.turn().await.unwrap();
        assert_eq!(lane.turn().await.map(drop), full, "no turn came in time");
    }
}
