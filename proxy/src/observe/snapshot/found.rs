//! What was found in the network.

use std::sync::Arc;

use baton_planner::reason::BarReason;

use crate::targets::found::{DiscoveryState, FoundNode, FoundState};
use crate::targets::models::ServedModel;

/// A found node that has proven the key may still run a model that nobody can use. Addresses are for operators.
pub(super) fn report(state: &DiscoveryState, models: &[Arc<ServedModel>], with_addresses: bool) -> DiscoveryState {
    let found = state.found.iter().map(|found| {
        let state = why_useless(found, models).unwrap_or(found.state);
        let addresses = if with_addresses { found.addresses.clone() } else { Vec::new() };
        FoundNode { state, reason: state.words().to_owned(), addresses, ..found.clone() }
    });
    DiscoveryState { found: found.collect(), ..state.clone() }
}

/// Why no served model can use a node that has told its model. `None` if one can, or may still turn out to be this one.
fn why_useless(found: &FoundNode, models: &[Arc<ServedModel>]) -> Option<FoundState> {
    let name = found.node.as_ref().filter(|_| found.state == FoundState::Used)?;
    let nodes = || models.iter().flat_map(|model| model.decode.iter().chain(&model.prefill));
    let info = nodes().find(|node| node.name == *name).and_then(|node| node.info())?;
    let models = models.iter().filter(|model| model.loadable.is_none());
    let mut useless = FoundState::OtherModel;
    for model in models {
        let bars = [model.bars_decode(&info), model.bars_helper(&info)];
        if model.identity().is_none() || bars.contains(&None) {
            return None;
        }
        let keeps_kv_otherwise = |bar: &Option<BarReason>| match bar {
            Some(BarReason::Differs(difference)) => difference.is_of_the_cache(),
            _ => false,
        };
        if bars.iter().any(keeps_kv_otherwise) {
            useless = FoundState::OtherKv;
        }
    }
    Some(useless)
}
