//! A key's account: what its holder may ask for, how much, and how much of that is left.

mod rate;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub use self::rate::Quota;
use self::rate::Rate;
use crate::error::RequestError;
use crate::model_name;

/// What a key may do. The default is the owner's key: everything, without limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyLimits {
    /// Models it may use, each by one of its names. Empty means all.
    pub models: Vec<String>,
    /// Requests per minute.
    pub requests_per_minute: Option<u32>,
    /// Tokens per minute, of prompts and replies together.
    pub tokens_per_minute: Option<u32>,
    /// Requests served at once.
    pub max_concurrent: Option<usize>,
    /// Requests of a key with a higher priority are admitted first.
    pub priority: u8,
    /// May choose the planning policy of its requests.
    pub may_choose_policy: bool,
    /// May see the endpoint's state, its metrics and the addresses of nodes.
    pub is_operator: bool,
}

/// Priority of keys without a configured one.
pub const DEFAULT_PRIORITY: u8 = 5;

impl Default for KeyLimits {
    fn default() -> Self {
        KeyLimits {
            models: Vec::new(),
            requests_per_minute: None,
            tokens_per_minute: None,
            max_concurrent: None,
            priority: DEFAULT_PRIORITY,
            may_choose_policy: true,
            is_operator: true,
        }
    }
}

/// The holder of a key, with what is left of its rates.
#[derive(Debug)]
pub struct Account {
    /// Its configured, unique name; never the key itself.
    pub name: String,
    /// What it may do.
    pub limits: KeyLimits,
    requests: Option<Rate>,
    tokens: Option<Rate>,
    /// The account that replaced this one when its limits changed. It is charged for what still runs under this one.
    successor: OnceLock<Arc<Account>>,
}

impl Account {
    /// An account that has used nothing.
    pub fn new(name: impl Into<String>, limits: KeyLimits) -> Account {
        Account {
            name: name.into(),
            requests: limits.requests_per_minute.and_then(Rate::per_minute),
            tokens: limits.tokens_per_minute.and_then(Rate::per_minute),
            limits,
            successor: OnceLock::new(),
        }
    }

    /// Replaces this account by one of the same holder with other limits, which has used what this one has.
    pub fn succeed(&self, successor: &Arc<Account>) {
        // Requests that end from here on are charged to the successor.
        if self.successor.set(Arc::clone(successor)).is_err() {
            return;
        }
        let carry = |from: &Option<Rate>, to: &Option<Rate>| {
            if let (Some(from), Some(to)) = (from, to) {
                to.charge(from.used());
            }
        };
        carry(&self.requests, &successor.requests);
        carry(&self.tokens, &successor.tokens);
    }

    /// Returns true if it may use a model that has these names. A restricted key may not use a model without a known name.
    pub fn may_use<'a>(&self, mut names: impl Iterator<Item = &'a String>) -> bool {
        let allowed = &self.limits.models;
        allowed.is_empty() || names.any(|name| allowed.iter().any(|allowed| model_name::are_same(allowed, name)))
    }

    /// Takes one request off its rate. Tokens are charged once they are counted, so a reply may overdraw their rate; the
    /// debt must be paid back before the next request is admitted. Errors: which rate is exhausted, and until when.
    pub(crate) fn take_request(&self) -> Result<(), RequestError> {
        let limited = |unit, rate: &Rate, retry_after: Duration| RequestError::RateLimited {
            unit,
            limit: rate.quota().limit,
            retry_after,
        };
        if let Some(rate) = &self.tokens {
            rate.settle().map_err(|after| limited("tokens", rate, after))?;
        }
        if let Some(rate) = &self.requests {
            rate.take().map_err(|after| limited("requests", rate, after))?;
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

    /// What is left, for `x-ratelimit-*`: of `requests` and of `tokens`, where they are limited.
    pub fn quotas(&self) -> impl Iterator<Item = (&'static str, Quota)> {
        let of = |unit, rate: &Option<Rate>| rate.as_ref().map(|rate| (unit, rate.quota()));
        of("requests", &self.requests).into_iter().chain(of("tokens", &self.tokens))
    }
}
