//! The configuration of a running endpoint, for operators. Never a secret.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The configuration of a running endpoint: the reply to `GET /baton/config`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigReport {
    /// The file that is watched; missing if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// When it was last applied, milliseconds since the Unix epoch.
    pub applied_at_ms: u64,
    /// The settings. A key that is not named has its default. `[[models]]` whose files are being fetched wait for that; the log says so.
    pub settings: Vec<WrittenSetting>,
    /// Keys that are set otherwise since the start, and wait for a restart.
    pub waiting: Vec<String>,
    /// The reason why the present file was not applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// A key that is set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WrittenSetting {
    /// As in the file, such as `models[0].name`, or the flag.
    pub key: String,
    /// As in the file; missing if it is a secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Its source. Flags win over the file.
    pub source: SettingSource,
}

/// The source of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SettingSource {
    /// The configuration file.
    File,
    /// A flag of the command line.
    CommandLine,
    /// An environment variable that stands for a flag.
    Environment,
}
