//! Baton's own routes: the state of the endpoint, its metrics, the plan of a request, usage and keys, machines' models, the configuration
//! and the log, and the live page.

pub(super) mod metrics;
pub mod models;
mod operate;
mod page;
mod plan;
mod state;
mod state_changes;
pub mod usage;
mod welcome;

use super::openapi::{Operation, Routes};

/// The routes, except `/openapi.json`.
pub(super) fn routes() -> Routes {
    let welcome = Operation::new("The live page for browsers; for others, a liveness check");
    let welcome = welcome.public().replies_text("text/plain").replies_text("text/html");
    let routes = Routes::of("Baton")
        .post("/baton/plan", plan::explain, plan::operation())
        .get("/baton/state", state::show, state::operation())
        .get("/baton/usage", usage::show, usage::operation())
        .get("/baton/keys", usage::keys, usage::keys_operation())
        .get("/baton/models", models::list, models::list_operation())
        .post("/baton/models", models::order, models::order_operation())
        .get("/baton/config", operate::config, operate::config_operation())
        .get("/baton/config/changes", operate::config_changes, operate::config_changes_operation())
        .get("/baton/log", operate::log, operate::log_operation())
        .get("/metrics", metrics::scrape, metrics::operation())
        .get("/", welcome::welcome, welcome);
    page::routes(routes)
}
