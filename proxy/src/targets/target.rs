//! The target of one request.

use std::sync::Arc;

use super::models::ServedModel;
use super::upstreams::ServedByUpstreams;

/// The nodes or upstreams that answer one request. Resolved once, by [`Targets::resolve`](super::Targets::resolve).
pub enum Target {
    /// Nodes of this endpoint.
    Nodes {
        /// The model and its nodes.
        model: Arc<ServedModel>,
        /// Upstreams that serve a model of the same name, for generation that no node can begin.
        fallback: Option<ServedByUpstreams>,
    },
    /// Upstreams alone.
    Upstreams(ServedByUpstreams),
}

impl Target {
    /// The model's public name. Empty while its node has not answered.
    pub fn name(&self) -> &str {
        match self {
            Target::Nodes { model, fallback } => {
                let fallback = || fallback.as_ref().map_or("", |upstreams| &upstreams.name);
                model.name.get().map_or_else(fallback, String::as_str)
            }
            Target::Upstreams(upstreams) => &upstreams.name,
        }
    }

    /// The model on nodes, if nodes serve it.
    pub fn served_model(&self) -> Option<&Arc<ServedModel>> {
        match self {
            Target::Nodes { model, .. } => Some(model),
            Target::Upstreams(_) => None,
        }
    }

    /// Returns true if upstreams can generate when no node can.
    pub fn has_fallback(&self) -> bool {
        matches!(self, Target::Nodes { fallback: Some(_), .. })
    }
}
