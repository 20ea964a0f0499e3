//! What a prompt would take on a model's nodes, before it is rendered.

use baton_planner::cost::{Prediction, candidates};
use baton_planner::snapshot::HeldTokens;
use baton_schemas::CacheScope;

use super::{PlanRequest, snapshot};
use crate::targets::models::ServedModel;
use crate::targets::text_prefixes::PromptOutline;

/// The most tokens of a prompt that is planned before it is rendered: more fit no context.
const MAX_ESTIMATED: u32 = 1 << 20;

/// The predicted times of the best route that a prompt with this outline has on the model's nodes, before it is rendered. `None`: no
/// node can take it now, or speeds are not measured.
pub fn estimated(model: &ServedModel, prompt: &PromptOutline, scope: CacheScope) -> Option<Prediction> {
    let tokens = vec![0; prompt.n_tokens.clamp(1, MAX_ESTIMATED) as usize];
    let request = PlanRequest {
        tokens: &tokens,
        n_replayed: 0,
        scope,
        max_tokens: prompt.max_tokens,
        policy: None,
        projector: None,
        // It has no place on any node yet.
        seat: Some(usize::MAX),
        exclude: &[],
        exclude_prefill: &[],
    };
    let mut snapshot = snapshot(model, &request, model.routes.turn());
    let held = HeldTokens::in_slot(model.routes.texts.n_held(prompt));
    snapshot.decode.iter_mut().chain(&mut snapshot.prefill).for_each(|node| node.held = held);
    let candidates = candidates(&snapshot);
    let choice = model.policy.choose(&snapshot, &candidates)?;
    candidates[choice.candidate].prediction
}
