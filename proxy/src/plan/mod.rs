//! Which engines serve a request, and why.
//!
//! Today there is one route, so the plan is short; the choice between direct generation, a handoff and an upstream
//! has its place here, as a pure function of the request and a snapshot of the pool.

use std::fmt;

use crate::pool::ServedModel;

/// A decision with its reason.
pub struct Plan<'p> {
    /// Where the request runs.
    pub route: Route<'p>,
    /// Why, in one word for counting.
    pub reason: &'static str,
}

/// Which engines serve a request.
pub enum Route<'p> {
    /// Prefill and decode on one engine.
    Direct(&'p ServedModel),
}

/// Plans a request for a model.
pub fn plan(model: &ServedModel) -> Plan<'_> {
    Plan { route: Route::Direct(model), reason: "only_route" }
}

impl fmt::Display for Plan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.route {
            Route::Direct(model) => write!(f, "direct; decode={}; reason={}", model.node, self.reason),
        }
    }
}
