//! A rate per minute with a burst of one minute, on `governor`'s generic cell rate algorithm.
//!
//! The tokens of a request are known only when it has ended, so they are charged afterwards. A charge may exceed
//! the burst. The rest is a debt, and no request is admitted until what is refilled has paid it.

use std::num::NonZeroU32;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use governor::clock::{Clock, DefaultClock, Reference};
use governor::middleware::StateInformationMiddleware;
use governor::state::{InMemoryState, NotKeyed};

/// The longest wait that an error names: OpenAI's SDKs ignore longer advice.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// The largest debt: what is refilled in an hour. One wrong count, such as an upstream's, must not bar a key for longer.
const MAX_DEBT_MINUTES: u64 = 60;

/// The largest part of a unit that counts as less than one.
const BELOW_ONE: f64 = 1.0 - 1e-6;

type Limiter<C> = governor::RateLimiter<NotKeyed, InMemoryState, C, StateInformationMiddleware>;

/// A limit per minute and its current use. Tests choose the clock.
pub(super) struct Rate<C: Clock = DefaultClock> {
    limit: NonZeroU32,
    limiter: Limiter<C>,
    clock: C,
    balance: Mutex<Balance<C::Instant>>,
}

struct Balance<I> {
    /// Units that were charged beyond the burst. While there are any, nothing is taken from the limiter.
    debt: u64,
    /// The units that the limiter had left at `read_at`, with the part of a unit that it does not report. Less than one
    /// while there is a debt.
    left: f64,
    read_at: I,
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
        Rate::with_clock(limit, DefaultClock::default())
    }
}

impl<C: Clock + Clone> Rate<C> {
    fn with_clock(limit: u32, clock: C) -> Option<Rate<C>> {
        let limit = NonZeroU32::new(limit)?;
        let quota = governor::Quota::per_minute(limit);
        let limiter = governor::RateLimiter::direct_with_clock(quota, clock.clone()).with_middleware();
        let balance = Mutex::new(Balance { debt: 0, left: limit.get().into(), read_at: clock.now() });
        Some(Rate { limit, limiter, clock, balance })
    }

    /// Returns the units that were taken and are not refilled yet, debts included.
    pub(super) fn used(&self) -> u64 {
        let balance = self.lock();
        let missing = f64::from(self.limit.get()) - self.owned(&balance);
        missing.max(0.0).ceil() as u64
    }

    /// Returns the units left now; negative while there is a debt.
    fn owned(&self, balance: &Balance<C::Instant>) -> f64 {
        (balance.left + self.refilled(balance) - balance.debt as f64).min(f64::from(self.limit.get()))
    }

    /// Returns the units in the limiter now, from which a debt is not subtracted yet.
    fn in_limiter(&self, balance: &Balance<C::Instant>) -> f64 {
        (balance.left + self.refilled(balance)).min(f64::from(self.limit.get()))
    }

    /// Returns the units that were refilled since the balance was read. They pay the debt first.
    fn refilled(&self, balance: &Balance<C::Instant>) -> f64 {
        let elapsed: Duration = self.clock.now().duration_since(balance.read_at).into();
        elapsed.as_secs_f64() * self.per_second()
    }

    fn per_second(&self) -> f64 {
        f64::from(self.limit.get()) / 60.0
    }

    /// Takes one unit. Errors: the time until one is available, a minute at most.
    pub(super) fn take(&self) -> Result<(), Duration> {
        let mut balance = self.lock();
        let one_unit = Duration::from_secs_f64(1.0 / self.per_second());
        self.pay_debt(&mut balance).map_err(|until_paid| (until_paid + one_unit).min(MAX_WAIT))?;
        self.pay(&mut balance, NonZeroU32::MIN)
    }

