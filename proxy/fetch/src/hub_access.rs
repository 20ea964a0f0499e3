//! How the hub is reached.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};

use hf_hub::Cache;

/// The hub's address and the user's token.
#[derive(Clone, Default)]
pub struct HubAccess {
    /// `None` for the public hub.
    pub endpoint: Option<String>,
    /// For private and gated repositories. Never logged.
    pub token: Option<String>,
}

impl HubAccess {
    /// Reads `HF_ENDPOINT` and `HF_TOKEN`; without the latter, the token that the hub's own login tool has stored.
    pub fn from_env() -> Self {
        let var = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let hub_home = || match (var("HF_HOME"), var("HOME")) {
            (Some(folder), _) => Some(PathBuf::from(folder)),
            (None, Some(home)) => Some(Path::new(&home).join(".cache/huggingface")),
            (None, None) => None,
        };
        let stored = || Cache::new(hub_home()?.join("hub")).token();
        HubAccess { endpoint: var("HF_ENDPOINT"), token: var("HF_TOKEN").or_else(stored) }
    }
}

impl fmt::Debug for HubAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|_| "(hidden)");
        f.debug_struct("HubAccess").field("endpoint", &self.endpoint).field("token", &token).finish()
    }
}
