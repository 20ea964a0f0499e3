//! Separates callers in the prefix cache.

use serde::{Deserialize, Serialize};

/// A server-derived tag that separates callers in the prefix cache. Never taken from a client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CacheScope(pub u64);

impl CacheScope {
    /// The scope of callers who present no key, or whose owner shares the cache between keys.
    pub const SHARED: CacheScope = CacheScope(0);

    /// Returns true for [`CacheScope::SHARED`].
    pub fn is_shared(&self) -> bool {
        *self == Self::SHARED
    }
}