    /// Checks that a unit is left, without taking it. Errors: the time until one is available, a minute at most.
    pub(super) fn check(&self) -> Result<(), Duration> {
        let mut balance = self.lock();
        let one_unit = Duration::from_secs_f64(1.0 / self.per_second());
        self.pay_debt(&mut balance).map_err(|until_paid| (until_paid + one_unit).min(MAX_WAIT))?;
        let owned = self.owned(&balance);
        // A unit that is nearly refilled passes: the limiter, which takes it, counts more exactly.
        if owned > 0.5 { Ok(()) } else { Err(Duration::from_secs_f64((1.0 - owned) / self.per_second()).min(MAX_WAIT)) }
    }

    /// Takes `n` units. If fewer are left, the rest becomes a debt.
    pub(super) fn charge(&self, mut n: u64) {
        let mut balance = self.lock();
        if self.pay_debt(&mut balance).is_ok() {
            let limit = u64::from(self.limit.get());
            while let Some(part) = NonZeroU32::new(n.min((self.owned(&balance) as u64).clamp(1, limit)) as u32) {
                if self.pay(&mut balance, part).is_err() {
                    balance.left = self.in_limiter(&balance).min(BELOW_ONE);
                    balance.read_at = self.clock.now();
                    break;
                }
                n -= u64::from(part.get());
            }
        }
        let most = u64::from(self.limit.get()) * MAX_DEBT_MINUTES;
        balance.debt = balance.debt.saturating_add(n).min(most);
    }

    /// Checks that there is no debt. Errors: the time until the debt is paid, a minute at most.
    pub(super) fn settle(&self) -> Result<(), Duration> {
        self.pay_debt(&mut self.lock())
    }

    pub(super) fn quota(&self) -> Quota {
        let owned = self.owned(&self.lock());
        let limit = self.limit.get();
        let missing = (f64::from(limit) - owned) / self.per_second();
        Quota { limit, remaining: owned.max(0.0) as u32, reset: Duration::from_secs_f64(missing.max(0.0)) }
    }

    /// Pays the debt with what was refilled since it was made. Errors: the time until that is enough, a minute at most.
    fn pay_debt(&self, balance: &mut Balance<C::Instant>) -> Result<(), Duration> {
        if balance.debt == 0 {
            return Ok(());
        }
        let owned = self.owned(balance);
        if owned < 0.0 {
            return Err(Duration::from_secs_f64((-owned / self.per_second()).min(MAX_WAIT.as_secs_f64())));
        }
        // The limiter refilled meanwhile, so it gives up what the debt has used of that.
        let in_limiter = self.in_limiter(balance) as u32;
        if let Some(used) = NonZeroU32::new(in_limiter - (owned as u32).min(in_limiter)) {
            self.pay(balance, used)?;
        }
        balance.debt = 0;
        Ok(())
    }

