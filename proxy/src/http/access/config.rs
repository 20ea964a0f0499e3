//! The configuration of access.

use std::fmt;
use std::sync::Arc;

use crate::account::Account;
use crate::request::kv_loss::LossyKv;
use crate::utc_day::UtcDay;

/// Keys, hosts and origins. The default is open access.
#[derive(Clone, Default)]
pub struct AccessConfig {
    /// Keys of the owner, in plain text. If `keys` is empty too, no key is required.
    pub api_keys: Vec<String>,
    /// Keys with limits, hashed.
    pub keys: Vec<ConfiguredKey>,
    /// Lets callers with different keys reuse each other's cached prompts. This is faster, but the timing reveals to
    /// one caller what another one sent.
    pub share_prefix_cache: bool,
    /// From it follow the scopes of keys. `None`: a random one, for as long as the process lives.
    pub scope_key: Option<[u8; 32]>,
    /// Additional names accepted in `Host` where it is checked, without port.
    pub allowed_hosts: Vec<String>,
    /// Additional browser origins that may call, e.g. `https://chat.example.com`; `*` means any.
    pub allowed_origins: Vec<String>,
    /// Operators may pull, copy and delete models over HTTP.
    pub allow_model_management: bool,
    /// The KV of requests that name none.
    pub lossy_kv: LossyKv,
}

impl AccessConfig {
    /// Returns true if clients must present a key.
    pub fn needs_key(&self) -> bool {
        !self.api_keys.is_empty() || !self.keys.is_empty()
    }
}

impl fmt::Debug for AccessConfig {
    /// Hides the keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AccessConfig")
    }
}

/// A key that opens the API.
#[derive(Debug, Clone)]
pub struct ConfiguredKey {
    /// The hash of the key; see [`key_hash`].
    pub hash: [u8; 32],
    /// The last day on which it is accepted; `None`: it does not expire.
    pub expires: Option<UtcDay>,
    /// The account that the key belongs to. While a key is replaced, its old and its new secret share one.
    pub account: Arc<Account>,
}

/// Hashes a key with BLAKE3. The key-derivation mode keeps the hash distinct from other BLAKE3 hashes of the same
/// bytes.
pub fn key_hash(key: &[u8]) -> [u8; 32] {
    blake3::derive_key("Baton 2026 API key", key)
}
