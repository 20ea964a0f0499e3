//! A rate per minute with a burst of one minute, on `governor`'s generic cell rate algorithm.
//!
//! The tokens of a request are known only when it has ended, so they are charged afterwards. If the reserve is too
//! small, the rest becomes a debt, and no request is admitted until it is paid.

use std::num::NonZeroU32;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use governor::clock::{Clock, DefaultClock};
use governor::middleware::StateInformationMiddleware;
use governor::state::{InMemoryState, NotKeyed};

type Limiter = governor::RateLimiter<NotKeyed, InMemoryState, DefaultClock, StateInformationMiddleware>;

/// A limit per minute and its current use.
pub(super) struct Rate {
    limit: NonZeroU32,
    limiter: Limiter,
    clock: DefaultClock,
    balance: Mutex<Balance>,
}

struct Balance {
    debt: u64,
    /// The last known remainder and the time it was read.
    left: (u32, Instant),
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
    pub(super) fn per_minute(limit: u32) -> Option<Rate> {
        let limit = NonZeroU32::new(limit)?;
        let limiter = governor::RateLimiter::direct(governor::Quota::per_minute(limit)).with_middleware();
        let balance = Mutex::new(Balance { debt: 0, left: (limit.get(), Instant::now()) });
        Some(Rate { limit, limiter, clock: DefaultClock::default(), balance })
    }

    /// Returns the units that were taken and are not refilled yet, debts included.
    pub(super) fn used(&self) -> u64 {
        let balance = self.lock();
        let missing = f64::from(self.limit.get()) - self.owned(&balance);
        missing.max(0.0).ceil() as u64
    }

    /// Returns the units left now; negative while there is a debt.
    fn owned(&self, balance: &Balance) -> f64 {
        let (left, at) = balance.left;
        let limit = f64::from(self.limit.get());
        let refilled = f64::from(left) + at.elapsed().as_secs_f64() * self.per_second();
        refilled.min(limit) - balance.debt as f64
    }

    fn per_second(&self) -> f64 {
        f64::from(self.limit.get()) / 60.0
    }

    /// Takes one unit. Errors: the time until one is available.
    pub(super) fn take(&self) -> Result<(), Duration> {
        let mut balance = self.lock();
        self.pay_debt(&mut balance)?;
        self.pay(&mut balance, NonZeroU32::MIN)
    }

    /// Takes `n` units. If fewer are left, the rest becomes a debt.
    pub(super) fn charge(&self, n: u64) {
        let mut balance = self.lock();
        balance.debt = balance.debt.saturating_add(n);
        // What the reserve cannot pay now stays a debt.
        let _ = self.pay_debt(&mut balance);
    }

    /// Checks that there is no debt. Errors: the time until the debt is paid.
    pub(super) fn settle(&self) -> Result<(), Duration> {
        self.pay_debt(&mut self.lock())
    }

    pub(super) fn quota(&self) -> Quota {
        let owned = self.owned(&self.lock());
        let limit = self.limit.get();
        let missing = (f64::from(limit) - owned) / self.per_second();
        Quota {
            limit,
            remaining: owned.max(0.0) as u32,
            // A debt of more than a day is shown as a day.
            reset: Duration::from_secs_f64(missing.clamp(0.0, 86_400.0)),
        }
    }

    fn pay_debt(&self, balance: &mut Balance) -> Result<(), Duration> {
        while let Some(part) = NonZeroU32::new(balance.debt.min(self.limit.get().into()) as u32) {
            self.pay(balance, part)?;
            balance.debt -= u64::from(part.get());
        }
        Ok(())
    }

    /// Pays `n` units; `n` is at most the limit. Errors: the time until that is possible.
    fn pay(&self, balance: &mut Balance, n: NonZeroU32) -> Result<(), Duration> {
        match self.limiter.check_n(n) {
            Ok(Ok(state)) => {
                balance.left = (state.remaining_burst_capacity(), Instant::now());
                Ok(())
            }
            Ok(Err(not_until)) => Err(not_until.wait_time_from(self.clock.now())),
            // Unreachable while `n` is within the limit. A minute refills the whole reserve.
            Err(_) => Err(Duration::from_secs(60)),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Balance> {
        self.balance.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Rate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rate({} a minute)", self.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minutes_worth_is_there_at_once_and_then_no_more() {
        let rate = Rate::per_minute(3).unwrap();
        assert_eq!(rate.quota().remaining, 3);
        for left in [2, 1, 0] {
            rate.take().unwrap();
            assert_eq!(rate.quota().remaining, left);
        }
        let wait = rate.take().unwrap_err();
        assert!(wait > Duration::from_secs(15) && wait <= Duration::from_secs(20), "{wait:?}");
        assert!(rate.quota().reset > Duration::from_secs(55));
        assert!(Rate::per_minute(0).is_none());
    }

    #[test]
    fn what_was_used_beyond_the_limit_is_a_debt() {
        let rate = Rate::per_minute(60).unwrap();
        rate.charge(50);
        rate.settle().unwrap();
        rate.charge(130);
        assert_eq!(rate.quota().remaining, 0);
        let wait = rate.settle().unwrap_err();
        assert!(wait > Duration::from_secs(45) && wait <= Duration::from_secs(60), "{wait:?}");
        assert!(rate.quota().reset > Duration::from_secs(170), "{:?}", rate.quota());
    }

    #[test]
    fn what_is_in_use_is_counted_with_the_debt() {
        let rate = Rate::per_minute(60).unwrap();
        assert_eq!(rate.used(), 0);
        rate.take().unwrap();
        rate.charge(9);
        assert_eq!(rate.used(), 10);
        rate.charge(100);
        assert!((109..=110).contains(&rate.used()), "{}", rate.used());
    }

    #[test]
    fn what_comes_back_can_be_used() {
        let rate = Rate::per_minute(60_000).unwrap();
        rate.charge(60_010);
        let wait = rate.settle().unwrap_err();
        std::thread::sleep(wait + Duration::from_millis(5));
        rate.settle().unwrap();
    }
}