    /// Pays `n` units; `n` is at most the limit. Errors: the time until that is possible.
    fn pay(&self, balance: &mut Balance<C::Instant>, n: NonZeroU32) -> Result<(), Duration> {
        let left = self.in_limiter(balance) - f64::from(n.get());
        match self.limiter.check_n(n) {
            Ok(Ok(state)) => {
                // The limiter reports whole units, and keeps the rest.
                let whole = f64::from(state.remaining_burst_capacity());
                balance.left = left.clamp(whole, whole + BELOW_ONE);
                balance.read_at = self.clock.now();
                Ok(())
            }
            Ok(Err(not_until)) => Err(not_until.wait_time_from(self.clock.now())),
            // Unreachable while `n` is within the limit. A minute refills the whole reserve.
            Err(_) => Err(MAX_WAIT),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Balance<C::Instant>> {
        self.balance.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C: Clock> std::fmt::Debug for Rate<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rate({} a minute)", self.limit)
    }
}

#[cfg(test)]
mod tests {
    use governor::clock::FakeRelativeClock;

    use super::*;

    const fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    fn rate(limit: u32) -> (Rate<FakeRelativeClock>, FakeRelativeClock) {
        let clock = FakeRelativeClock::default();
        (Rate::with_clock(limit, clock.clone()).unwrap(), clock)
    }

    #[test]
    fn a_minutes_worth_is_available_at_once_and_then_no_more() {
        let (rate, _) = rate(3);
        assert_eq!(rate.quota(), Quota { limit: 3, remaining: 3, reset: Duration::ZERO });
        for left in [2, 1, 0] {
            rate.take().unwrap();
            assert_eq!(rate.quota().remaining, left);
        }
        assert_eq!((rate.take(), rate.quota().reset), (Err(seconds(20)), seconds(60)));
        assert!(Rate::per_minute(0).is_none());
    }

    #[test]
    fn a_charge_beyond_the_limit_is_a_debt() {
        let (rate, clock) = rate(60);
        rate.charge(50);
        rate.settle().unwrap();
        rate.charge(130);
        assert_eq!(rate.quota().remaining, 0);
        assert_eq!(rate.quota().reset, seconds(180));
        assert_eq!(rate.settle(), Err(seconds(60)));
        clock.advance(seconds(90));
        assert_eq!(rate.settle(), Err(seconds(30)));
        clock.advance(seconds(30));
        rate.settle().unwrap();
        assert_eq!((rate.quota().remaining, rate.take()), (0, Err(seconds(1))));
        rate.charge(u64::MAX);
        assert_eq!(rate.quota().reset, seconds(3_660), "the burst, and an hour of debt");
        rate.charge(u64::MAX);
        clock.advance(seconds(3_600));
        rate.settle().unwrap();
    }

    #[test]
    fn during_a_debt_a_unit_is_available_after_the_debt_is_paid() {
        let (rate, clock) = rate(60);
        rate.charge(70);
        let wait = rate.take().unwrap_err();
        assert_eq!((wait, rate.settle()), (seconds(11), Err(seconds(10))));
        clock.advance(wait);
        rate.take().unwrap();
        rate.charge(180);
        assert_eq!(rate.take(), Err(seconds(60)), "longer advice is ignored");
    }

    #[test]
    fn a_paid_debt_leaves_what_was_refilled_after_it() {
        let (rate, clock) = rate(60);
        rate.charge(180);
        clock.advance(seconds(140));
        rate.settle().unwrap();
        assert_eq!(rate.quota().remaining, 20);
        (0..20).for_each(|_| rate.take().unwrap());
        assert_eq!(rate.take(), Err(seconds(1)));
        clock.advance(seconds(600));
        assert_eq!(rate.quota().remaining, 60);
    }

    #[test]
    fn parts_of_a_unit_are_not_lost_when_debts_are_paid() {
        let (rate, clock) = rate(60);
        rate.charge(60);
        for _ in 0..4 {
            rate.charge(10);
            clock.advance(Duration::from_millis(10_500));
            rate.settle().unwrap();
        }
        // 42 units were refilled and 40 used.
        assert_eq!(rate.quota().remaining, 2);
        rate.take().unwrap();
        rate.take().unwrap();
        assert_eq!(rate.take(), Err(seconds(1)));
    }

    #[test]
    fn units_in_use_include_the_debt() {
        let (rate, clock) = rate(60);
        assert_eq!(rate.used(), 0);
        rate.take().unwrap();
        rate.charge(9);
        assert_eq!(rate.used(), 10);
        rate.charge(100);
        assert_eq!(rate.used(), 110);
        clock.advance(seconds(10));
        assert_eq!(rate.used(), 100);
    }

    #[test]
    fn units_are_refilled_with_time() {
        let (rate, clock) = rate(60);
        rate.charge(70);
        let wait = rate.settle().unwrap_err();
        assert_eq!(wait, seconds(10));
        clock.advance(wait);
        rate.settle().unwrap();
        assert_eq!(rate.take(), Err(seconds(1)));
        clock.advance(seconds(1));
        rate.take().unwrap();
    }
}
