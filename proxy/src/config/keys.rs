//! `[[keys]]`: API keys by their hashes, each with its limits.

use std::num::NonZeroU32;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;

use super::error::ConfigProblem;
use super::raw_day::RawDay;
use crate::account::budget::TokenBudgets;
use crate::account::{Account, DEFAULT_PRIORITY, KeyLimits, is_reserved_name};
use crate::http::ConfiguredKey;

/// The prefix of a hash names its function.
const HASH_PREFIX: &str = "blake3:";

/// Priorities: enough to tell some kinds of callers apart.
const MAX_PRIORITY: u8 = 9;

/// A budget of more tokens is none.
const MAX_BUDGET: u64 = 1_000_000_000_000_000;

/// One of `[[keys]]` as written.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RawKey {
    /// The key's owner; shown in logs.
    pub name: String,
    /// As `baton key new` printed it.
    #[schemars(extend("x-secret" = true))]
    pub hash: String,
    /// The last day on which it is accepted (UTC).
    pub expires: Option<RawDay>,
    /// The hash of an older key, which is accepted, too.
    #[schemars(extend("x-secret" = true))]
    pub previous_hash: Option<String>,
    /// The last day on which the older key is accepted (UTC).
    pub previous_expires: Option<RawDay>,
    /// Models it may name; empty: all.
    pub models: Vec<String>,
    /// Requests a minute.
    pub requests_per_minute: Option<NonZeroU32>,
    /// Tokens a minute, of prompts and replies together.
    pub tokens_per_minute: Option<NonZeroU32>,
    /// Tokens on a day (UTC), of prompts and replies together.
    #[schemars(range(min = 1, max = MAX_BUDGET))]
    pub tokens_per_day: Option<u64>,
    /// Tokens in a month (UTC), of prompts and replies together.
    #[schemars(range(min = 1, max = MAX_BUDGET))]
    pub tokens_per_month: Option<u64>,
    /// Places at once.
    pub max_concurrent: Option<NonZeroU32>,
    /// 0 to 9: of two keys with waiting requests the higher goes first.
    #[schemars(range(max = MAX_PRIORITY))]
    pub priority: Option<u8>,
    /// May choose how its requests are planned.
    pub policy_override: bool,
    /// May see state, metrics and addresses of nodes.
    pub operator: bool,
}

/// A key's hash as the file has it.
pub fn hash_text(hash: &[u8; 32]) -> String {
    format!("{HASH_PREFIX}{}", blake3::Hash::from_bytes(*hash).to_hex())
}

fn parse_hash(text: &str) -> Option<[u8; 32]> {
    blake3::Hash::from_hex(text.strip_prefix(HASH_PREFIX)?).ok().map(Into::into)
}

/// Every mistake in the keys that their types cannot express.
pub(super) fn problems(keys: &[RawKey]) -> Vec<ConfigProblem> {
    let mut found = Vec::new();
    for (i, key) in keys.iter().enumerate() {
        let mut problem = |field: &str, message: &str| {
            let key = format!("keys[{i}].{field}");
            found.push(ConfigProblem { flag: key.clone(), key, message: message.to_owned() });
        };
        if key.name.trim().is_empty() {
            problem("name", "must say whose key it is");
        }
        if is_reserved_name(&key.name) {
            problem("name", "must not be what callers without a name are called: another one");
        }
        if keys[..i].iter().any(|other| other.name == key.name) {
            problem("name", "must not be another key's name too");
        }
        if key.hash.is_empty() {
            problem("hash", "is missing: `baton key new` makes a key and prints its hash");
        } else if parse_hash(&key.hash).is_none() {
            problem("hash", "must be a hash as `baton key new` prints it, and never the key itself");
        }
        let is_taken = |hash: &String| {
            let of_others = keys[..i].iter().flat_map(|other| other.previous_hash.iter().chain([&other.hash]));
            !hash.is_empty() && of_others.into_iter().any(|other| other == hash)
        };
        if is_taken(&key.hash) {
            problem("hash", "must not be another key's hash too");
        }
        match (&key.previous_hash, key.previous_expires) {
            (Some(hash), _) if parse_hash(hash).is_none() => {
                problem("previous_hash", "must be the hash that the key had before, as `hash` had it");
            }
            (Some(hash), _) if *hash == key.hash || is_taken(hash) => {
                problem("previous_hash", "must not be another hash of the file too");
            }
            (Some(_), None) => problem("previous_expires", "must say how long the previous key is accepted"),
            (None, Some(_)) => problem("previous_expires", "needs the previous key: set previous_hash, too"),
            (Some(_), Some(_)) | (None, None) => {}
        }
        if key.models.iter().any(|model| model.trim().is_empty()) {
            problem("models", "must not have an empty name");
        }
    }
    found
}

pub(super) fn checked(keys: Vec<RawKey>) -> Vec<ConfiguredKey> {
    let checked = |key: RawKey| -> Vec<ConfiguredKey> {
        let limits = KeyLimits {
            models: key.models,
            requests_per_minute: key.requests_per_minute.map(NonZeroU32::get),
            tokens_per_minute: key.tokens_per_minute.map(NonZeroU32::get),
            budgets: TokenBudgets { a_day: key.tokens_per_day, a_month: key.tokens_per_month },
            max_concurrent: key.max_concurrent.map(|n| n.get() as usize),
            priority: key.priority.unwrap_or(DEFAULT_PRIORITY),
            may_choose_policy: key.policy_override,
            is_operator: key.operator,
        };
        let account = Arc::new(Account::new(key.name, limits));
        let expires = key.expires.map(|RawDay(day)| day);
        let previous_expires = key.previous_expires.map(|RawDay(day)| expires.map_or(day, |expires| day.min(expires)));
        let secret = |hash: &str, expires| {
            parse_hash(hash).map(|hash| ConfiguredKey { hash, expires, account: Arc::clone(&account) })
        };
        let previous = key.previous_hash.as_deref().and_then(|hash| secret(hash, previous_expires));
        secret(&key.hash, expires).into_iter().chain(previous).collect()
    };
    keys.into_iter().flat_map(checked).collect()
}
