//! The account of an API key: its permissions, its limits, and what is left of its rates.

pub mod budget;
mod rate;
pub mod request_memory;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use baton_schemas::KeyTag;
use tokio::sync::Semaphore;

use self::budget::{BudgetHold, Spending, TokenBudgets, TokensSpent};
pub use self::rate::Quota;
use self::rate::Rate;
use self::request_memory::RequestMemory;
use crate::error::{RateUnit, RequestError};
use crate::model_name;

/// The permissions and limits of a key. The default is the owner's key: everything, without limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyLimits {
    /// Models that the key may use, each by one of its names. Empty means all models.
    pub models: Vec<String>,
    /// Requests per minute.
    pub requests_per_minute: Option<u32>,
    /// Tokens per minute, of prompts and replies together.
    pub tokens_per_minute: Option<u32>,
    /// Tokens on a day and in a month, of prompts and replies together.
    pub budgets: TokenBudgets,
    /// Places that its requests may have at once.
    pub max_concurrent: Option<usize>,
    /// Requests of a key with a higher priority are admitted first.
    pub priority: u8,
    /// The key may choose the planning policy of its requests.
    pub may_choose_policy: bool,
    /// The key may see the endpoint's state, its metrics and the addresses of nodes.
    pub is_operator: bool,
}

/// How many requests of a key that generate nothing run at once: a quarter of what all keys may have, so that a key that
/// counts long texts leaves room for others.
pub(crate) const BRIEF_SHARE: usize = 16;

/// The name of every caller where no keys are configured.
const ANYONE: &str = "anyone";

/// The names of plain keys, which have no names of their own, begin so.
const PLAIN: &str = "api_keys[";

/// The name of the plain key of this index.
pub fn plain_key_name(index: usize) -> String {
    format!("{PLAIN}{index}]")
}

/// Returns true for a name that no configured key may have: it would be taken for another caller.
pub fn is_reserved_name(name: &str) -> bool {
    name == ANYONE || name.starts_with(PLAIN)
}

/// The priority of a key that has none configured.
pub const DEFAULT_PRIORITY: u8 = 5;

impl Default for KeyLimits {
    fn default() -> Self {
        KeyLimits {
            models: Vec::new(),
            requests_per_minute: None,
            tokens_per_minute: None,
            budgets: TokenBudgets::default(),
            max_concurrent: None,
            priority: DEFAULT_PRIORITY,
            may_choose_policy: true,
            is_operator: true,
        }
    }
}

/// A key's permissions and the current state of its rates.
#[derive(Debug)]
pub struct Account {
    /// The configured, unique name of the key; never the key itself.
    pub name: String,
    /// The permissions and limits of the key.
    pub limits: KeyLimits,
    /// The key's share of the memory that requests hold; `None` if there is only this account.
    pub(crate) memory: Option<Arc<RequestMemory>>,
    /// The key's share of the requests that generate nothing and run at once; `None` if there is only this account.
    pub(crate) brief: Option<Arc<Semaphore>>,
    requests: Option<Rate>,
    tokens: Option<Rate>,
    spending: Arc<Spending>,
    /// The account that replaced this one when its limits changed. Requests that still run under this account charge
    /// it.
    successor: OnceLock<Arc<Account>>,
}

impl Account {
    /// Creates an account with unused rates.
    pub fn new(name: impl Into<String>, limits: KeyLimits) -> Account {
        Account {
            name: name.into(),
            requests: limits.requests_per_minute.and_then(Rate::per_minute),
            tokens: limits.tokens_per_minute.and_then(Rate::per_minute),
            memory: Some(RequestMemory::of_key()),
            brief: Some(Arc::new(Semaphore::new(BRIEF_SHARE))),
            spending: Arc::default(),
            limits,
            successor: OnceLock::new(),
        }
    }

    /// Creates the account of every caller where no keys are configured. It may hold all the memory for requests.
    pub fn of_everyone() -> Account {
        Account { memory: None, brief: None, ..Account::new(ANYONE, KeyLimits::default()) }
    }

    /// Replaces this account with one that has other limits. The new account keeps the usage of this one, and shares its
    /// memory, its share of brief requests and what it has spent.
    pub fn succeed(&self, limits: KeyLimits) -> Arc<Account> {
        let (memory, brief, spending) = (self.memory.clone(), self.brief.clone(), Arc::clone(&self.spending));
        let successor = Arc::new(Account { memory, brief, spending, ..Account::new(self.name.clone(), limits) });
        // From here on, requests that end charge the successor.
        if self.successor.set(Arc::clone(&successor)).is_ok() {
            let carry = |from: &Option<Rate>, to: &Option<Rate>| {
                if let (Some(from), Some(to)) = (from, to) {
                    to.charge(from.used());
                }
            };
            carry(&self.requests, &successor.requests);
            carry(&self.tokens, &successor.tokens);
        }
        successor
    }

