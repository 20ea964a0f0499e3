//! The configuration of a running endpoint, for operators. Never a secret.

use std::fmt;

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
    /// As in the file, such as `models[qwen].source`, or the flag. An entry of a list has its name, or its place if it has none of its own.
    pub key: String,
    /// As in the file; missing if it is a secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Its source. Flags win over the file.
    pub source: SettingSource,
    /// Tells two values apart that are not shown. It stays in the process.
    #[serde(skip)]
    #[schemars(skip)]
    pub digest: ValueDigest,
}

/// The digest of a value. A short secret could be guessed from it, so it is never shown.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct ValueDigest([u8; 32]);

impl ValueDigest {
    /// The digest of a value as it is written.
    pub fn of(value: &str) -> ValueDigest {
        ValueDigest(blake3::hash(value.as_bytes()).into())
    }
}

impl fmt::Debug for ValueDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ValueDigest")
    }
}

/// The changes that a reload of the file would make: the reply to `GET /baton/config/changes`. Nothing is changed by asking.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReloadPreview {
    /// The file that was read: the one with `.new` at the end of its name if there is one, else the file in use. Missing if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Why it would not be applied, each with its line; at most 100.
    pub mistakes: Vec<String>,
    /// The keys that differ from those in force; none if there are mistakes.
    pub changes: Vec<SettingChange>,
    /// There may be more changes: a thousand keys of a file are compared.
    pub is_truncated: bool,
    /// Models of `[[models]]` whose files would be downloaded first.
    pub downloads: Vec<String>,
}

/// The preview cannot be made now: files are slow, and others ask, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("The configuration cannot be read right now.")]
pub struct PreviewBusy;

/// A key whose value differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SettingChange {
    /// As in `/baton/config`.
    pub key: String,
    pub kind: ChangeKind,
    /// The value in force; missing if it is not set there, or a secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// The value that was read; missing if it is not set there, or a secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    pub effect: ChangeEffect,
}

/// How the value of a key differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// It was not set before.
    Added,
    /// It is not set any more, so it has its default.
    Removed,
    /// It is set otherwise.
    Changed,
}

/// When a change takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChangeEffect {
    /// For the next request after the reload.
    Reload,
    /// Only after a restart.
    Restart,
    /// Never: a flag or its variable wins over the file.
    Overridden,
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
