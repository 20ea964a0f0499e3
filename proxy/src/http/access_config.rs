//! Who may call, as configured.

use std::sync::Arc;

use crate::account::Account;

/// Keys, hosts and origins as configured; by default open. No `Debug`: it holds keys.
#[derive(Clone, Default)]
pub struct AccessConfig {
    /// Keys of the owner, in plain text. With `keys` empty too, no key is asked for.
    pub api_keys: Vec<String>,
    /// Keys with limits, hashed.
    pub keys: Vec<ConfiguredKey>,
    /// Let callers with different keys reuse each other's cached prompts. Faster, and an oracle between them.
    pub share_prefix_cache: bool,
    /// Further names accepted in `Host` where that is checked, without port.
    pub allowed_hosts: Vec<String>,
    /// Further browser origins that may call, e.g. `https://chat.example.com`; `*` is any.
    pub allowed_origins: Vec<String>,
}

/// A key that opens the API.
#[derive(Debug, Clone)]
pub struct ConfiguredKey {
    /// Of the key; see [`key_hash`].
    pub hash: [u8; 32],
    /// Whose it is.
    pub account: Arc<Account>,
}

/// The hash by which a key is known: BLAKE3 in its key-derivation mode, so that it is nothing else's hash.
pub fn key_hash(key: &[u8]) -> [u8; 32] {
    blake3::derive_key("Baton 2026 API key", key)
}
