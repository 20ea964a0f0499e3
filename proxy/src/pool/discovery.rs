//! Puts models into service that nodes say they run.
//!
//! A node tells what it runs; nobody has to repeat it in a configuration. A model that is served already gets the node as
//! one more engine; any other becomes a model of its own, under the name that the node has for it.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use baton_schemas::node::NodeInfo;

use super::{Identity, Node, Pool, ServedModel};

/// How often nodes are looked at. What is looked at is known here: nothing is sent.
pub const DISCOVERY_INTERVAL: Duration = Duration::from_millis(100);

/// Watches the pool's undeclared nodes until the pool is dropped. A model that is found has all of them and these
/// prefill nodes in its lists; `found` adds what else a model has.
pub fn keep_discovering(
    pool: &Arc<Pool>,
    prefill: Vec<Arc<Node>>,
    found: impl Fn(ServedModel) -> Arc<ServedModel> + Send + 'static,
) {
    if pool.undeclared.is_empty() {
        return;
    }
    let pool = Arc::downgrade(pool);
    tokio::spawn(async move {
        let mut refused = HashSet::new();
        while let Some(pool) = pool.upgrade() {
            for node in &pool.undeclared {
                let Some(info) = node.info().filter(|info| info.role.decodes()) else { continue };
                match pool.look_at(&info) {
                    Finding::Known => {}
                    Finding::New => {
                        tracing::info!(node = node.name, model = info.model, "a node runs a model that was not served");
                        let name = OnceLock::from(info.model.clone());
                        let model = ServedModel::new(name, Vec::new(), pool.undeclared.clone(), prefill.clone());
                        pool.add(found(model.with_identity(Identity::of(&info))));
                    }
                    Finding::NameTaken if refused.insert((node.name.clone(), info.model.clone())) => tracing::warn!(
                        "the node {} is not used: what it calls {:?} are other weights than those served under that \
                         name. Start it with another --name",
                        node.name,
                        info.model
                    ),
                    Finding::NameTaken => {}
                }
            }
            drop(pool);
            tokio::time::sleep(DISCOVERY_INTERVAL).await;
        }
    });
}

/// What a node runs, as far as the pool is concerned.
enum Finding {
    /// A model that is served, or cannot be told yet.
    Known,
    /// A model that is not served yet.
    New,
    /// Another model under the name of one that is served.
    NameTaken,
}

impl Pool {
    fn look_at(&self, info: &NodeInfo) -> Finding {
        let (models, theirs) = (self.models(), Identity::of(info));
        // A model whose own engine has not answered yet may be this one.
        if models.iter().any(|model| model.identity().is_none_or(|ours| ours.is_same(&theirs))) {
            Finding::Known
        } else if models.iter().any(|model| model.is_called(&info.model)) {
            Finding::NameTaken
        } else {
            Finding::New
        }
    }

    fn add(&self, model: Arc<ServedModel>) {
        self.models.write().unwrap_or_else(PoisonError::into_inner).push(model);
    }
}
