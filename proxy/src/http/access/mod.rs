//! Which callers are admitted: API keys, host names and web pages' origins. All three can change while streams run.

pub mod allowed_hosts;
pub mod allowed_origins;
mod config;
pub(super) mod cors;
pub mod host_check;
pub(super) mod key_check;
mod keys;
pub(super) mod origin_check;
pub(super) mod rate_headers;

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use baton_schemas::CacheScope;

use self::allowed_hosts::AllowedHosts;
use self::allowed_origins::AllowedOrigins;
pub use self::config::{AccessConfig, ConfiguredKey, key_hash};
use self::keys::Keys;
use crate::account::budget::TokensSpent;
use crate::request::kv_loss::LossyKv;

/// The checks that apply to each request.
pub struct Access {
    pub keys: Keys,
    /// Names allowed in `Host`, for listeners that check it.
    pub hosts: AllowedHosts,
    /// Allowed origins of web pages.
    pub origins: AllowedOrigins,
    /// Operators may change the models of machines.
    pub manages_models: bool,
    /// The KV of requests that name none.
    pub lossy_kv: LossyKv,
}

impl Access {
    /// The scopes of the configured keys; none if the callers share their caches.
    pub fn scopes(&self) -> Vec<CacheScope> {
        self.keys.scopes().into_iter().map(|(scope, _)| scope).collect()
    }
}

/// Access that can be replaced while requests run. Each request sees one version.
pub type SharedAccess = Arc<ArcSwap<Access>>;

/// Creates the checks from the configuration.
pub fn shared(config: &AccessConfig) -> SharedAccess {
    Arc::new(ArcSwap::from_pointee(access(config, Keys::new(config))))
}

/// Applies another configuration. Keys in both configurations keep their usage, and callers keep their cached prompts. New keys
/// have what they spent before, by their names.
pub fn renew(shared: &SharedAccess, config: &AccessConfig, spent: &HashMap<String, TokensSpent>) {
    let keys = shared.load().keys.renewed(config, spent);
    shared.store(Arc::new(access(config, keys)));
}

fn access(config: &AccessConfig, keys: Keys) -> Access {
    let hosts = AllowedHosts::new(&config.allowed_hosts);
    let origins = AllowedOrigins::new(&config.allowed_origins);
    Access { keys, hosts, origins, manages_models: config.allow_model_management, lossy_kv: config.lossy_kv }
}
