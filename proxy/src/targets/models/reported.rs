//! Puts models into service that nodes report.
//!
//! A node reports its model, so the configuration need not repeat it. If the model is already served, the node is one more
//! engine for it; otherwise the model is served under the node's name for it. If nodes were restarted with other weights,
//! their model's name moves to these weights.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use baton_schemas::node::NodeInfo;

use super::pool::ModelPool;
use super::renamed_weights::ModelFate;
use super::served_model::ServedModel;
use crate::targets::nodes::{ModelIdentity, Node};

/// The interval between two looks at the nodes. A look reads their known state and sends nothing.
pub const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// Watches the pool's nodes until the pool is dropped. A reported model gets all undeclared nodes and these prefill
/// nodes; `found` completes it.
pub fn serve_reported_models(
    pool: &Arc<ModelPool>,
    prefill: Vec<Arc<Node>>,
    found: impl Fn(ServedModel) -> Arc<ServedModel> + Send + 'static,
) {
    pool.set_undeclared_prefill(prefill);
    let pool = Arc::downgrade(pool);
    tokio::spawn(async move {
        let mut logged = HashSet::new();
        while let Some(pool) = pool.upgrade() {
            pool.renew(&found);
            let undeclared = pool.undeclared();
            for node in &undeclared.decode {
                let Some(info) = node.info().filter(|info| info.role.decodes()) else { continue };
                if pool.is_new(&info) {
                    tracing::info!(
                        node = node.name,
                        model = info.model,
                        "a node runs a new model: it is served from now on"
                    );
                    let name = OnceLock::from(info.model.clone());
                    let mut model =
                        ServedModel::new(name, Vec::new(), undeclared.decode.clone(), undeclared.prefill.clone());
                    model.removed_keys = Arc::clone(&pool.removed_keys);
                    pool.add(found(model.with_identity(ModelIdentity::of(&info))));
                }
            }
            let unused: HashSet<String> = pool.unused_nodes().iter().map(ToString::to_string).collect();
            unused.difference(&logged).for_each(|unused| tracing::warn!("{unused}"));
            logged = unused;
            drop(pool);
            tokio::time::sleep(REPORT_INTERVAL).await;
        }
    });
}

impl ModelPool {
    /// Returns true if a node runs a model that is not served yet, under a name that is free. A node whose name is taken is
    /// [not used](ModelPool::unused_nodes).
    fn is_new(&self, info: &NodeInfo) -> bool {
        let theirs = ModelIdentity::of(info);
        let is_served = |model: &Arc<ServedModel>| match model.identity() {
            // A model that is loaded on demand runs on its own process alone, so only its name matters.
            _ if model.loadable.is_some() => false,
            Some(ours) => ours.is_same(&theirs),
            // Its own engine may still answer that it runs this model. If that engine cannot start, names decide.
            None => !model.has_lost_its_engine(),
        };
        !self.models().iter().any(|model| is_served(model) || model.has_name(&info.model))
    }

    /// Moves names to their nodes' new weights, and drops models that no node serves or names any more.
    fn renew(&self, found: &impl Fn(ServedModel) -> Arc<ServedModel>) {
        for old in self.models() {
            let new = match old.fate() {
                ModelFate::Stays => continue,
                ModelFate::Follows(info) if !self.serves_elsewhere(&old, &info) => {
                    let model = old.name.get();
                    tracing::warn!(model, "all nodes of a model run other weights now: its name follows them");
                    Some(found(ServedModel::with_weights_of(&old, &info)))
                }
                ModelFate::Follows(_) if old.name_is_configured => continue,
                ModelFate::Follows(_) | ModelFate::Retires => {
                    tracing::warn!(
                        model = old.name.get(),
                        "all nodes of a model run other models now: it is no longer served"
                    );
                    None
                }
            };
            self.replace(&old, new);
        }
    }

    /// Returns true if a node runs another served model than `this`.
    fn serves_elsewhere(&self, this: &Arc<ServedModel>, info: &NodeInfo) -> bool {
        let others = |model: &&Arc<ServedModel>| !Arc::ptr_eq(model, this) && model.loadable.is_none();
        self.models().iter().filter(others).any(|model| model.bars_decode(info).is_none())
    }
}
