//! Budgets: the tokens that a key may use on a day and in a month (UTC).
//!
//! A request reserves what it may need before an engine works for it, and settles with what it has used at its end. Used
//! tokens are counted without a budget, too, so a reload can add one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use crate::error::{BudgetPeriod, RequestError};
use crate::utc_day::UtcDay;

/// The most tokens that are reserved for a choice. A longer reply is charged at its end, and may overdraw the budget: most
/// clients name no length, and a whole context would reserve a day's budget.
pub(crate) const MAX_RESERVED_REPLY: u32 = 4_096;

/// Tokens that a key may use. `None`: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenBudgets {
    pub a_day: Option<u64>,
    pub a_month: Option<u64>,
}

/// Tokens that a key has used, of prompts and replies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokensSpent {
    pub today: u64,
    /// Includes today's.
    pub this_month: u64,
}

/// The tokens that a key has spent and reserved. Its successors share it.
#[derive(Debug)]
pub(super) struct Spending(Mutex<SpentOn>);

#[derive(Debug)]
struct SpentOn {
    day: UtcDay,
    spent: TokensSpent,
    reserved: u64,
}

impl SpentOn {
    /// Begins a new day or month. A clock that is set back begins none, and gives nothing back.
    fn roll_to(&mut self, today: UtcDay) {
        if today <= self.day {
            // It was days ahead. Otherwise what is spent would stay spent until the wrong day comes.
            if today.next() < self.day {
                self.day = today;
            }
            return;
        }
        self.spent.today = 0;
        if today.first_of_month() != self.day.first_of_month() {
            self.spent.this_month = 0;
        }
        self.day = today;
    }

    fn spend(&mut self, n_tokens: u64) {
        self.spent.today = self.spent.today.saturating_add(n_tokens);
        self.spent.this_month = self.spent.this_month.saturating_add(n_tokens);
    }
}

impl Default for Spending {
    fn default() -> Spending {
        Spending(Mutex::new(SpentOn { day: UtcDay::today(), spent: TokensSpent::default(), reserved: 0 }))
    }
}

impl Spending {
    fn lock(&self, today: UtcDay) -> MutexGuard<'_, SpentOn> {
        let mut spent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        spent.roll_to(today);
        spent
    }

    /// Adds what was spent before this process began.
    pub(super) fn restore(&self, before: TokensSpent) {
        let mut now = self.lock(UtcDay::today());
        now.spent.today = now.spent.today.saturating_add(before.today);
        now.spent.this_month = now.spent.this_month.saturating_add(before.this_month);
    }

    pub(super) fn spent(&self) -> TokensSpent {
        self.lock(UtcDay::today()).spent
    }

    /// Reserves `n_tokens`. Errors: a budget has not so many left.
    pub(super) fn reserve(
        self: &Arc<Self>,
        budgets: TokenBudgets,
        n_tokens: u64,
        now: SystemTime,
    ) -> Result<BudgetHold, RequestError> {
        let today = UtcDay::of(now);
        let mut state = self.lock(today);
        let of_day = (BudgetPeriod::Day, budgets.a_day, state.spent.today);
        let of_month = (BudgetPeriod::Month, budgets.a_month, state.spent.this_month);
        // If both are spent, the month's is reported, because it resets later.
        for (period, budget, spent) in [of_month, of_day] {
            let Some(budget) = budget else { continue };
            let n_left = budget.saturating_sub(spent).saturating_sub(state.reserved);
            if n_tokens > n_left {
                let resets = period.next_after(today);
                let retry_after = resets.begins_after(now);
                return Err(RequestError::BudgetSpent { period, budget, n_left, n_tokens, resets, retry_after });
            }
        }
        state.reserved = state.reserved.saturating_add(n_tokens);
        Ok(BudgetHold { spending: Arc::clone(self), n_reserved: n_tokens })
    }

    /// Charges tokens that were not reserved.
    pub(super) fn spend(&self, n_tokens: u64) {
        self.lock(UtcDay::today()).spend(n_tokens);
    }
}

