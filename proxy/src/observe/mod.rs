//! Records of requests: their course, never their text.
//!
//! [`RequestWatch`] travels with a request from its arrival to the end of its stream, like its permit, and reports to
//! the [`Observer`] when it is dropped. [`EmbedWatch`] is the same for requests for vectors.

mod embed_watch;
mod journal;
pub mod metrics;
pub mod readiness;
pub mod snapshot;
pub mod telemetry;
mod watch;

pub use self::embed_watch::EmbedWatch;
pub use self::journal::{Journal, MAX_RECORDS, RequestOutcome, RouteRecord};
use self::metrics::requests::RequestMetrics;
pub use self::watch::{PlannedRoute, RequestWatch};

/// The label of requests for models that are not served: what clients write must not become labels.
const UNKNOWN_MODEL: &str = "unknown";

/// The records of all requests.
#[derive(Debug, Default)]
pub struct Observer {
    /// The last routes.
    pub journal: Journal,
    /// Counts and histograms.
    pub metrics: RequestMetrics,
}

#[cfg(test)]
pub(crate) mod tests;
