//! `x-ratelimit-*`: the rates of a key and what is left of them, under the names of OpenAI's API.

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::account::Account;
use crate::error::RateUnit;

/// The headers of a rate.
struct Names {
    limit: HeaderName,
    /// The rest of the limit.
    remaining: HeaderName,
    /// The time until the full limit is available again.
    reset: HeaderName,
}

static REQUESTS: Names = Names {
    limit: HeaderName::from_static("x-ratelimit-limit-requests"),
    remaining: HeaderName::from_static("x-ratelimit-remaining-requests"),
    reset: HeaderName::from_static("x-ratelimit-reset-requests"),
};

static TOKENS: Names = Names {
    limit: HeaderName::from_static("x-ratelimit-limit-tokens"),
    remaining: HeaderName::from_static("x-ratelimit-remaining-tokens"),
    reset: HeaderName::from_static("x-ratelimit-reset-tokens"),
};

/// Adds the headers of the account's limited rates.
pub(in crate::http) fn insert(headers: &mut HeaderMap, account: &Account) {
    for (unit, quota) in account.quotas() {
        let reset = format!("{}.{:03}s", quota.reset.as_secs(), quota.reset.subsec_millis());
        let names = match unit {
            RateUnit::Requests => &REQUESTS,
            RateUnit::Tokens => &TOKENS,
        };
        headers.insert(&names.limit, quota.limit.into());
        headers.insert(&names.remaining, quota.remaining.into());
        if let Ok(reset) = HeaderValue::try_from(reset) {
            headers.insert(&names.reset, reset);
        }
    }
}
