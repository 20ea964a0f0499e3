//! Who may call: the part of the configuration that can change while streams run.

use std::sync::Arc;

use arc_swap::ArcSwap;

use super::auth::{ConfiguredKey, Keys};
use super::host::AllowedHosts;
use super::origin::AllowedOrigins;

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

/// What each request is checked against.
pub struct Access {
    /// Who may call.
    pub keys: Keys,
    /// Under which names, for listeners that ask.
    pub hosts: AllowedHosts,
    /// From which web pages.
    pub origins: AllowedOrigins,
}

/// Access that can be exchanged while requests run; each of them sees one state of it.
pub type SharedAccess = Arc<ArcSwap<Access>>;

/// Access as configured.
pub fn shared(config: &AccessConfig) -> SharedAccess {
    Arc::new(ArcSwap::from_pointee(access(config, Keys::new(config))))
}

/// Puts another configuration into force. Keys that are in both keep what they have used of their rates, and callers
/// the prompts that are cached for them.
pub fn renew(shared: &SharedAccess, config: &AccessConfig) {
    let keys = shared.load().keys.renewed(config);
    shared.store(Arc::new(access(config, keys)));
}

fn access(config: &AccessConfig, keys: Keys) -> Access {
    let (hosts, origins) = (AllowedHosts::new(&config.allowed_hosts), AllowedOrigins::new(&config.allowed_origins));
    Access { keys, hosts, origins }
}
