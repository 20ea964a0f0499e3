//! What was found in the network.

use std::sync::Arc;

use crate::targets::found::{DiscoveryState, FoundNode, FoundState};
use crate::targets::models::ServedModel;

/// A found node that has proven the key may still run a model that nobody can use. Addresses are for operators.
pub(super) fn report(state: &DiscoveryState, models: &[Arc<ServedModel>], with_addresses: bool) -> DiscoveryState {
    let found = state.found.iter().map(|found| {
        let state = match is_useless(found, models) {
            true => FoundState::OtherModel,
            false => found.state,
        };
        let addresses = if with_addresses { found.addresses.clone() } else { Vec::new() };
        FoundNode { state, reason: state.words().to_owned(), addresses, ..found.clone() }
    });
    DiscoveryState { found: found.collect(), ..state.clone() }
}

/// Returns true if the node has told its model, and no served model can use it.
fn is_useless(found: &FoundNode, models: &[Arc<ServedModel>]) -> bool {
    let Some(name) = found.node.as_ref().filter(|_| found.state == FoundState::Used) else { return false };
    let nodes = || models.iter().flat_map(|model| model.decode.iter().chain(&model.prefill));
    let Some(info) = nodes().find(|node| node.name == *name).and_then(|node| node.info()) else { return false };
    // A model without a known identity may still turn out to be this one.
    let may_use = |model: &Arc<ServedModel>| {
        model.identity().is_none() || model.bars_decode(&info).is_none() || model.bars_prefill(&info).is_none()
    };
    !models.iter().filter(|model| model.loadable.is_none()).any(may_use)
}
