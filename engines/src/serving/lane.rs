//! A bounded queue for work that only a few threads may do at once. Keys take turns in it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_schemas::{EngineError, KeyTag};
use tokio::sync::oneshot;

/// How long work waits for its turn: longer than any work takes, so that a key whose work takes long costs others only time.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(30);

/// Some work runs, some waits, and more is refused. A free turn goes to the key with the fewest turns, then to the oldest work.
pub(crate) struct Lane(Arc<SharedLane>);

struct SharedLane {
    queue: Mutex<LaneQueue>,
    max_waiting: usize,
}

struct LaneQueue {
    n_free: u32,
    n_running: HashMap<KeyTag, u32>,
    /// The oldest first. Those who left stay until the next change.
    waiting: VecDeque<WaitingWork>,
}

struct WaitingWork {
    key: KeyTag,
    turn: oneshot::Sender<LaneTurn>,
}

/// Work may run until this is dropped.
pub(crate) struct LaneTurn {
    lane: Arc<SharedLane>,
    key: KeyTag,
}

impl Lane {
    pub(crate) fn new(n_turns: u32, max_waiting: u32) -> Self {
        let queue = LaneQueue { n_free: n_turns, n_running: HashMap::new(), waiting: VecDeque::new() };
        Lane(Arc::new(SharedLane { queue: Mutex::new(queue), max_waiting: max_waiting as usize }))
    }

    /// Waits for a turn. It ends when it is dropped, so work that cannot be interrupted holds it itself. Dropping the future
    /// leaves the queue.
    ///
    /// Errors: too much work waits, and no key has more of it than this one; or no turn came within [`MAX_WAIT`].
    pub(crate) async fn turn(&self, key: KeyTag) -> Result<LaneTurn, EngineError> {
        let (turn, given) = oneshot::channel();
        self.0.change(|queue| queue.waiting.push_back(WaitingWork { key, turn }));
        match tokio::time::timeout(MAX_WAIT, given).await {
            Ok(Ok(turn)) => Ok(turn),
            Ok(Err(_)) => Err(EngineError::QueueFull { limit: self.0.max_waiting as u32 }),
            Err(_) => Err(EngineError::NoTurn { waited_s: MAX_WAIT.as_secs() as u32 }),
        }
    }
}

impl SharedLane {
    /// Changes the queue, gives all free turns, and refuses work if too much waits.
    fn change(self: &Arc<Self>, change: impl FnOnce(&mut LaneQueue)) {
        let given = {
            let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut queue);
            queue.waiting.retain(|work| !work.turn.is_closed());
            let given: Vec<_> = std::iter::from_fn(|| queue.next()).collect();
            if queue.waiting.len() > self.max_waiting {
                queue.refuse_one();
            }
            given
        };
        // Without the lock: the turn of work that is gone comes back here, which takes the lock again.
        for WaitingWork { key, turn } in given {
            let _ = turn.send(LaneTurn { lane: Arc::clone(self), key });
        }
    }
}

impl LaneQueue {
    /// Takes the next work out of the queue, if a turn is free.
    fn next(&mut self) -> Option<WaitingWork> {
        self.n_free.checked_sub(1)?;
        let n_running = |key| self.n_running.get(key).copied().unwrap_or(0);
        let (at, _) = self.waiting.iter().enumerate().min_by_key(|(_, work)| n_running(&work.key))?;
        let next = self.waiting.remove(at)?;
        self.n_free -= 1;
        *self.n_running.entry(next.key).or_default() += 1;
        Some(next)
    }

    /// Drops the newest work of the key with the most; of equal ones, of the key with the newest.
    fn refuse_one(&mut self) {
        let mut n_by_key = HashMap::<_, usize>::new();
        self.waiting.iter().for_each(|work| *n_by_key.entry(work.key).or_default() += 1);
        if let Some((at, _)) = self.waiting.iter().enumerate().max_by_key(|(_, work)| n_by_key[&work.key]) {
            self.waiting.remove(at);
        }
    }
}

impl Drop for LaneTurn {
    fn drop(&mut self) {
        self.lane.change(|queue| {
            queue.n_free += 1;
            if let Some(n) = queue.n_running.get_mut(&self.key) {
                *n -= 1;
                if *n == 0 {
                    queue.n_running.remove(&self.key);
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use futures::future::join_all;

    use super::*;

    const A: KeyTag = KeyTag(1);
    const B: KeyTag = KeyTag(2);

    /// Work of this key that waits.
    fn waits(lane: &Lane, key: KeyTag) -> impl Future<Output = Result<LaneTurn, EngineError>> + Unpin {
        let mut waiting = Box::pin(lane.turn(key));
        assert!(waiting.as_mut().now_or_never().is_none());
        waiting
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_wait_than_there_are_places_and_nobody_for_ever() {
        let lane = Lane::new(1, 2);
        let turn = lane.turn(A).await.unwrap();
        let waiting = [waits(&lane, A), waits(&lane, A)].map(|one| one.map(|turn| turn.map(drop)));
        let full = EngineError::QueueFull { limit: 2 };
        assert_eq!(lane.turn(A).await.err(), Some(full), "no place is free");
        drop(turn);
        assert_eq!(join_all(waiting).await, [Ok(()), Ok(())]);
        let _turn = lane.turn(A).await.unwrap();
        let late = EngineError::NoTurn { waited_s: 30 };
        assert_eq!(lane.turn(A).await.err(), Some(late), "places are free, but no turn came in time");
    }

    #[tokio::test]
    async fn work_that_left_takes_neither_a_place_nor_a_turn() {
        let lane = Lane::new(1, 1);
        let turn = lane.turn(A).await.unwrap();
        drop(waits(&lane, A));
        let next = waits(&lane, A);
        drop(turn);
        // It has been given a turn, and leaves without it.
        drop(next);
        assert!(lane.turn(A).now_or_never().is_some_and(|turn| turn.is_ok()));
    }

    #[tokio::test]
    async fn the_key_with_the_fewest_turns_is_next_however_many_wait_before_it() {
        let lane = Lane::new(2, 9);
        let mut running = vec![lane.turn(A).await.unwrap(), lane.turn(A).await.unwrap()];
        let mut older = [waits(&lane, A), waits(&lane, A)];
        let mut newest = waits(&lane, B);
        running.pop();
        let turn = (&mut newest).now_or_never().and_then(Result::ok);
        assert!(turn.is_some(), "it is served next");
        assert!(older.iter_mut().all(|one| one.now_or_never().is_none()));
    }

    #[tokio::test]
    async fn a_key_that_has_filled_the_queue_makes_room_for_another() {
        let lane = Lane::new(1, 2);
        let _turn = lane.turn(A).await.unwrap();
        let [mut first, second] = [waits(&lane, A), waits(&lane, A)];
        let mut other = waits(&lane, B);
        assert_eq!(second.await.err(), Some(EngineError::QueueFull { limit: 2 }), "the newest of the longest line");
        assert!((&mut first).now_or_never().is_none() && (&mut other).now_or_never().is_none());
        assert_eq!(
            lane.turn(B).await.err(),
            Some(EngineError::QueueFull { limit: 2 }),
            "no line is longer than its own"
        );
    }
}
