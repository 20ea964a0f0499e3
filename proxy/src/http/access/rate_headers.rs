//! `x-ratelimit-*`: the rates of a key and what is left of them, under the names of OpenAI's API.

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::account::Account;
use crate::error::RateUnit;

/// The headers of a rate: its limit, what remains of it, and the time until the full limit is available again.
const fn names(unit: RateUnit) -> [HeaderName; 3] {
    let [limit, remaining, reset] = match unit {
        RateUnit::Requests => {
            ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"]
        }
        RateUnit::Tokens => ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"],
    };
    [HeaderName::from_static(limit), HeaderName::from_static(remaining), HeaderName::from_static(reset)]
}

/// Adds the headers of the account's limited rates.
pub(in crate::http) fn insert(headers: &mut HeaderMap, account: &Account) {
    for (unit, quota) in account.quotas() {
        let reset = format!("{}.{:03}s", quota.reset.as_secs(), quota.reset.subsec_millis());
        let [limit_name, remaining_name, reset_name] = names(unit);
        headers.insert(limit_name, quota.limit.into());
        headers.insert(remaining_name, quota.remaining.into());
        if let Ok(reset) = HeaderValue::try_from(reset) {
            headers.insert(reset_name, reset);
        }
    }
}
