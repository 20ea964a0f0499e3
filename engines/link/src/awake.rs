//! Deadlines for the silence of others. Time in which this process was stopped does not count.
//!
//! A laptop that wakes up, a process after SIGCONT and a paused virtual machine find all their timers expired, and the
//! bytes that came meanwhile not read yet. Taken literally, every other machine has been silent.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// A wait is divided into parts of this length. However long a part takes, it counts as this long.
const PART: Duration = Duration::from_millis(500);

/// A timer that fires so much later than it was set for shows that this process was stopped. More than the delays of a
/// busy machine.
const OVERSLEPT: Duration = Duration::from_secs(2);

/// The time is over, and the process ran during all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Elapsed;

/// Waits for a future, for at most this long. If the process is stopped meanwhile, that time does not count, and the
/// future is polled again before the time is over.
pub async fn timeout<T>(limit: Duration, future: impl Future<Output = T>) -> Result<T, Elapsed> {
    tokio::pin!(future);
    let mut left = limit;
    loop {
        let part = left.min(PART);
        if let Ok(output) = tokio::time::timeout(part, &mut future).await {
            return Ok(output);
        }
        left -= part;
        if left.is_zero() {
            return Err(Elapsed);
        }
    }
}

/// Times many waits, one after another, with one timer. A wait that ends in time does not touch it.
pub struct WaitTimer {
    part: Pin<Box<Sleep>>,
    /// When the current wait began.
    since: Option<Instant>,
}

impl WaitTimer {
    pub fn new() -> WaitTimer {
        WaitTimer { part: Box::pin(tokio::time::sleep(PART)), since: None }
    }

    /// Ends the current wait, if there is one. Returns how long it took, at most a part.
    pub fn waited(&mut self) -> Duration {
        self.since.take().map_or(Duration::ZERO, |since| since.elapsed().min(PART))
    }

    /// Begins a wait of at most this long. Ready once that time, or a part of it, is over.
    pub fn poll_wait(&mut self, cx: &mut Context<'_>, limit: Duration) -> Poll<()> {
        let now = Instant::now();
        self.since = Some(now);
        let due = now + limit.min(PART);
        if self.part.deadline() > due || self.part.deadline() <= now {
            self.part.as_mut().reset(due);
        }
        self.part.as_mut().poll(cx)
    }
}

impl Default for WaitTimer {
    fn default() -> WaitTimer {
        WaitTimer::new()
    }
}

/// Returns true if a timer that was set for `due` and fires now shows that the process was stopped.
pub fn has_overslept(due: Instant) -> bool {
    Instant::now() > due + OVERSLEPT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_after_its_time() {
        let began = Instant::now();
        assert_eq!(timeout(Duration::from_millis(5_250), std::future::pending::<()>()).await, Err(Elapsed));
        assert_eq!(began.elapsed().as_millis() / 10, 525);
        assert_eq!(timeout(Duration::from_secs(5), async { 7 }).await, Ok(7));
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_this_process_was_stopped_does_not_count() {
        // The answer is there when the process runs again, but is noticed a little later.
        let answer = tokio::time::sleep(Duration::from_millis(120_300));
        let stop = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            tokio::time::advance(Duration::from_secs(120)).await;
        };
        let (answered, ()) = tokio::join!(timeout(Duration::from_secs(5), answer), stop);
        assert_eq!(answered, Ok(()));
        assert!(has_overslept(Instant::now() - Duration::from_secs(3)) && !has_overslept(Instant::now()));
    }
}
