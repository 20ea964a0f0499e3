//! API keys: who may call, and whose prompts a caller may share a cache with.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use baton_schemas::openai::{ErrorBody, ErrorKind};
use baton_schemas::sequence::CacheScope;
use http::{HeaderMap, Method, StatusCode, header};
use subtle::{Choice, ConstantTimeEq};

use super::dialect::Dialect;
use super::errors::Failure;
use super::request_id::RequestId;
use crate::generate::{Caller, Standing};
use crate::plan::policy::{self, POLICIES, Policy};

/// The keys that open the API, as hashes under a key that lives as long as the process.
///
/// Hashing makes all comparisons the same length, and leaves no key in memory to be found in a core dump.
pub struct Keys {
    allowed: Vec<[u8; 32]>,
    process_key: [u8; 32],
    share_cache: bool,
}

impl Keys {
    /// These keys; none means that the API is open.
    pub fn new(api_keys: &[String], share_cache: bool) -> Self {
        let process_key = rand::random();
        let allowed = api_keys.iter().map(|key| hash(&process_key, key.as_bytes())).collect();
        Keys { allowed, process_key, share_cache }
    }

    /// The scope of a caller with these headers, or `None` if it may not call.
    fn scope(&self, headers: &HeaderMap) -> Option<CacheScope> {
        let mut presented = presented(headers).map(|key| hash(&self.process_key, key));
        let hash = if self.allowed.is_empty() {
            // An open server still keeps apart those who sent different keys: SDKs always send one.
            presented.next()
        } else {
            Some(presented.find(|hash| self.allows(hash))?)
        };
        match hash {
            Some(hash) if !self.share_cache => Some(scope_of(&hash)),
            _ => Some(CacheScope::SHARED),
        }
    }

    /// Compares with every key, so that time tells neither which one matched nor how far.
    fn allows(&self, presented: &[u8; 32]) -> bool {
        self.allowed.iter().fold(Choice::from(0), |found, key| found | key.ct_eq(presented)).into()
    }
}

/// Refuses callers without a key, and tells handlers who the others are.
pub async fn check(State(keys): State<Arc<Keys>>, mut request: Request, next: Next) -> Response {
    let scope = match keys.scope(request.headers()) {
        Some(scope) => scope,
        None if is_public(&request) => CacheScope::SHARED,
        None => return refused().respond(Dialect::of(request.uri().path())),
    };
    let request_id = request.extensions().get::<RequestId>().map(|id| id.as_str().to_owned()).unwrap_or_default();
    let policy = match wanted_policy(request.headers()) {
        Ok(policy) => policy,
        Err(refused) => return refused.respond(Dialect::of(request.uri().path())),
    };
    let standing = if keys.allowed.is_empty() { Standing::Anyone } else { Standing::Operator };
    request.extensions_mut().insert(Caller { cache_scope: scope, request_id, standing, policy });
    next.run(request).await
}

/// The header with which a request asks for another policy than the configured one.
const POLICY_HEADER: &str = "x-baton-policy";

fn wanted_policy(headers: &HeaderMap) -> Result<Option<&'static dyn Policy>, Failure> {
    let Some(name) = headers.get(POLICY_HEADER) else { return Ok(None) };
    let known = name.to_str().ok().and_then(policy::by_name);
    known.map(Some).ok_or_else(|| {
        let names = POLICIES.map(|policy| policy.name()).join(", ");
        let error = ErrorBody::new(ErrorKind::InvalidRequest, format!("{POLICY_HEADER} must be one of: {names}."));
        Failure::new(StatusCode::BAD_REQUEST, error)
    })
}

/// Load balancers probe health without a key, browsers send preflights without one, and the first page holds nothing.
fn is_public(request: &Request) -> bool {
    request.method() == Method::OPTIONS || matches!(request.uri().path(), "/" | "/health" | "/v1/health")
}

fn refused() -> Failure {
    let message = "A valid API key is required, as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'.";
    let error = ErrorBody::new(ErrorKind::Authentication, message).code("invalid_api_key");
    Failure::new(StatusCode::UNAUTHORIZED, error)
}

/// The keys a request carries, under either name.
fn presented(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let bearer = headers.get_all(header::AUTHORIZATION).into_iter().filter_map(|value| bearer(value.as_bytes()));
    let plain = headers.get_all("x-api-key").into_iter().map(|value| value.as_bytes().trim_ascii());
    bearer.chain(plain).filter(|key| !key.is_empty())
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key.trim_ascii())
}

fn hash(process_key: &[u8; 32], key: &[u8]) -> [u8; 32] {
    *blake3::keyed_hash(process_key, key).as_bytes()
}

fn scope_of(hash: &[u8; 32]) -> CacheScope {
    let mut word = [0; 8];
    word.copy_from_slice(&hash[..8]);
    // 0 is the shared scope.
    CacheScope(u64::from_le_bytes(word).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter().map(|(name, value)| (name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap())).collect()
    }

    fn check(keys: &Keys, list: &[(&'static str, &str)], allowed: bool) {
        assert_eq!(keys.scope(&headers(list)).is_some(), allowed, "{list:?}");
    }

    #[test]
    fn a_key_opens_under_either_name() {
        let keys = Keys::new(&["one".into(), "two".into()], false);
        check(&keys, &[("authorization", "Bearer one")], true);
        check(&keys, &[("authorization", "bearer  two ")], true);
        check(&keys, &[("x-api-key", "two")], true);
        check(&keys, &[("authorization", "Bearer wrong"), ("x-api-key", "two")], true);
        check(&keys, &[], false);
        check(&keys, &[("authorization", "one")], false);
        check(&keys, &[("authorization", "Basic one")], false);
        check(&keys, &[("authorization", "Bearer ")], false);
        check(&keys, &[("authorization", "Bearer on")], false);
        check(&keys, &[("authorization", "Bearer onetwo")], false);
        check(&keys, &[("x-api-key", "")], false);
        check(&Keys::new(&[], false), &[], true);
    }

    #[test]
    fn callers_share_a_cache_only_with_themselves() {
        let one = headers(&[("authorization", "Bearer one")]);
        let same = headers(&[("x-api-key", "one")]);
        let two = headers(&[("authorization", "Bearer two")]);
        for allowed in [vec![], vec!["one".to_owned(), "two".to_owned()]] {
            let keys = Keys::new(&allowed, false);
            assert_eq!(keys.scope(&one), keys.scope(&same));
            assert_ne!(keys.scope(&one), keys.scope(&two));
            assert_ne!(keys.scope(&one), Some(CacheScope::SHARED));
            assert_ne!(keys.scope(&one), Keys::new(&allowed, false).scope(&one), "another process, another scope");
            assert_eq!(Keys::new(&allowed, true).scope(&one), Some(CacheScope::SHARED));
        }
        assert_eq!(Keys::new(&[], false).scope(&headers(&[])), Some(CacheScope::SHARED));
    }
}
