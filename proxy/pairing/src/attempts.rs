//! How often and how long a code may be tried.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::code::MAX_FAILED_ATTEMPTS;
use super::error::PairingRefusal;

/// The attempts on one code. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Attempts(Arc<AttemptLimits>);

struct AttemptLimits {
    counts: Mutex<AttemptCounts>,
    /// Told when the code becomes void.
    voided: Notify,
    expires: Instant,
    /// On the clock that goes on while the machine sleeps; that of `expires` stands still.
    expires_since_boot: Duration,
}

#[derive(Default)]
struct AttemptCounts {
    failed: u32,
    running: u32,
}

/// A run with the code. It counts as failed unless the other side proves that it knows the code: dropping this counts it.
pub(crate) struct Attempt {
    of: Attempts,
    has_succeeded: bool,
}

impl Attempts {
    pub(crate) fn new(lifetime: Duration) -> Attempts {
        let expires = Instant::now() + lifetime;
        let expires_since_boot = time_since_boot() + lifetime;
        Attempts(Arc::new(AttemptLimits {
            counts: Mutex::default(),
            voided: Notify::new(),
            expires,
            expires_since_boot,
        }))
    }

    /// Begins a run. It is counted now, before anything is computed with the code, so that runs at the same time do not
    /// get more attempts together.
    pub(crate) fn begin(&self) -> Result<Attempt, PairingRefusal> {
        let mut counts = self.counts();
        if counts.failed >= MAX_FAILED_ATTEMPTS {
            return Err(PairingRefusal::Void);
        }
        if self.has_expired() {
            return Err(PairingRefusal::Expired);
        }
        if counts.failed + counts.running >= MAX_FAILED_ATTEMPTS {
            return Err(PairingRefusal::Busy);
        }
        counts.running += 1;
        Ok(Attempt { of: self.clone(), has_succeeded: false })
    }

    /// Failed attempts that are left.
    pub(crate) fn n_left(&self) -> u32 {
        MAX_FAILED_ATTEMPTS.saturating_sub(self.counts().failed)
    }

    /// Waits until the code is void.
    pub(crate) async fn voided(&self) {
        loop {
            // Before the check: `notify_waiters` wakes those that were created before it.
            let told = self.0.voided.notified();
            if self.n_left() == 0 {
                return;
            }
            told.await;
        }
    }

    /// Waits until the code expires.
    pub(crate) async fn expired(&self) {
        while !self.has_expired() {
            // Also soon after the machine has slept.
            tokio::time::sleep_until(self.0.expires.min(Instant::now() + Duration::from_secs(1))).await;
        }
    }

    fn has_expired(&self) -> bool {
        Instant::now() >= self.0.expires || time_since_boot() >= self.0.expires_since_boot
    }

    fn counts(&self) -> MutexGuard<'_, AttemptCounts> {
        self.0.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// On a clock that counts the time in which the machine sleeps.
fn time_since_boot() -> Duration {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let clock = ClockId::Boottime;
    // Apple's counts sleep, too.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let clock = ClockId::Monotonic;
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

impl Attempt {
    /// The other side knows the code.
    pub(crate) fn succeed(mut self) {
        self.has_succeeded = true;
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let mut counts = self.of.counts();
        counts.running -= 1;
        if !self.has_succeeded {
            counts.failed += 1;
            if counts.failed >= MAX_FAILED_ATTEMPTS {
                self.of.0.voided.notify_waiters();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::code::CODE_LIFETIME;
    use super::*;

    #[test]
    fn five_failures_make_a_code_void_and_successes_do_not_count() {
        let attempts = Attempts::new(CODE_LIFETIME);
        for left in (1..=MAX_FAILED_ATTEMPTS).rev() {
            assert_eq!(attempts.n_left(), left);
            attempts.begin().unwrap().succeed();
            drop(attempts.begin().unwrap());
        }
        assert_eq!(attempts.begin().err(), Some(PairingRefusal::Void));
    }

    #[test]
    fn runs_at_the_same_time_get_no_more_than_five() {
        let attempts = Attempts::new(CODE_LIFETIME);
        let mut running: Vec<Attempt> = (0..MAX_FAILED_ATTEMPTS).map(|_| attempts.begin().unwrap()).collect();
        assert_eq!(attempts.begin().err(), Some(PairingRefusal::Busy));
        running.pop().unwrap().succeed();
        running.push(attempts.begin().unwrap());
        assert_eq!(attempts.begin().err(), Some(PairingRefusal::Busy));
        drop(running);
        assert_eq!(attempts.begin().err(), Some(PairingRefusal::Void));
    }

    #[tokio::test(start_paused = true)]
    async fn a_code_expires() {
        let attempts = Attempts::new(CODE_LIFETIME);
        tokio::time::advance(CODE_LIFETIME - Duration::from_millis(1)).await;
        attempts.begin().unwrap().succeed();
        tokio::time::advance(Duration::from_millis(1)).await;
        attempts.expired().await;
        assert_eq!(attempts.begin().err(), Some(PairingRefusal::Expired));
    }

    #[tokio::test]
    async fn whoever_waits_learns_that_the_code_is_void() {
        let attempts = Attempts::new(CODE_LIFETIME);
        let waiting = tokio::spawn({
            let attempts = attempts.clone();
            async move { attempts.voided().await }
        });
        for _ in 0..MAX_FAILED_ATTEMPTS {
            tokio::task::yield_now().await;
            drop(attempts.begin().unwrap());
        }
        waiting.await.unwrap();
    }
}
