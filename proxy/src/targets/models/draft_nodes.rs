//! Which draft node may follow a sequence: one with the vocabulary of the node that generates, and a free slot.

use std::sync::Arc;

use baton_planner::reason::BarReason;
use baton_schemas::model_difference::ModelDifference;
use baton_schemas::node::{NodeInfo, NodeLoad};

use super::served_model::ServedModel;
use crate::targets::nodes::Node;

impl ServedModel {
    /// The draft node with the most free slots whose candidates are tokens of what `decode` runs; `None` if there is none. `n_begun`
    /// sequences have just been given one, which no load shows yet.
    pub fn draft_node(&self, decode: &Node, n_begun: u32) -> Option<&Arc<Node>> {
        let vocabulary = decode.info()?.fingerprint?.vocabulary;
        let free = self.prefill.iter().filter_map(|node| {
            let info = node.info().filter(|info| info.role.drafts() && !node.health.is_silent())?;
            info.fingerprint.filter(|theirs| theirs.vocabulary == vocabulary)?;
            let NodeLoad { active_slots, queued, .. } = node.load();
            Some((info.n_slots.saturating_sub(active_slots.saturating_add(queued)), node))
        });
        let mut free: Vec<(u32, &Arc<Node>)> = free.collect();
        for _ in 0..n_begun {
            *freest(&mut free)? -= 1;
        }
        let n_free = *freest(&mut free)?;
        free.into_iter().find(|(n, _)| *n == n_free).map(|(_, node)| node)
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

/// The most free slots of a node, if any are free.
fn freest<'f>(free: &'f mut [(u32, &Arc<Node>)]) -> Option<&'f mut u32> {
    // The first of equal ones.
    free.iter_mut().rev().map(|(n, _)| n).max_by_key(|n| **n).filter(|n| **n > 0)
}
