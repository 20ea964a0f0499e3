//! API keys: who a request's headers identify, and whose cached prompts that caller may reuse.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use baton_schemas::CacheScope;
use http::{HeaderMap, header};
use subtle::{ConditionallySelectable, ConstantTimeEq};

use super::{AccessConfig, ConfiguredKey, key_hash};
use crate::account::budget::TokensSpent;
use crate::account::{Account, KeyLimits, plain_key_name};
use crate::request::caller::CallerRole;
use crate::usage::SecretId;
use crate::utc_day::UtcDay;

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

    /// Adds what each key, by its name, spent before this process began.
    pub fn restore(&self, spent: &HashMap<String, TokensSpent>) {
        let mut restored = HashSet::new();
        for account in self.allowed.iter().map(|key| &key.account).filter(|account| restored.insert(&account.name)) {
            account.restore(spent.get(&account.name).copied().unwrap_or_default());
        }
    }

    /// Creates the key set of another configuration. Accounts keep their usage, even if their limits changed; that of new ones
    /// is in `spent`.
    pub fn renewed(&self, config: &AccessConfig, spent: &HashMap<String, TokensSpent>) -> Self {
        let mut allowed = allowed(config);
        // A key with two secrets has one account.
        let mut accounts: HashMap<String, Arc<Account>> = HashMap::new();
        for key in &mut allowed {
            let name = &key.account.name;
            if !accounts.contains_key(name) {
                let account = match self.allowed.iter().find(|old| old.account.name == *name) {
                    Some(known) if known.account.limits == key.account.limits => Arc::clone(&known.account),
                    Some(known) => known.account.succeed(key.account.limits.clone()),
                    None => {
                        key.account.restore(spent.get(name).copied().unwrap_or_default());
                        Arc::clone(&key.account)
                    }
                };
                accounts.insert(name.clone(), account);
            }
            if let Some(account) = accounts.get(name) {
                key.account = Arc::clone(account);
            }
        }
        let share_cache = config.share_prefix_cache;
        Keys { allowed, anyone: Arc::clone(&self.anyone), scope_key: self.scope_key, share_cache }
    }

    /// Identifies the caller by these headers. Errors: it may not call.
    pub(super) fn identify(&self, headers: &HeaderMap) -> Result<KeyIdentity, KeyRefusal> {
        let mut presented = presented(headers).map(key_hash);
        let (hash, role, account, secret) = if self.allowed.is_empty() {
            // SDKs always send a key, so even an open server separates the callers by it.
            (presented.next(), CallerRole::Anyone, &self.anyone, None)
        } else {
            let known = presented.find_map(|hash| Some((hash, self.find(&hash)?)));
            let Some((hash, ConfiguredKey { account, expires, .. })) = known else { return Err(KeyRefusal::Unknown) };
            if let Some(day) = expires.filter(|day| *day < UtcDay::today()) {
                return Err(KeyRefusal::Expired(day));
            }
            let role = if account.limits.is_operator { CallerRole::Operator } else { CallerRole::Guest };
            (Some(hash), role, account, Some(SecretId::of_hash(&hash)))
        };
        let scope = match hash {
            Some(hash) if !self.share_cache => self.scope_of(&hash),
            _ => CacheScope::SHARED,
        };
        Ok(KeyIdentity { scope, role, account: Arc::clone(account), secret })
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

    /// Returns true while the secret by which a caller was identified is accepted; also for a caller without one, who needs none.
    pub fn is_accepted(&self, secret: Option<SecretId>) -> bool {
        let Some(secret) = secret else { return true };
        let is_it = |key: &&ConfiguredKey| SecretId::of_hash(&key.hash) == secret;
        let expires = self.allowed.iter().find(is_it).map(|key| key.expires);
        expires.is_some_and(|expires| expires.is_none_or(|day| day >= UtcDay::today()))
    }

    /// Returns the caller of a path that needs no key.
    pub(super) fn anonymous(&self) -> KeyIdentity {
        let account = Arc::clone(&self.anyone);
        KeyIdentity { scope: CacheScope::SHARED, role: CallerRole::Guest, account, secret: None }
    }

    /// Compares with every key, so that the response time reveals neither which key matched nor how much of it.
    fn find(&self, presented: &[u8; 32]) -> Option<&ConfiguredKey> {
        let mut found = u32::MAX;
        for (i, key) in (0..).zip(&self.allowed) {
            found.conditional_assign(&i, key.hash.ct_eq(presented));
        }
        self.allowed.get(found as usize)
    }

    /// The configured keys, in the order of the configuration.
    pub fn configured(&self) -> &[ConfiguredKey] {
        &self.allowed
    }
}

/// Plain keys are the owner's and have no limits. Each has its own lane in the queue.
fn allowed(config: &AccessConfig) -> Vec<ConfiguredKey> {
    let plain = config.api_keys.iter().enumerate().map(|(i, key)| ConfiguredKey {
        hash: key_hash(key.as_bytes()),
        expires: None,
        account: Arc::new(Account::new(plain_key_name(i), KeyLimits::default())),
    });
    plain.chain(config.keys.iter().cloned()).collect()
}

/// The caller that a key identifies.
pub(super) struct KeyIdentity {
    pub(super) scope: CacheScope,
    pub(super) role: CallerRole,
    pub(super) account: Arc<Account>,
    /// The presented secret of the account; `None` if no key is needed.
    pub(super) secret: Option<SecretId>,
}

