//! Counts the nodes of a model that can serve a request's images.

use std::sync::Arc;

use baton_schemas::node::NodeInfo;

use super::image_support::ImageNeed;
use super::served_model::{RETURN_WAIT, ServedModel};
use crate::targets::nodes::Node;

impl ServedModel {
    /// The number of decode nodes that support the request's images, including nodes that are down and nodes that have not
    /// answered yet.
    pub fn n_supporting(&self, need: ImageNeed<'_>) -> usize {
        let supports = |info: &NodeInfo| self.bars_decode(info).is_none() && need.is_met_by(info);
        self.decode.iter().filter(|node| node.last_info().is_none_or(|info| supports(&info))).count()
    }

    /// Returns true if a decode node that supports the request's images answered a short time ago, and does not now.
    pub fn has_lost_node(&self, need: ImageNeed<'_>) -> bool {
        let supports = |info: &NodeInfo| self.bars_decode(info).is_none() && need.is_met_by(info);
        let was_there = |node: &&Arc<Node>| node.last_info().is_some_and(|info| supports(&info));
        self.decode.iter().filter(was_there).any(|node| {
            let status = node.health.status();
            let is_recent = status.since.elapsed().is_ok_and(|lost| lost < RETURN_WAIT);
            node.info().is_none() && status.refusal().is_none() && is_recent
        })
    }
}
