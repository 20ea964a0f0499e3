//! `x-ratelimit-*`: the rates of a key and what is left of them, under the names of OpenAI's API.

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::account::Account;

/// Adds the headers of the account's limited rates.
pub(in crate::http) fn insert(headers: &mut HeaderMap, account: &Account) {
    for (unit, quota) in account.quotas() {
        let reset = format!("{:.3}s", quota.reset.as_secs_f64());
        for (what, value) in
            [("limit", quota.limit.to_string()), ("remaining", quota.remaining.to_string()), ("reset", reset)]
        {
            let name = HeaderName::try_from(format!("x-ratelimit-{what}-{}", unit.as_str()));
            if let (Ok(name), Ok(value)) = (name, HeaderValue::try_from(value)) {
                headers.insert(name, value);
            }
        }
    }
}
