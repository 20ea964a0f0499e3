//! API keys that were removed while requests of theirs were under way: waiting, streaming, about to go on elsewhere.

use std::collections::HashSet;

use baton_schemas::CacheScope;
use tokio::sync::watch;

/// The scopes of the keys that the configuration has no more: one set for an endpoint, whatever becomes of its models. A request of
/// such a key may live as long as its stream, so none is dropped before its key is back. An operator wrote each of them.
pub struct RemovedKeys(watch::Sender<HashSet<CacheScope>>);

impl Default for RemovedKeys {
    fn default() -> RemovedKeys {
        RemovedKeys(watch::Sender::new(HashSet::new()))
    }
}

impl RemovedKeys {
    /// Takes note that the keys of these scopes were removed, and that those of `valid` exist, perhaps again.
    pub fn note(&self, removed: &[CacheScope], valid: &[CacheScope]) {
        self.0.send_modify(|scopes| {
            scopes.extend(removed);
            for scope in valid {
                scopes.remove(scope);
            }
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
    fn a_key_that_comes_back_is_as_any_other_and_no_other_is_ever_taken_for_one() {
        let keys = RemovedKeys::default();
        keys.note(&[CacheScope(1), CacheScope(2)], &[]);
        keys.note(&[], &[CacheScope(1)]);
        assert_eq!([1, 2, 3].map(|scope| keys.contains(CacheScope(scope))), [false, true, false]);
        let many: Vec<CacheScope> = (10..10_010).map(CacheScope).collect();
        keys.note(&many, &[]);
        assert!(keys.contains(CacheScope(2)) && many.iter().all(|scope| keys.contains(*scope)));
    }
}
