//! Estimates a prompt's time on a model's nodes, before it is rendered.

use baton_planner::cost::{Prediction, candidates};
use baton_planner::snapshot::HeldTokens;
use baton_schemas::CacheScope;

use super::PlanRequest;
use super::node_views::snapshot_of_size;
use crate::targets::models::ServedModel;
use crate::targets::nodes::PromptHashes;
use crate::targets::text_prefixes::PromptOutline;

/// The predicted times of the best route that a prompt with this outline has on the model's nodes, before it is rendered. `None`: no
/// node can take it now, or speeds are not measured.
pub fn estimated(model: &ServedModel, prompt: &PromptOutline, scope: CacheScope) -> Option<Prediction> {
    let request = PlanRequest {
        max_tokens: prompt.max_tokens,
        // It has no place on any node yet.
        seat: Some(usize::MAX),
        // The tokens are not known yet. Their number is estimated, and where they are cached is said below.
        ..PlanRequest::of_tokens(&[], scope)
    };
    let hashes = PromptHashes::new(scope, &[]);
    let mut snapshot = snapshot_of_size(model, &request, prompt.n_tokens.max(1), &hashes, model.routes.turn());
    let held = HeldTokens::in_slot(model.routes.texts.n_held(prompt));
    snapshot.decode.iter_mut().chain(&mut snapshot.prefill).for_each(|node| node.held = held);
    let candidates = candidates(&snapshot);
    let choice = model.policy.choose(&snapshot, &candidates)?;
    candidates[choice.candidate].prediction
}
