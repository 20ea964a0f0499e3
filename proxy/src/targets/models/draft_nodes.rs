//! Which draft node may follow a sequence: one with the vocabulary of the node that generates, and a free slot.

use std::sync::Arc;

use baton_planner::reason::BarReason;
use baton_schemas::model_difference::ModelDifference;
use baton_schemas::node::{NodeInfo, NodeLoad};

use super::served_model::ServedModel;
use crate::targets::nodes::Node;

impl ServedModel {
    /// The draft node with the most free slots whose candidates are tokens of what `decode` runs; `None` if there is none.
    pub fn draft_node(&self, decode: &Node) -> Option<&Arc<Node>> {
        let vocabulary = decode.info()?.fingerprint?.vocabulary;
        let free = self.prefill.iter().filter_map(|node| {
            let info = node.info().filter(|info| info.role.drafts() && !node.health.is_silent())?;
            info.fingerprint.filter(|theirs| theirs.vocabulary == vocabulary)?;
            let NodeLoad { active_slots, queued, .. } = node.load();
            let n_free = info.n_slots.saturating_sub(active_slots.saturating_add(queued));
            (n_free > 0).then_some((n_free, node))
        });
        // Of equal ones the first.
        free.rev().max_by_key(|(n_free, _)| *n_free).map(|(_, node)| node)
    }

    /// Returns true if a draft node has the vocabulary of a decode node, or that is not known yet.
    pub(super) fn may_draft(&self, drafts: &NodeInfo) -> bool {
        let vocabulary = |info: &NodeInfo| info.fingerprint.map(|fingerprint| fingerprint.vocabulary);
        self.decode.iter().any(|node| {
            node.last_info().is_none_or(|info| info.role.decodes() && vocabulary(&info) == vocabulary(drafts))
        })
    }

    /// The reason why a node neither computes prompts for this model nor drafts for it; `None` if it does, or may.
    pub fn bars_helper(&self, info: &NodeInfo) -> Option<BarReason> {
        match info.role.drafts() {
            true if self.may_draft(info) => None,
            true => Some(BarReason::Differs(ModelDifference::OtherModel)),
            false => self.bars_prefill(info),
        }
    }
}