/// Tokens that are reserved for a request. Dropping it gives them back, unless it was settled.
#[derive(Debug)]
pub struct BudgetHold {
    spending: Arc<Spending>,
    n_reserved: u64,
}

impl BudgetHold {
    /// Charges what was used in the place of what was reserved, at once: no other request can reserve it in between.
    pub(super) fn settle(mut self, n_tokens: u64) {
        let n_reserved = std::mem::take(&mut self.n_reserved);
        let mut state = self.spending.lock(UtcDay::today());
        state.spend(n_tokens);
        state.reserved = state.reserved.saturating_sub(n_reserved);
    }
}

impl Drop for BudgetHold {
    fn drop(&mut self) {
        let mut state = self.spending.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.reserved = state.reserved.saturating_sub(self.n_reserved);
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    /// 2100-02-28T23:00:00Z, later than any clock that runs this test.
    const NOW: Duration = Duration::from_secs(4_107_538_800);

    fn left(outcome: Result<BudgetHold, RequestError>) -> (BudgetPeriod, u64, String, u64) {
        match outcome {
            Err(RequestError::BudgetSpent { period, n_left, resets, retry_after, .. }) => {
                (period, n_left, resets.to_string(), retry_after.as_secs())
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_reserved_cannot_be_reserved_again_and_comes_back_if_it_is_not_used() {
        let spending = Arc::<Spending>::default();
        let now = UNIX_EPOCH + NOW;
        let budgets = TokenBudgets { a_day: Some(100), a_month: Some(150) };
        let reserve = |n| spending.reserve(budgets, n, now);
        let first = reserve(60).unwrap();
        let refused = left(reserve(41));
        assert_eq!(refused, (BudgetPeriod::Day, 40, "2100-03-01".into(), 3_600));
        let second = reserve(40).unwrap();
        drop(first);
        drop(second);
        spending.lock(UtcDay::of(now)).spend(100);
        assert_eq!(left(reserve(1)).1, 0);
        // On the next day, which begins a month, both are whole.
        let tomorrow = now + Duration::from_secs(3_600);
        assert!(spending.reserve(budgets, 100, tomorrow).is_ok());
        spending.lock(UtcDay::of(tomorrow)).spend(100);
        let later = tomorrow + Duration::from_secs(86_400);
        assert!(spending.reserve(budgets, 50, later).is_ok(), "a new day");
        assert_eq!(
            left(spending.reserve(budgets, 51, later)),
            (BudgetPeriod::Month, 50, "2100-04-01".into(), 2_592_000)
        );
        // A clock that is set back gives nothing back.
        assert_eq!(left(spending.reserve(budgets, 51, now)).1, 50);
    }

    #[test]
    fn a_clock_that_was_far_ahead_does_not_keep_a_budget_spent() {
        let spending = Arc::<Spending>::default();
        let budgets = TokenBudgets { a_day: Some(100), a_month: None };
        let now = UNIX_EPOCH + NOW;
        let years_ahead = now + Duration::from_secs(20 * 365 * 86_400);
        spending.lock(UtcDay::of(years_ahead)).spend(100);
        assert_eq!(left(spending.reserve(budgets, 1, now)).1, 0, "nothing is given back");
        assert!(spending.reserve(budgets, 100, now + Duration::from_secs(3_600)).is_ok(), "until the next midnight");
    }

    #[test]
    fn what_was_reserved_is_charged_at_once_and_only_once() {
        let spending = Arc::<Spending>::default();
        let budgets = TokenBudgets { a_day: Some(100), a_month: None };
        let reserve = |n| spending.reserve(budgets, n, SystemTime::now());
        reserve(60).unwrap().settle(50);
        assert_eq!(spending.spent().today, 50);
        assert!(reserve(51).is_err() && reserve(50).is_ok());
    }
}
