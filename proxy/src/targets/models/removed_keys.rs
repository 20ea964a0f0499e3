//! API keys that were removed while requests of theirs were under way: waiting, streaming, about to go on elsewhere.

use std::collections::VecDeque;

use baton_schemas::CacheScope;
use tokio::sync::watch;

/// The most keys. Beyond, a request of the key that was removed longest ago may leave its KV behind. Such a request may live as
/// long as its stream, so no time bounds the list.
const MAX_KEYS: usize = 4096;

/// The scopes of removed keys, the one removed last at the end. Those that share a model share the list.
pub struct RemovedKeys(watch::Sender<VecDeque<CacheScope>>);

impl Default for RemovedKeys {
    fn default() -> RemovedKeys {
        RemovedKeys(watch::Sender::new(VecDeque::new()))
    }
}

impl RemovedKeys {
    /// Takes note that the keys of these scopes were removed, and that those of `valid` exist, perhaps again.
    pub fn note(&self, removed: &[CacheScope], valid: &[CacheScope]) {
        self.0.send_modify(|scopes| {
            scopes.retain(|scope| !valid.contains(scope) && !removed.contains(scope));
            scopes.extend(removed);
            scopes.drain(..scopes.len().saturating_sub(MAX_KEYS));
        });
    }

    /// Returns true if the KV of this scope must not stay anywhere.
    pub fn contains(&self, scope: CacheScope) -> bool {
        self.0.borrow().contains(&scope)
    }

    /// Waits until the key of a scope is removed.
    pub(super) async fn removal_of(&self, scope: CacheScope) {
        // The sender lives as long as `self`.
        let _ = self.0.subscribe().wait_for(|scopes| scopes.contains(&scope)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_comes_back_is_as_any_other_and_the_list_is_bounded() {
        let keys = RemovedKeys::default();
        keys.note(&[CacheScope(1), CacheScope(2)], &[]);
        keys.note(&[], &[CacheScope(1)]);
        assert_eq!([1, 2, 3].map(|scope| keys.contains(CacheScope(scope))), [false, true, false]);
        let many: Vec<CacheScope> = (10..10 + MAX_KEYS as u64).map(CacheScope).collect();
        keys.note(&many, &[]);
        assert_eq!(keys.0.borrow().len(), MAX_KEYS);
        assert!(!keys.contains(CacheScope(2)) && keys.contains(many[0]), "the oldest goes");
    }
}
