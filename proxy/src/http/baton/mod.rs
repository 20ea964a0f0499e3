//! Baton's own routes: the state of the endpoint, its metrics, and the plan of a request.

pub(super) mod metrics;
mod plan;
mod state;
mod welcome;

use super::openapi::{Operation, Routes};

/// The routes, except `/openapi.json`.
pub(super) fn routes() -> Routes {
    Routes::of("Baton")
        .post("/baton/plan", plan::explain, plan::operation())
        .get("/baton/state", state::show, state::operation())
        .get("/metrics", metrics::scrape, metrics::operation())
        .get("/", welcome::welcome, Operation::new("Liveness check").public().replies_text("text/plain"))
}
