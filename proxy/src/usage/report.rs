//! The usage of past days, as `GET /baton/usage` and `baton usage` show it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Days whose usage is kept.
pub const MAX_DAYS: u32 = 400;

/// Days of a report whose client names no number.
pub const DEFAULT_DAYS: u32 = 30;

/// The most rows of a report: a hundred days of ten keys with ten models each.
pub const MAX_ROWS: usize = 10_000;

/// The rows that a client wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageFilter {
    /// Days up to today, at least 1.
    pub days: u32,
    /// Only this key's.
    pub key: Option<String>,
    /// Only this model's.
    pub model: Option<String>,
}

/// The usage of some days, the newest first.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct UsageReport {
    /// The first day (UTC), as `2026-12-31`.
    pub since: String,
    /// The last day (UTC): today.
    pub until: String,
    /// The usage is kept in a file. Otherwise it began with the process, and ends with it.
    pub is_kept: bool,
    /// There are more rows than the report has: ask for fewer days, or for one key.
    pub is_truncated: bool,
    pub rows: Vec<UsageRow>,
}

/// The usage of a key and a model on one day.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct UsageRow {
    /// The day (UTC), as `2026-12-31`.
    pub day: String,
    /// The key's name; `anyone` without keys.
    pub key: String,
    /// The model's public name.
    pub model: String,
    /// Requests that an engine began: one for each prompt.
    pub requests: u64,
    /// Tokens of prompts, and of texts for vectors.
    pub prompt_tokens: u64,
    /// The number of these that nobody computed.
    pub cached_tokens: u64,
    /// Tokens of replies.
    pub generated_tokens: u64,
    /// Time in which engines computed the prompts and replies, for each choice, seconds.
    pub engine_seconds: f64,
}
