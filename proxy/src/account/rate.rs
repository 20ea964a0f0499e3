//! A rate per minute with a burst of one minute: the generic cell rate algorithm, whose only state is the time at which the
//! whole burst is available again.
//!
//! The tokens of a request are known only when it has ended, so they are charged afterwards. A charge may exceed the
//! burst. The rest is a debt, and no request is admitted until it is paid.

use std::num::NonZeroU32;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);

/// The largest reset time that is shown.
const DAY: Duration = Duration::from_secs(86_400);

/// The largest debt, so that times cannot overflow.
const MAX_DEBT: Duration = Duration::from_secs(10 * 365 * 86_400);

/// A limit per minute and its current use.
#[derive(Debug)]
pub(super) struct Rate {
    limit: NonZeroU32,
    /// The burst grows back until then.
    full_at: Mutex<Instant>,
}

/// The limit, remainder and reset time of a rate, as shown in headers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quota {
    /// Units per minute.
    pub limit: u32,
    /// Units left now.
    pub remaining: u32,
    /// Time until the full limit is available again.
    pub reset: Duration,
}

impl Rate {
    /// Returns `None` for a limit of 0, which means no limit.
    pub(super) fn per_minute(limit: u32, now: Instant) -> Option<Rate> {
        Some(Rate { limit: NonZeroU32::new(limit)?, full_at: Mutex::new(now) })
    }

    /// Takes one unit. Errors: the time until one is available.
    pub(super) fn take(&self, now: Instant) -> Result<(), Duration> {
        let mut full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        let reset = full_at.saturating_duration_since(now) + self.time_of(1);
        wait_until_within_burst(reset)?;
        *full_at = now + reset;
        Ok(())
    }

    /// Takes `n` units. If fewer are left, the rest becomes a debt.
    pub(super) fn charge(&self, n: u64, now: Instant) {
        let mut full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        let reset = full_at.saturating_duration_since(now).saturating_add(self.time_of(n));
        *full_at = now + reset.min(MAX_DEBT);
    }

    /// Checks that there is no debt. Errors: the time until the debt is paid, a minute at most.
    pub(super) fn settle(&self, now: Instant) -> Result<(), Duration> {
        wait_until_within_burst(self.reset(now))
    }

    /// Returns the units that were taken and are not refilled yet, debts included.
    pub(super) fn used(&self, now: Instant) -> u64 {
        (self.reset(now).as_nanos() * self.limit()).div_ceil(MINUTE.as_nanos()) as u64
    }

    pub(super) fn quota(&self, now: Instant) -> Quota {
        let reset = self.reset(now);
        let remaining = MINUTE.saturating_sub(reset).as_nanos() * self.limit() / MINUTE.as_nanos();
        Quota { limit: self.limit.get(), remaining: remaining as u32, reset: reset.min(DAY) }
    }

    fn reset(&self, now: Instant) -> Duration {
        self.full_at.lock().unwrap_or_else(PoisonError::into_inner).saturating_duration_since(now)
    }

    /// The time in which `n` units are refilled, rounded down so that the whole limit fits into a minute.
    fn time_of(&self, n: u64) -> Duration {
        let nanos = u128::from(n) * MINUTE.as_nanos() / self.limit();
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn limit(&self) -> u128 {
        self.limit.get().into()
    }
}

/// Errors: the time until `reset` is within the burst. At most a minute, because OpenAI's SDKs ignore longer advice.
fn wait_until_within_burst(reset: Duration) -> Result<(), Duration> {
    match reset.checked_sub(MINUTE) {
        None | Some(Duration::ZERO) => Ok(()),
        Some(wait) => Err(wait.min(MINUTE)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn a_minutes_worth_is_available_at_once_and_then_no_more() {
        let now = Instant::now();
        for limit in [3, 7, 9, 1_000] {
            let rate = Rate::per_minute(limit, now).unwrap();
            assert_eq!(rate.quota(now), Quota { limit, remaining: limit, reset: Duration::ZERO });
            for left in (0..limit).rev() {
                rate.take(now).unwrap();
                assert_eq!(rate.quota(now).remaining, left);
            }
            assert!(rate.take(now).is_err());
        }
        let rate = Rate::per_minute(3, now).unwrap();
        (0..3).for_each(|_| rate.take(now).unwrap());
        assert_eq!((rate.take(now), rate.quota(now).reset), (Err(seconds(20)), MINUTE));
        assert!(Rate::per_minute(0, now).is_none());
    }

    #[test]
    fn a_charge_beyond_the_limit_is_a_debt() {
        let now = Instant::now();
        let rate = Rate::per_minute(60, now).unwrap();
        rate.charge(50, now);
        rate.settle(now).unwrap();
        rate.charge(130, now);
        assert_eq!(rate.quota(now), Quota { limit: 60, remaining: 0, reset: seconds(180) });
        assert_eq!((rate.settle(now), rate.settle(now + seconds(90))), (Err(MINUTE), Err(seconds(30))));
        rate.settle(now + seconds(120)).unwrap();
        rate.charge(u64::MAX, now);
        assert_eq!(rate.quota(now).reset, DAY);
    }

    #[test]
    fn units_in_use_include_the_debt() {
        let now = Instant::now();
        let rate = Rate::per_minute(60, now).unwrap();
        assert_eq!(rate.used(now), 0);
        rate.take(now).unwrap();
        rate.charge(9, now);
        assert_eq!(rate.used(now), 10);
        rate.charge(100, now);
        assert_eq!((rate.used(now), rate.used(now + seconds(10))), (110, 100));
    }

    #[test]
    fn units_are_refilled_with_time() {
        let now = Instant::now();
        let rate = Rate::per_minute(60, now).unwrap();
        rate.charge(70, now);
        let wait = rate.settle(now).unwrap_err();
        assert_eq!(wait, seconds(10));
        rate.settle(now + wait).unwrap();
        assert_eq!((rate.take(now + wait), rate.take(now + wait + seconds(1))), (Err(seconds(1)), Ok(())));
    }
}
