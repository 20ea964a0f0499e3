//! How requests are planned for `[model]` and for the models that nodes run.

use std::sync::Arc;

use baton_planner::deadlines::Deadlines;
use baton_planner::policy::Policy;

use crate::config::ServeConfig;
use crate::targets::models::{self, ServedModel};

/// The planning settings of a configuration.
pub(super) struct PlanningSettings {
    policy: &'static dyn Policy,
    deadlines: Deadlines,
    calibrate: bool,
}

impl PlanningSettings {
    pub(super) fn of(config: &ServeConfig) -> PlanningSettings {
        PlanningSettings { policy: config.policy, deadlines: config.deadlines, calibrate: config.calibrate }
    }

    /// Gives a model these settings. From now on its nodes are calibrated, if the settings say so.
    pub(super) fn apply(&self, mut model: ServedModel) -> Arc<ServedModel> {
        (model.policy, model.deadlines) = (self.policy, self.deadlines);
        let model = Arc::new(model);
        if self.calibrate {
            models::keep_calibrated(&model);
        }
        model
    }
}
