//! Records of requests: their course, never their text.
//!
//! [`RequestWatch`] travels with a request from its arrival to the end of its stream, like its permit, and reports to
//! the [`Observer`] when it is dropped. [`EmbedWatch`] is the same for requests for vectors.

mod config_report;
mod current_requests;
mod embed_watch;
pub mod glossary;
pub mod history;
mod journal;
pub mod metrics;
pub mod readiness;
pub mod snapshot;
pub mod telemetry;
mod token_sources;
mod watch;

use std::sync::Arc;
use std::time::SystemTime;

pub use self::config_report::{
    ChangeEffect, ChangeKind, ConfigReport, PreviewBusy, ReloadPreview, SettingChange, SettingSource, ValueDigest,
    WrittenSetting,
};
pub use self::current_requests::CurrentCounts;
use self::current_requests::CurrentRequests;
pub use self::embed_watch::EmbedWatch;
use self::history::History;
pub use self::journal::{
    DirectPrediction, Journal, MAX_RECORDS, MAX_UNSERVED, RequestOutcome, RouteRecord, UpstreamPrefill,
};
use self::metrics::requests::RequestMetrics;
pub use self::token_sources::{TokenSource, TokenSources};
pub use self::watch::{PlannedRoute, RequestWatch};
use crate::usage::UsageLedger;

/// The label of requests for models that are not served: what clients write must not become labels.
const UNKNOWN_MODEL: &str = "unknown";

/// The records of all requests.
#[derive(Debug, Default)]
pub struct Observer {
    /// The requests that are in the endpoint.
    pub current: Arc<CurrentRequests>,
    /// The last requests that ended.
    pub journal: Journal,
    /// The last hour.
    pub history: Arc<History>,
    /// Counts and histograms.
    pub metrics: RequestMetrics,
    /// The usage of keys.
    pub usage: Arc<UsageLedger>,
    /// When the process began.
    pub started: StartTime,
}

/// When the process began; by default now.
#[derive(Debug, Clone, Copy)]
pub struct StartTime(pub SystemTime);

impl Default for StartTime {
    fn default() -> StartTime {
        StartTime(SystemTime::now())
    }
}

#[cfg(test)]
pub(crate) mod tests;
