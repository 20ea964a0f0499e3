//! A name whose nodes were all restarted with other weights stands for those.
//!
//! Streams that run on the old weights keep the old [`ServedModel`]: they are taken up where the same weights are, or end
//! with an error, and never go on on others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_schemas::node::NodeInfo;
use tokio::time::Instant;

use super::{Identity, Node, ServedModel};

/// How long a node that is down is waited for before its model's name goes to other weights: as long as a stream looks
/// for an engine that takes it up.
const GRACE: Duration = Duration::from_secs(30);

/// Which nodes have run a model, by their places in its list, and since when none does.
#[derive(Debug)]
pub(super) struct History {
    has_run_on: Box<[AtomicBool]>,
    unserved_since: Mutex<Option<Instant>>,
}

impl History {
    /// Of a model with so many decode nodes.
    pub(super) fn of(n_nodes: usize) -> History {
        let has_run_on = (0..n_nodes).map(|_| AtomicBool::new(false)).collect();
        History { has_run_on, unserved_since: Mutex::new(None) }
    }
}

/// What becomes of a model.
#[derive(Debug)]
pub(super) enum Fate {
    /// A node serves it, or may soon do so again.
    Stays,
    /// Nobody runs its weights any more: its names are for what this node runs.
    Follows(Arc<NodeInfo>),
    /// Nobody runs its weights any more, and nobody but nodes that now call themselves otherwise had named it.
    Retires,
}

impl ServedModel {
    /// What becomes of it. To be asked again and again: it remembers who has served it.
    pub(super) fn fate(&self) -> Fate {
        let Some(ours) = self.identity() else { return Fate::Stays };
        let runs_ours = |info: Arc<NodeInfo>| info.role.decodes() && ours.is_same(&Identity::of(&info));
        let nodes = || self.telling().iter().zip(&self.history.has_run_on);
        for (_, has_run) in nodes().filter(|(node, _)| node.info().is_some_and(runs_ours)) {
            has_run.store(true, Ordering::Relaxed);
        }
        let mut since = self.history.unserved_since.lock().unwrap_or_else(PoisonError::into_inner);
        if nodes().any(|(node, _)| node.info().is_some_and(runs_ours)) {
            *since = None;
            return Fate::Stays;
        }
        let since = *since.get_or_insert_with(Instant::now);
        let may_come_back = nodes().any(|(node, _)| node.last_info().is_some_and(runs_ours));
        let heir = nodes().find_map(|(node, has_run)| self.heir(node, has_run.load(Ordering::Relaxed)));
        match heir {
            _ if may_come_back && since.elapsed() < GRACE => Fate::Stays,
            Some(heir) => Fate::Follows(heir),
            None if may_come_back || self.name_is_configured => Fate::Stays,
            None => Fate::Retires,
        }
    }

    /// What a node runs, if the model's name may go to that: one that was restarted under it, or that had served it under
    /// the operator's.
    fn heir(&self, node: &Node, has_run: bool) -> Option<Arc<NodeInfo>> {
        let is_named_so = |info: &NodeInfo| self.is_called(&info.model) || (self.name_is_configured && has_run);
        node.info().filter(|info| info.role.decodes() && is_named_so(info))
    }
}
