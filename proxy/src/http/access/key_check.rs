//! Refuses callers without a valid API key, and identifies the caller to the handlers.

use std::sync::Arc;

use axum::extract::Request;
use baton_link::trace;
use baton_planner::policy::{Policy, PolicyName};
use baton_schemas::ErrorCode;
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::{HeaderMap, Method, StatusCode};

use super::SharedAccess;
use super::keys::{KeyIdentity, KeyRefusal};
use crate::account::Account;
use crate::account::request_memory::RequestHold;
use crate::admission::RequestAdmission;
use crate::http::edge::request_id::RequestId;
use crate::http::errors::HttpFailure;
use crate::request::caller::Caller;
use crate::request::kv_loss::{KvLoss, KvWish};
use crate::request::poison_case::PoisonCase;
use crate::request::warnings::Warnings;

/// The keys, and the paths that need none.
pub(in crate::http) struct KeyCheck {
    pub(in crate::http) access: SharedAccess,
    /// Load balancers probe health without a key, and the first page holds no secrets.
    pub(in crate::http) public_paths: Arc<[&'static str]>,
}

/// Adds the [`Caller`] to the request, and returns its account and its warnings. Errors: the caller has no valid key, may not choose
/// the policy that it asks for, or names one or a kind of KV that there is not.
pub(in crate::http) fn check(check: &KeyCheck, request: &mut Request) -> Result<(Arc<Account>, Warnings), HttpFailure> {
    let access = check.access.load();
    // Browsers send preflights without a key.
    let is_public = request.method() == Method::OPTIONS || check.public_paths.contains(&request.uri().path());
    let identity = match access.keys.identify(request.headers()) {
        Ok(identity) => identity,
        Err(_) if is_public => access.keys.anonymous(),
        Err(refusal) => return Err(no_valid_key(refusal)),
    };
    let KeyIdentity { scope, role, account, secret } = identity;
    let request_id = request.extensions().get::<RequestId>().map(|id| id.as_str().to_owned()).unwrap_or_default();
    let policy = wanted_policy(request.headers(), &account)?;
    let kv_loss = KvLoss { wish: kv_wish(request.headers())?, default: access.lossy_kv };
    let caller = Caller {
        cache_scope: scope,
        request_id,
        role,
        account: Arc::clone(&account),
        secret,
        admission: RequestAdmission::default(),
        poison: PoisonCase::default(),
        memory: RequestHold::default(),
        warnings: Warnings::default(),
        kv_loss,
        policy,
        trace: trace::parent_in(request.headers()),
    };
    let warnings = caller.warnings.clone();
    request.extensions_mut().insert(caller);
    Ok((account, warnings))
}

/// The header by which a request chooses its planning policy.
const POLICY_HEADER: &str = "x-baton-policy";

fn wanted_policy(headers: &HeaderMap, account: &Account) -> Result<Option<&'static dyn Policy>, HttpFailure> {
    let Some(name) = headers.get(POLICY_HEADER) else { return Ok(None) };
    if !account.limits.may_choose_policy {
        let message = format!("This API key may not choose how its requests are planned: leave out {POLICY_HEADER}.");
        let error = ErrorBody::new(ErrorKind::Permission, message).code(ErrorCode::PolicyNotAllowed);
        return Err(HttpFailure::new(StatusCode::FORBIDDEN, error));
    }
    let known = name.to_str().ok().and_then(PolicyName::parse);
    let refused = || unknown_word(POLICY_HEADER, &PolicyName::ALL.map(PolicyName::as_str));
    known.map(|name| Some(name.policy())).ok_or_else(refused)
}

/// The header by which a request says whether its KV may have gone through a lossy codec.
const KV_HEADER: &str = "x-baton-kv";

fn kv_wish(headers: &HeaderMap) -> Result<Option<KvWish>, HttpFailure> {
    let Some(name) = headers.get(KV_HEADER) else { return Ok(None) };
    let known = name.to_str().ok().and_then(KvWish::parse);
    known.map(Some).ok_or_else(|| unknown_word(KV_HEADER, &KvWish::ALL.map(KvWish::as_str)))
}

fn unknown_word(header: &str, words: &[&str]) -> HttpFailure {
    let message = format!("{header} must be one of: {}.", words.join(", "));
    HttpFailure::new(StatusCode::BAD_REQUEST, ErrorBody::new(ErrorKind::InvalidRequest, message))
}

fn no_valid_key(refusal: KeyRefusal) -> HttpFailure {
    let message = match refusal {
        KeyRefusal::Unknown => {
            "A valid API key is required, as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'.".to_owned()
        }
        KeyRefusal::Expired(day) => format!("This API key has expired: {day} was its last day. Ask for a new one."),
    };
    let error = ErrorBody::new(ErrorKind::Authentication, message).code(ErrorCode::InvalidApiKey);
    HttpFailure::new(StatusCode::UNAUTHORIZED, error)
}
