//! The tag that separates callers in the prefix cache.

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
