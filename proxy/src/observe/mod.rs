//! What is noted of requests as they pass: how they went, never what they said.
//!
//! [`RequestWatch`] travels with a request from its arrival to the end of its stream, like its permit, and tells the
//! [`Observer`] once it is dropped. [`EmbedWatch`] is the same for requests for vectors.

mod embed_watch;
mod journal;
pub mod metrics;
pub mod readiness;
pub mod state;
pub mod telemetry;
mod watch;

pub use self::embed_watch::EmbedWatch;
pub use self::journal::{Journal, MAX_RECORDS, Outcome, RouteRecord};
use self::metrics::RequestMetrics;
pub use self::watch::{PlannedRoute, RequestWatch};

/// Label of requests for models that are not served: what clients write must not become labels.
const UNKNOWN_MODEL: &str = "unknown";

/// Everything that is noted, of all requests.
#[derive(Debug, Default)]
pub struct Observer {
    /// The last routes.
    pub journal: Journal,
    /// Counts and histograms.
    pub metrics: RequestMetrics,
}

#[cfg(test)]
pub(crate) mod tests;
