//! Decides when a model's name moves to other weights: once all its nodes were restarted with them.
//!
//! Streams on the old weights keep the old [`ServedModel`](super::ServedModel). They continue on nodes with the same
//! weights or end with an error, and never continue on other weights.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_schemas::node::NodeInfo;
use tokio::time::Instant;

use crate::targets::nodes::{ModelIdentity, Node};

/// How long a model waits for a node that is down before its name moves to other weights: as long as a stream searches for
/// another engine.
const GRACE: Duration = Duration::from_secs(30);

/// Which nodes have run a model, by their indices in its list, and the time since when none does.
#[derive(Debug)]
pub(super) struct ServingHistory {
    has_run_on: Box<[AtomicBool]>,
    unserved_since: Mutex<Option<Instant>>,
}

/// The change to make to a model.
#[derive(Debug)]
pub(super) enum ModelFate {
    /// A node serves it, or may soon serve it again.
    Stays,
    /// No node runs its weights any more. Its names move to the weights of this node.
    Follows(Arc<NodeInfo>),
    /// No node runs its weights any more, and the nodes that gave it its name have another name now.
    Retires,
}

impl ServingHistory {
    /// The history of a model with this many decode nodes.
    pub(super) fn new(n_nodes: usize) -> ServingHistory {
        let has_run_on = (0..n_nodes).map(|_| AtomicBool::new(false)).collect();
        ServingHistory { has_run_on, unserved_since: Mutex::new(None) }
    }

    /// Decides what happens to the model `ours`, and notes which of its `nodes` run it now. `may_take_name` returns true if
    /// the name may move to a node's weights; its second argument is true if that node has run the model.
    pub(super) fn fate(
        &self,
        ours: &ModelIdentity,
        nodes: &[Arc<Node>],
        name_is_configured: bool,
        may_take_name: impl Fn(&NodeInfo, bool) -> bool,
    ) -> ModelFate {
        let runs_ours = |info: Arc<NodeInfo>| info.role.decodes() && ours.is_same(&ModelIdentity::of(&info));
        let nodes = || nodes.iter().zip(&self.has_run_on);
        for (_, has_run) in nodes().filter(|(node, _)| node.info().is_some_and(runs_ours)) {
            has_run.store(true, Ordering::Relaxed);
        }
        let mut since = self.unserved_since.lock().unwrap_or_else(PoisonError::into_inner);
        if nodes().any(|(node, _)| node.info().is_some_and(runs_ours)) {
            *since = None;
            return ModelFate::Stays;
        }
        let since = *since.get_or_insert_with(Instant::now);
        let may_come_back = nodes().any(|(node, _)| node.last_info().is_some_and(runs_ours));
        let successor = nodes().find_map(|(node, has_run)| {
            node.info().filter(|info| info.role.decodes() && may_take_name(info, has_run.load(Ordering::Relaxed)))
        });
        match successor {
            _ if may_come_back && since.elapsed() < GRACE => ModelFate::Stays,
            Some(successor) => ModelFate::Follows(successor),
            None if may_come_back || name_is_configured => ModelFate::Stays,
            None => ModelFate::Retires,
        }
    }
}
