//! `GET /baton/usage`: who used what, by day, key and model; and `GET /baton/keys`: the keys, with their limits and last use.
//!
//! Both are for whoever may see `/baton/state`.

use std::collections::HashMap;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::{Extension, Json};
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::state::may_observe;
use crate::account::Account;
use crate::http::HttpState;
use crate::http::access::ConfiguredKey;
use crate::http::errors::HttpFailure;
use crate::http::openapi::Operation;
use crate::request::caller::Caller;
use crate::usage::report::{DEFAULT_DAYS, MAX_DAYS};
use crate::usage::{SecretId, UsageFilter, UsageReport, UsageUnreadable};

/// The query of `/baton/usage`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct UsageQuery {
    days: Option<u32>,
    key: Option<String>,
    model: Option<String>,
}

pub(super) fn operation() -> Operation {
    Operation::new("Requests, tokens and engine seconds by day, key and model")
        .asks("days", "Days up to today (UTC), 1 to 400; by default 30")
        .asks("key", "Only this key, by its name")
        .asks("model", "Only this model, by its public name")
        .replies::<UsageReport>()
        .fails(&[503])
}

pub(super) async fn show(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<UsageQuery>, QueryRejection>,
) -> Result<Json<UsageReport>, HttpFailure> {
    may_observe(&caller)?;
    let wrong =
        |message: String| HttpFailure::new(StatusCode::BAD_REQUEST, ErrorBody::new(ErrorKind::InvalidRequest, message));
    let Query(UsageQuery { days, key, model }) = query.map_err(|error| wrong(error.body_text()))?;
    let days = days.unwrap_or(DEFAULT_DAYS);
    if !(1..=MAX_DAYS).contains(&days) {
        return Err(wrong(format!("'days' must be 1 to {MAX_DAYS}.")));
    }
    let report = state.backend.usage(UsageFilter { days, key, model }).await;
    report.map(Json).map_err(unreadable)
}

fn unreadable(error: UsageUnreadable) -> HttpFailure {
    HttpFailure::not_now(error.to_string())
}

/// The keys of an endpoint.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct KeyList {
    pub keys: Vec<KeyState>,
}

/// A key, without its secret.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct KeyState {
    /// Its name.
    pub name: String,
    /// It may see state, metrics and usage.
    pub operator: bool,
    /// Models that it may use; empty: all.
    pub models: Vec<String>,
    pub requests_per_minute: Option<u32>,
    pub tokens_per_minute: Option<u32>,
    /// Slots at once.
    pub max_concurrent: Option<usize>,
    pub priority: u8,
    /// The budget of a day (UTC).
    pub tokens_per_day: Option<u64>,
    /// The budget of a month (UTC).
    pub tokens_per_month: Option<u64>,
    /// Tokens used on this day.
    pub tokens_today: u64,
    /// Tokens used in this month.
    pub tokens_this_month: u64,
    /// One, or two while the key is replaced, the newer first.
    pub secrets: Vec<SecretState>,
}

/// A secret of a key.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct SecretState {
    /// The first eight digits of its hash in the configuration.
    pub id: String,
    /// The last day on which it is accepted (UTC).
    pub expires: Option<String>,
    /// When an engine last began a request with it, milliseconds since the Unix epoch.
    pub last_used_ms: Option<u64>,
}

pub(super) fn keys_operation() -> Operation {
    Operation::new("The keys with their limits and last use, without their secrets").replies::<KeyList>().fails(&[503])
}

pub(super) async fn keys(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<KeyList>, HttpFailure> {
    may_observe(&caller)?;
    let last_uses = state.backend.last_uses().await.map_err(unreadable)?;
    Ok(Json(listed(state.access.load().keys.configured(), &last_uses)))
}

fn listed(keys: &[ConfiguredKey], last_uses: &HashMap<SecretId, u64>) -> KeyList {
    let mut list: Vec<KeyState> = Vec::new();
    for ConfiguredKey { hash, expires, account } in keys {
        let id = SecretId::of_hash(hash);
        let secret = SecretState {
            id: id.to_string(),
            expires: expires.map(|day| day.to_string()),
            last_used_ms: last_uses.get(&id).copied(),
        };
        // The secrets of a key follow one another.
        match list.last_mut().filter(|key| key.name == account.name) {
            Some(key) => key.secrets.push(secret),
            None => list.push(KeyState { secrets: vec![secret], ..key_state(account) }),
        }
    }
    KeyList { keys: list }
}

fn key_state(account: &Account) -> KeyState {
    let (limits, spent) = (&account.limits, account.spent());
    KeyState {
        name: account.name.clone(),
        operator: limits.is_operator,
        models: limits.models.clone(),
        requests_per_minute: limits.requests_per_minute,
        tokens_per_minute: limits.tokens_per_minute,
        max_concurrent: limits.max_concurrent,
        priority: limits.priority,
        tokens_per_day: limits.budgets.a_day,
        tokens_per_month: limits.budgets.a_month,
        tokens_today: spent.today,
        tokens_this_month: spent.this_month,
        secrets: Vec::new(),
    }
}
