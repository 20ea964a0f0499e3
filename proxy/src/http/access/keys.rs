//! API keys: who a request's headers identify, and whose cached prompts that caller may reuse.

use std::sync::Arc;

use baton_schemas::CacheScope;
use http::{HeaderMap, header};
use subtle::{ConditionallySelectable, ConstantTimeEq};

use super::{AccessConfig, ConfiguredKey, key_hash};
use crate::account::{Account, KeyLimits};
use crate::request::caller::CallerRole;

/// The API keys, as hashes.
///
/// Hashing makes all comparisons the same length and keeps plain keys out of core dumps. Keys have 256 random bits and
/// cannot be guessed, so the hash function need not be slow.
pub struct Keys {
    allowed: Vec<ConfiguredKey>,
    /// The account of callers without a key: on an open server, and on paths that need no key.
    anyone: Arc<Account>,
    /// A secret, so that cache scopes cannot be computed from the keys' hashes.
    scope_key: [u8; 32],
    share_cache: bool,
}

impl Keys {
    /// Creates the key set. Without keys, the API is open.
    pub fn new(config: &AccessConfig) -> Self {
        let anyone = Arc::new(Account::of_everyone());
        let scope_key = config.scope_key.unwrap_or_else(rand::random);
        Keys { allowed: allowed(config), anyone, scope_key, share_cache: config.share_prefix_cache }
    }

    /// Creates the key set of another configuration. Accounts keep their usage, even if their limits changed.
    pub fn renewed(&self, config: &AccessConfig) -> Self {
        let mut allowed = allowed(config);
        for key in &mut allowed {
            match self.allowed.iter().find(|old| old.account.name == key.account.name) {
                Some(known) if known.account.limits == key.account.limits => key.account = Arc::clone(&known.account),
                Some(known) => key.account = known.account.succeed(key.account.limits.clone()),
                None => {}
            }
        }
        let share_cache = config.share_prefix_cache;
        Keys { allowed, anyone: Arc::clone(&self.anyone), scope_key: self.scope_key, share_cache }
    }

    /// Identifies the caller by these headers; `None` if it may not call.
    pub(super) fn identify(&self, headers: &HeaderMap) -> Option<KeyIdentity> {
        let mut presented = presented(headers).map(key_hash);
        let (hash, role, account) = if self.allowed.is_empty() {
            // SDKs always send a key, so even an open server separates the callers by it.
            (presented.next(), CallerRole::Anyone, &self.anyone)
        } else {
            let (hash, account) = presented.find_map(|hash| Some((hash, self.find(&hash)?)))?;
            let role = if account.limits.is_operator { CallerRole::Operator } else { CallerRole::Guest };
            (Some(hash), role, account)
        };
        let scope = match hash {
            Some(hash) if !self.share_cache => self.scope_of(&hash),
            _ => CacheScope::SHARED,
        };
        Some(KeyIdentity { scope, role, account: Arc::clone(account) })
    }

    /// The scopes of the configured keys, each with its account's name. Empty if the callers share the cache.
    pub fn scopes(&self) -> Vec<(CacheScope, String)> {
        let own = self.allowed.iter().filter(|_| !self.share_cache);
        own.map(|key| (self.scope_of(&key.hash), key.account.name.clone())).collect()
    }

    fn scope_of(&self, hash: &[u8; 32]) -> CacheScope {
        let mut word = [0; 8];
        word.copy_from_slice(&blake3::keyed_hash(&self.scope_key, hash).as_bytes()[..8]);
        // Scope 0 is shared by all callers.
        CacheScope(u64::from_le_bytes(word).max(1))
    }

    /// Returns the caller of a path that needs no key.
    pub(super) fn anonymous(&self) -> KeyIdentity {
        KeyIdentity { scope: CacheScope::SHARED, role: CallerRole::Guest, account: Arc::clone(&self.anyone) }
    }

    /// Compares with every key, so that the response time reveals neither which key matched nor how much of it.
    fn find(&self, presented: &[u8; 32]) -> Option<&Arc<Account>> {
        let mut found = u32::MAX;
        for (i, key) in (0..).zip(&self.allowed) {
            found.conditional_assign(&i, key.hash.ct_eq(presented));
        }
        self.allowed.get(found as usize).map(|key| &key.account)
    }
}

/// Plain keys are the owner's and have no limits. Each has its own lane in the queue.
fn allowed(config: &AccessConfig) -> Vec<ConfiguredKey> {
    let plain = config.api_keys.iter().enumerate().map(|(i, key)| ConfiguredKey {
        hash: key_hash(key.as_bytes()),
        account: Arc::new(Account::new(format!("api_keys[{i}]"), KeyLimits::default())),
    });
    plain.chain(config.keys.iter().cloned()).collect()
}

