//! The tag by which engines share their threads fairly between API keys.

use serde::{Deserialize, Serialize};

/// Tells the API keys of an endpoint apart where their work takes turns in an engine. The endpoint derives it; a client never sets
/// it. Unlike [`CacheScope`](crate::CacheScope), no two keys share one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KeyTag(pub u64);

impl KeyTag {
    /// The tag of work for no key, such as measurements, and of endpoints from before this field.
    pub const NONE: KeyTag = KeyTag(0);

    /// Returns true for [`KeyTag::NONE`].
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }
}
