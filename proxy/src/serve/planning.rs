//! Applies the planning settings to `[model]` and to the models that nodes run.

use std::sync::Arc;

use crate::config::RoutingConfig;
use crate::targets::models::{self, ServedModel};

/// Gives a model these settings. From now on its nodes are calibrated, if the settings say so, and the KV of
/// replies returns to the nodes that compute prompts.
pub(super) fn plan_by(routing: &RoutingConfig, mut model: ServedModel) -> Arc<ServedModel> {
    model.policy = routing.policy.policy();
    model.deadlines = routing.deadlines;
    let model = Arc::new(model);
    if routing.calibrate {
        models::keep_calibrated(&model);
    }
    models::keep_returning(&model);
    model
}