/// The caller that a key identifies.
pub(super) struct KeyIdentity {
    pub(super) scope: CacheScope,
    pub(super) role: CallerRole,
    pub(super) account: Arc<Account>,
}

/// Returns the keys in either of the two headers.
fn presented(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let bearer = headers.get_all(header::AUTHORIZATION).into_iter().filter_map(|value| bearer(value.as_bytes()));
    let plain = headers.get_all("x-api-key").into_iter().map(|value| value.as_bytes().trim_ascii());
    bearer.chain(plain).filter(|key| !key.is_empty())
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter().map(|(name, value)| (name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap())).collect()
    }

    fn made(api_keys: &[&str], share_prefix_cache: bool) -> Keys {
        let api_keys = api_keys.iter().map(|&key| key.to_owned()).collect();
        Keys::new(&AccessConfig { api_keys, share_prefix_cache, ..AccessConfig::default() })
    }

    fn scope(keys: &Keys, headers: &HeaderMap) -> CacheScope {
        keys.identify(headers).unwrap().scope
    }

    fn check(keys: &Keys, list: &[(&'static str, &str)], allowed: bool) {
        assert_eq!(keys.identify(&headers(list)).is_some(), allowed, "{list:?}");
    }

    #[test]
    fn a_key_opens_under_either_name() {
        let keys = made(&["one", "two"], false);
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
        check(&made(&[], false), &[], true);
    }

    #[test]
    fn callers_share_a_cache_only_with_themselves() {
        let one = headers(&[("authorization", "Bearer one")]);
        let same = headers(&[("x-api-key", "one")]);
        let two = headers(&[("authorization", "Bearer two")]);
        for allowed in [&[][..], &["one", "two"]] {
            let known = made(allowed, false);
            assert_eq!(scope(&known, &one), scope(&known, &same));
            assert_ne!(scope(&known, &one), scope(&known, &two));
            assert_ne!(scope(&known, &one), CacheScope::SHARED);
            assert_ne!(scope(&known, &one), scope(&made(allowed, false), &one), "another secret, another scope");
            let config = AccessConfig { api_keys: vec!["one".into(), "new".into()], ..AccessConfig::default() };
            assert_eq!(scope(&known, &one), scope(&known.renewed(&config), &one), "a reload is no other process");
            assert_eq!(scope(&made(allowed, true), &one), CacheScope::SHARED);
            assert!(made(allowed, true).scopes().is_empty());
        }
        let persistent = || {
            let (api_keys, scope_key) = (vec!["one".to_owned()], Some([7; 32]));
            Keys::new(&AccessConfig { api_keys, scope_key, ..AccessConfig::default() })
        };
        assert_eq!(scope(&persistent(), &one), scope(&persistent(), &one), "KV on disk is found after a restart");
        assert_eq!(persistent().scopes(), [(scope(&persistent(), &one), "api_keys[0]".to_owned())]);
        assert_eq!(scope(&made(&[], false), &headers(&[])), CacheScope::SHARED);
    }

    #[test]
    fn a_reload_keeps_the_usage_of_each_key() {
        let key = |limit| ConfiguredKey {
            hash: key_hash(b"k"),
            account: Arc::new(Account::new(
                "k",
                KeyLimits { requests_per_minute: Some(limit), ..KeyLimits::default() },
            )),
        };
        let config = |limit| AccessConfig { keys: vec![key(limit)], ..AccessConfig::default() };
        let keys = Keys::new(&config(5));
        let same = keys.renewed(&config(5));
        assert!(Arc::ptr_eq(&keys.allowed[0].account, &same.allowed[0].account));
        for _ in 0..4 {
            keys.allowed[0].account.take_request().unwrap();
        }
        let changed = keys.renewed(&config(6));
        let account = &changed.allowed[0].account;
        assert_eq!(account.limits.requests_per_minute, Some(6));
        assert_eq!(account.quotas().next().unwrap().1.remaining, 2, "four of six are used");
        let memory = |keys: &Keys| Arc::clone(keys.allowed[0].account.memory.as_ref().unwrap());
        assert!(Arc::ptr_eq(&memory(&keys), &memory(&changed)), "bodies that arrive now still count");
        // Lower the limit below the usage: the rest becomes a debt.
        let less = changed.renewed(&config(2));
        let quota = less.allowed[0].account.quotas().next().unwrap().1;
        assert!(quota.remaining == 0 && less.allowed[0].account.take_request().is_err(), "{quota:?}");
    }
}