/// The reason why a caller is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyRefusal {
    /// It presents no key, or none that is configured.
    Unknown,
    /// The last day of its key has passed.
    Expired(UtcDay),
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
    use crate::account::budget::TokenBudgets;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter().map(|(name, value)| (name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap())).collect()
    }

    fn made(api_keys: &[&str], share_prefix_cache: bool) -> Keys {
        let api_keys = api_keys.iter().map(|&key| key.to_owned()).collect();
        Keys::new(&AccessConfig { api_keys, share_prefix_cache, ..AccessConfig::default() })
    }

    fn scope(keys: &Keys, headers: &HeaderMap) -> CacheScope {
        keys.identify(headers).ok().unwrap().scope
    }

    fn renewed(keys: &Keys, config: &AccessConfig) -> Keys {
        keys.renewed(config, &HashMap::new())
    }

    fn check(keys: &Keys, list: &[(&'static str, &str)], allowed: bool) {
        assert_eq!(keys.identify(&headers(list)).is_ok(), allowed, "{list:?}");
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
            assert_eq!(scope(&known, &one), scope(&renewed(&known, &config), &one), "a reload is no other process");
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
    fn a_key_with_two_secrets_has_one_account_until_the_old_one_expires() {
        let today = UtcDay::today();
        let keys = |a_day, old_expires| {
            let limits = KeyLimits { budgets: TokenBudgets { a_day, a_month: None }, ..KeyLimits::default() };
            let account = Arc::new(Account::new("k", limits));
            let secret =
                |text: &[u8], expires| ConfiguredKey { hash: key_hash(text), expires, account: Arc::clone(&account) };
            AccessConfig {
                keys: vec![secret(b"new", None), secret(b"old", Some(old_expires))],
                ..AccessConfig::default()
            }
        };
        let with = |key| headers(&[("x-api-key", key)]);
        let account = |keys: &Keys, key| keys.identify(&with(key)).ok().unwrap().account;
        let first = Keys::new(&keys(None, today));
        assert!(Arc::ptr_eq(&account(&first, "new"), &account(&first, "old")));
        let secrets = ["new", "old"].map(|key| first.identify(&with(key)).ok().unwrap().secret.unwrap().to_string());
        assert!(secrets[0] != secrets[1] && secrets.iter().all(|id| id.len() == 8), "{secrets:?}");
        account(&first, "old").settle(None, 90);
        // A reload adds a budget, from which the tokens of both secrets count.
        let limited = renewed(&first, &keys(Some(100), today));
        assert!(Arc::ptr_eq(&account(&limited, "new"), &account(&limited, "old")));
        assert!(account(&limited, "new").reserve(10).is_ok() && account(&limited, "new").reserve(11).is_err());
        // After a restart it has what the ledger has.
        let spent = HashMap::from([("k".to_owned(), TokensSpent { today: 95, this_month: 95 })]);
        let restarted = Keys::new(&keys(Some(100), today));
        restarted.restore(&spent);
        assert!(account(&restarted, "old").reserve(5).is_ok() && account(&restarted, "old").reserve(6).is_err());
        // So has a key that a reload brings back.
        let back = Keys::new(&AccessConfig::default()).renewed(&keys(Some(100), today), &spent);
        assert!(account(&back, "new").reserve(5).is_ok() && account(&back, "new").reserve(6).is_err());
        let yesterday = today.days_before(1);
        let expired = renewed(&first, &keys(None, yesterday));
        assert_eq!(expired.identify(&with("old")).err(), Some(KeyRefusal::Expired(yesterday)));
        assert!(expired.identify(&with("new")).is_ok());
        // What such a secret has opened ends, too.
        let accepted =
            |keys: &Keys| [&b"new"[..], b"old"].map(|key| keys.is_accepted(Some(SecretId::of_hash(&key_hash(key)))));
        assert_eq!((accepted(&first), accepted(&expired)), ([true, true], [true, false]));
        assert!(!Keys::new(&AccessConfig::default()).is_accepted(first.identify(&with("new")).ok().unwrap().secret));
        assert!(expired.is_accepted(None));
    }

    #[test]
    fn a_reload_keeps_the_usage_of_each_key() {
        let key = |limit| ConfiguredKey {
            hash: key_hash(b"k"),
            expires: None,
            account: Arc::new(Account::new(
                "k",
                KeyLimits { requests_per_minute: Some(limit), ..KeyLimits::default() },
            )),
        };
        let config = |limit| AccessConfig { keys: vec![key(limit)], ..AccessConfig::default() };
        let keys = Keys::new(&config(5));
        let same = renewed(&keys, &config(5));
        assert!(Arc::ptr_eq(&keys.allowed[0].account, &same.allowed[0].account));
        for _ in 0..4 {
            keys.allowed[0].account.take_request().unwrap();
        }
        let changed = renewed(&keys, &config(6));
        let account = &changed.allowed[0].account;
        assert_eq!(account.limits.requests_per_minute, Some(6));
        assert_eq!(account.quotas().next().unwrap().1.remaining, 2, "four of six are used");
        let memory = |keys: &Keys| Arc::clone(keys.allowed[0].account.memory.as_ref().unwrap());
        assert!(Arc::ptr_eq(&memory(&keys), &memory(&changed)), "bodies that arrive now still count");
        // Lower the limit below the usage: the rest becomes a debt.
        let less = renewed(&changed, &config(2));
        let quota = less.allowed[0].account.quotas().next().unwrap().1;
        assert!(quota.remaining == 0 && less.allowed[0].account.take_request().is_err(), "{quota:?}");
    }
}
