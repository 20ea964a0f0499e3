//! The state and history of a model that is loaded on demand, for reports.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The loading state of a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum LoadState {
    /// It is not in memory.
    #[default]
    Unloaded,
    /// Its process is starting.
    Loading,
    /// It takes requests.
    Loaded,
    /// Its process is ending.
    Unloading,
    /// Its last load failed.
    Failed,
}

impl LoadState {
    /// The word for tables and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Why a model was unloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum UnloadReason {
    /// No request used it for its keep-alive time.
    Idle,
    /// A request asked for it.
    Asked,
    /// Another model needed its memory.
    Memory,
    /// It could not be loaded.
    Failed,
    /// It was removed from the configuration.
    Removed,
}

impl UnloadReason {
    /// The word for metrics, logs and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Loads and unloads of a model since the start.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LoadHistory {
    /// How often it was loaded.
    pub n_loads: u64,
    /// The total time of all loads.
    pub load_time: Duration,
    /// The time of the last load.
    pub last_load: Duration,
    /// How often it was unloaded, by reason.
    pub unloads: BTreeMap<UnloadReason, u64>,
}

/// A model that is loaded on demand, at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadReport {
    /// Its loading state.
    pub state: LoadState,
    /// Bytes that it uses when it is loaded.
    pub bytes: u64,
    /// Measured memory of its process, in bytes.
    pub measured_bytes: u64,
    /// Requests that use it.
    pub n_active: u32,
    /// Requests that wait for it to be loaded.
    pub n_waiting: usize,
    /// When it is unloaded if no request uses it; `None` if it is not loaded or stays loaded.
    pub expires_at: Option<SystemTime>,
    /// Its loads and unloads since the start.
    pub history: LoadHistory,
    /// The cause of the last failed load; clients may see it.
    pub last_failure: Option<String>,
}
