//! The tag that separates callers in the prefix cache.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Separates callers in the prefix cache. The server derives it; a client never sets it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CacheScope(pub u64);

impl CacheScope {
    /// The scope of callers without a key, and of keys that share the cache.
    pub const SHARED: CacheScope = CacheScope(0);

    /// Returns true for [`CacheScope::SHARED`].
    pub fn is_shared(&self) -> bool {
        *self == Self::SHARED
    }
}

/// The body of a call to forget the KV of scopes whose API keys were removed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ScopeList {
    /// The scopes.
    pub scopes: Vec<CacheScope>,
}

const SHARED_NAME: &str = "shared";

impl fmt::Display for CacheScope {
    /// For people: `shared`, or 16 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_shared() {
            true => f.write_str(SHARED_NAME),
            false => write!(f, "{:016x}", self.0),
        }
    }
}

impl FromStr for CacheScope {
    type Err = String;

    fn from_str(text: &str) -> Result<CacheScope, String> {
        if text == SHARED_NAME {
            return Ok(CacheScope::SHARED);
        }
        let is_one = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = is_one.then(|| u64::from_str_radix(text, 16).ok()).flatten();
        number.map(CacheScope).ok_or_else(|| format!("must be {SHARED_NAME}, or 16 hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_is_read_as_it_is_shown() {
        for scope in [CacheScope::SHARED, CacheScope(1), CacheScope(u64::MAX)] {
            assert_eq!(scope.to_string().parse(), Ok(scope));
        }
        for wrong in ["", "Shared", "+000000000000001", "1"] {
            assert!(wrong.parse::<CacheScope>().is_err(), "{wrong}");
        }
    }
}
