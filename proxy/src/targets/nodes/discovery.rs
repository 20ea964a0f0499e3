//! Puts models into service that nodes say they run.
//!
//! A node tells what it runs; nobody has to repeat it in a configuration. A model that is served already gets the node as
//! one more engine; any other becomes a model of its own, under the name that the node has for it. And where nodes were
//! restarted with other weights, their name goes with them.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use baton_schemas::node::NodeInfo;

use super::succession::Fate;
use super::{Identity, Node, Pool, ServedModel};

/// How often nodes are looked at. What is looked at is known here: nothing is sent.
pub const DISCOVERY_INTERVAL: Duration = Duration::from_millis(100);

/// Watches the pool's nodes until the pool is dropped. A model that is found has all undeclared nodes and these prefill
/// nodes in its lists; `found` adds what else a model has.
pub fn keep_discovering(
    pool: &Arc<Pool>,
    prefill: Vec<Arc<Node>>,
    found: impl Fn(ServedModel) -> Arc<ServedModel> + Send + 'static,
) {
    pool.undeclared.write().unwrap_or_else(PoisonError::into_inner).prefill = prefill;
    let pool = Arc::downgrade(pool);
    tokio::spawn(async move {
        let mut told = HashSet::new();
        while let Some(pool) = pool.upgrade() {
            pool.renew(&found);
            let undeclared = pool.undeclared();
            for node in &undeclared.decode {
                let Some(info) = node.info().filter(|info| info.role.decodes()) else { continue };
                if pool.is_new(&info) {
                    tracing::info!(node = node.name, model = info.model, "a node runs a model that was not served");
                    let name = OnceLock::from(info.model.clone());
                    let model =
                        ServedModel::new(name, Vec::new(), undeclared.decode.clone(), undeclared.prefill.clone());
                    pool.add(found(model.with_identity(Identity::of(&info))));
                }
            }
            let unused: HashSet<String> = pool.unused().iter().map(ToString::to_string).collect();
            unused.difference(&told).for_each(|unused| tracing::warn!("{unused}"));
            told = unused;
            drop(pool);
            tokio::time::sleep(DISCOVERY_INTERVAL).await;
        }
    });
}

impl Pool {
    /// Whether a node runs a model that is not served yet, under a name that is free. One whose name is taken is
    /// [not used](Pool::unused).
    fn is_new(&self, info: &NodeInfo) -> bool {
        let (models, theirs) = (self.models(), Identity::of(info));
        // A model whose own engine has not answered yet may be this one. If it never will, names decide.
        let is_served = |model: &Arc<ServedModel>| match model.identity() {
            // One that comes and goes runs on its own process alone: names decide.
            _ if model.resident.is_some() => false,
            Some(ours) => ours.is_same(&theirs),
            None => !model.has_lost_its_engine(),
        };
        !models.iter().any(|model| is_served(model) || model.is_called(&info.model))
    }

    fn add(&self, model: Arc<ServedModel>) {
        self.models.write().unwrap_or_else(PoisonError::into_inner).push(model);
    }

    /// Lets names follow their nodes to other weights, and drops models that nobody serves or names any more.
    fn renew(&self, found: &impl Fn(ServedModel) -> Arc<ServedModel>) {
        for old in self.models() {
            let new = match old.fate() {
                Fate::Stays => continue,
                Fate::Follows(info) if !self.serves_elsewhere(&old, &info) => {
                    let model = old.name.get();
                    tracing::warn!(model, "its nodes run other weights now, and none the old ones: the name follows");
                    Some(found(ServedModel::succeeding(&old, &info)))
                }
                Fate::Follows(_) if old.name_is_configured => continue,
                Fate::Follows(_) | Fate::Retires => {
                    tracing::warn!(model = old.name.get(), "its nodes run other models now: it is no longer served");
                    None
                }
            };
            let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
            if let Some(at) = models.iter().position(|model| Arc::ptr_eq(model, &old)) {
                models.splice(at..=at, new);
            }
        }
    }

    /// Whether another model than this one is what a node runs.
    fn serves_elsewhere(&self, this: &Arc<ServedModel>, info: &NodeInfo) -> bool {
        let others = |model: &&Arc<ServedModel>| !Arc::ptr_eq(model, this) && model.resident.is_none();
        self.models().iter().filter(others).any(|model| model.bars_decode(info).is_none())
    }
}