    /// The tag by which engines let keys take turns.
    pub fn tag(&self) -> KeyTag {
        let mut hasher = DefaultHasher::new();
        self.name.hash(&mut hasher);
        KeyTag(hasher.finish())
    }

    /// Returns true if the key may use a model with these names. A restricted key may not use a model whose name is
    /// unknown.
    pub fn may_use<'a>(&self, mut names: impl Iterator<Item = &'a String>) -> bool {
        let allowed = &self.limits.models;
        allowed.is_empty() || names.any(|name| allowed.iter().any(|allowed| model_name::are_same(allowed, name)))
    }

    /// Charges one request. See [`Account::take_requests`].
    pub(crate) fn take_request(&self) -> Result<(), RequestError> {
        self.take_requests(1)
    }

    /// Charges `n` requests that come as one. One unit of the rate is enough to begin; the others may be a debt. So a
    /// request with more choices than the rate has units is served, and its key waits afterwards. Tokens are charged after
    /// they are counted, so a reply may overdraw the token rate, too.
    ///
    /// Errors: the exhausted rate and the time until it recovers.
    pub(crate) fn take_requests(&self, n: usize) -> Result<(), RequestError> {
        if let Some(rate) = &self.tokens {
            rate.settle().map_err(|after| limited(RateUnit::Tokens, rate, after))?;
        }
        if let Some(rate) = &self.requests {
            rate.take().map_err(|after| limited(RateUnit::Requests, rate, after))?;
            rate.charge(n.saturating_sub(1) as u64);
        }
        Ok(())
    }

    /// Checks that the rates allow another request, without charging it: a body is not read for a request that cannot
    /// be admitted. Errors: as of [`take_request`](Self::take_request).
    pub(crate) fn check_rates(&self) -> Result<(), RequestError> {
        if let Some(rate) = &self.tokens {
            rate.settle().map_err(|after| limited(RateUnit::Tokens, rate, after))?;
        }
        if let Some(rate) = &self.requests {
            rate.check().map_err(|after| limited(RateUnit::Requests, rate, after))?;
        }
        Ok(())
    }

    /// Charges used tokens.
    pub(crate) fn charge_tokens(&self, n: u64) {
        let mut account = self;
        while let Some(successor) = account.successor.get() {
            account = successor;
        }
        if let Some(rate) = &account.tokens {
            rate.charge(n);
        }
    }

    /// Adds what the key spent before this process began.
    pub(crate) fn restore(&self, before: TokensSpent) {
        self.spending.restore(before);
    }

    /// The tokens that the key has spent on this day and in this month.
    pub(crate) fn spent(&self) -> TokensSpent {
        self.spending.spent()
    }

    /// Reserves tokens of the key's budgets. `None`: it has none. Errors: one of them has fewer left.
    pub(crate) fn reserve(&self, n_tokens: u64) -> Result<Option<BudgetHold>, RequestError> {
        if self.limits.budgets == TokenBudgets::default() {
            return Ok(None);
        }
        self.spending.reserve(self.limits.budgets, n_tokens, SystemTime::now()).map(Some)
    }

    /// Checks that budgets have something left: what a spent one refuses must not load a model. Errors: as of
    /// [`reserve`](Self::reserve).
    pub(crate) fn check_budgets(&self) -> Result<(), RequestError> {
        self.reserve(1).map(drop)
    }

    /// Charges the key's budgets for tokens of prompts and replies, in the place of what was reserved for them.
    pub(crate) fn settle(&self, reserved: Option<BudgetHold>, n_tokens: u64) {
        match reserved {
            Some(hold) => hold.settle(n_tokens),
            None => self.spending.spend(n_tokens),
        }
    }

    /// The quotas of the limited rates, for the headers `x-ratelimit-*`.
    pub fn quotas(&self) -> impl Iterator<Item = (RateUnit, Quota)> {
        let of = |unit, rate: &Option<Rate>| rate.as_ref().map(|rate| (unit, rate.quota()));
        of(RateUnit::Requests, &self.requests).into_iter().chain(of(RateUnit::Tokens, &self.tokens))
    }
}

fn limited(unit: RateUnit, rate: &Rate, retry_after: Duration) -> RequestError {
    RequestError::RateLimited { unit, limit: rate.quota().limit, retry_after }
}
