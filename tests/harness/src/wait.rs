//! Waiting for a condition, with a deadline.

use std::time::{Duration, Instant};

/// How long a condition may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// Time between two checks of a condition.
const PAUSE: Duration = Duration::from_millis(20);

/// Polls until there is a value.
#[track_caller]
pub fn eventually<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {DEADLINE:?} for {what}");
        std::thread::sleep(PAUSE);
    }
}

/// Polls an async condition until it holds.
pub async fn eventually_async<F: Future<Output = bool>>(what: &str, mut poll: impl FnMut() -> F) {
    let deadline = Instant::now() + DEADLINE;
    while !poll().await {
        assert!(Instant::now() < deadline, "waited {DEADLINE:?} for {what}");
        tokio::time::sleep(PAUSE).await;
    }
}
