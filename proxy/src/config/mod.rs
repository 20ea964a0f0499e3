//! The configuration file: raw TOML, one check, then values that cannot be wrong.
//!
//! Flags win over the file, the file over the defaults. Nothing reads the environment after start-up.

mod diagnose;
mod keys;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use toml::de::{DeTable, DeValue};

pub use self::keys::{RawKey, hash_text};
use crate::admission::{Bounds, DEFAULT_MAX_REQUESTS, DEFAULT_MAX_WAIT, DEFAULT_MAX_WAITING};
use crate::engine_args::{EngineArgs, flag};
use crate::http::auth::ConfiguredKey;
use crate::http::{AccessConfig, host, origin};
use crate::plan::policy::{self, POLICIES, Policy};

/// Loopback: whoever wants to be reachable from elsewhere says so.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:8080";

/// The embedded default: small enough for any machine, with a licence that lets anyone use it.
pub const DEFAULT_MODEL: &str = "smollm2";

/// A file that is not a usable configuration. The message names the file, the line and the key.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The file is not TOML, or has an unknown key, or a value of the wrong type or out of range.
    #[error("{}: {}", path.display(), mistakes.join("; "))]
    Invalid {
        /// The file.
        path: PathBuf,
        /// All of them, each with the line and, for a value, the key.
        mistakes: Vec<String>,
    },
    /// A flag's value is out of range.
    #[error("{0}")]
    Flag(String),
}

/// A value that is out of range.
struct Problem {
    /// Where it stands in the file, with dots.
    key: String,
    /// What sets it on the command line.
    flag: String,
    /// Completes `KEY …` to a sentence.
    message: String,
}

/// The file as written; every key may be absent.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawConfig {
    /// `HOST:PORT` of the endpoint.
    pub listen: Option<String>,
    /// Requests served at once.
    pub max_requests: Option<usize>,
    /// Requests that wait to be served.
    pub max_waiting: Option<usize>,
    /// How long they wait.
    pub max_wait_seconds: Option<f64>,
    /// Keys a client must present one of. None: open.
    pub api_keys: Vec<String>,
    /// Keys with limits, by their hashes.
    pub keys: Vec<RawKey>,
    /// Let callers with different keys reuse each other's cached prompts.
    pub share_prefix_cache: Option<bool>,
    /// Origins a browser page may call from, beside localhost.
    pub allowed_origins: Vec<String>,
    /// Host names this endpoint answers to on loopback, beside its own.
    pub allowed_hosts: Vec<String>,
    /// The model.
    pub model: RawModel,
}

/// `[model]` as written.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawModel {
    /// A path, a catalogue name, or `owner/repo[:file]`.
    pub source: Option<String>,
    /// The public name.
    pub name: Option<String>,
    /// More public names.
    pub aliases: Vec<String>,
    /// Addresses of nodes that compute prompts for it.
    pub prefill: Vec<String>,
    /// How requests are planned.
    pub policy: Option<String>,
    /// Measure idle nodes and links with made-up prompts.
    pub calibrate: Option<bool>,
    /// How the engine runs it.
    pub engine: EngineArgs,
}

/// A checked configuration of `baton serve`.
#[derive(Debug, Clone)]
pub struct ServeConfig {
    /// `HOST:PORT` of the endpoint.
    pub listen: String,
    /// Requests served at once and waiting for that.
    pub bounds: Bounds,
    /// Keys without limits; none of them is empty. The API is open if there are no keys of either kind.
    pub api_keys: Vec<String>,
    /// Keys with limits.
    pub keys: Vec<ConfiguredKey>,
    /// Whether callers with different keys share cached prompts.
    pub share_prefix_cache: bool,
    /// Additional CORS origins.
    pub allowed_origins: Vec<String>,
    /// Additional host names.
    pub allowed_hosts: Vec<String>,
    /// A path, a catalogue name, or `owner/repo[:file]`.
    pub source: String,
    /// The public name, if it is not to follow from the source.
    pub name: Option<String>,
    /// More public names.
    pub aliases: Vec<String>,
    /// URLs of nodes that compute prompts for it.
    pub prefill: Vec<String>,
    /// How requests are planned.
    pub policy: &'static dyn Policy,
    /// Whether idle nodes and links are measured with made-up prompts.
    pub calibrate: bool,
    /// How the engine runs it.
    pub engine: EngineArgs,
}

impl ServeConfig {
    /// Who may call; `check_host` for a listener on loopback.
    pub fn access(&self, check_host: bool) -> AccessConfig {
        AccessConfig {
            api_keys: self.api_keys.clone(),
            keys: self.keys.clone(),
            share_prefix_cache: self.share_prefix_cache,
            check_host,
            allowed_hosts: self.allowed_hosts.clone(),
            allowed_origins: self.allowed_origins.clone(),
        }
    }

    /// Whether clients must present a key.
    pub fn needs_key(&self) -> bool {
        !self.api_keys.is_empty() || !self.keys.is_empty()
    }
}

impl RawConfig {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<RawConfig, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|error| ConfigError::Unreadable { path: path.to_owned(), error })?;
        let (raw, mut mistakes) = diagnose::parse(&text);
        mistakes.extend(raw.problems().into_iter().map(|Problem { key, message, .. }| diagnose::Mistake {
            at: position(&text, &key),
            message: format!("{key} {message}"),
        }));
        if mistakes.is_empty() {
            return Ok(raw);
        }
        mistakes.sort_by_key(|mistake| mistake.at);
        let mistakes = mistakes.iter().map(|diagnose::Mistake { at, message }| {
            let line = at.map(|at| 1 + text.bytes().take(at).filter(|&byte| byte == b'\n').count());
            line.map_or_else(|| message.clone(), |line| format!("line {line}: {message}"))
        });
        Err(ConfigError::Invalid { path: path.to_owned(), mistakes: mistakes.collect() })
    }

    /// Checks every value, after flags were laid over those of a file. A file's own were checked when it was read, so
    /// what is wrong here came with a flag.
    pub fn check(self) -> Result<ServeConfig, ConfigError> {
        if let Some(Problem { flag, message, .. }) = self.problems().into_iter().next() {
            return Err(ConfigError::Flag(format!("{flag} {message}")));
        }
        Ok(ServeConfig {
            listen: self.listen.unwrap_or_else(|| DEFAULT_LISTEN.to_owned()),
            bounds: Bounds {
                max_requests: self.max_requests.unwrap_or(DEFAULT_MAX_REQUESTS),
                max_waiting: self.max_waiting.unwrap_or(DEFAULT_MAX_WAITING),
                max_wait: self.max_wait_seconds.map_or(DEFAULT_MAX_WAIT, Duration::from_secs_f64),
            },
            api_keys: self.api_keys,
            keys: keys::checked(self.keys),
            share_prefix_cache: self.share_prefix_cache.unwrap_or(false),
            allowed_origins: self.allowed_origins,
            allowed_hosts: self.allowed_hosts,
            source: self.model.source.unwrap_or_else(|| DEFAULT_MODEL.to_owned()),
            name: self.model.name,
            aliases: self.model.aliases,
            calibrate: self.model.calibrate.unwrap_or(true),
            policy: self.model.policy.as_deref().and_then(policy::by_name).unwrap_or(POLICIES[0]),
            prefill: self.model.prefill.iter().map(|address| node_url(address)).collect(),
            engine: self.model.engine,
        })
    }

    /// Every value that is out of range.
    fn problems(&self) -> Vec<Problem> {
        let is_empty = |text: &Option<String>| text.as_ref().is_some_and(|text| text.trim().is_empty());
        let is_address = |listen: &str| {
            listen.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        };
        let mut found = Vec::new();
        let mut problem = |key: &str, flag: &str, message: String| {
            found.push(Problem { key: key.to_owned(), flag: flag.to_owned(), message });
        };
        if let Some(listen) = self.listen.as_ref().filter(|listen| !is_address(listen)) {
            problem("listen", "--listen", format!("must be HOST:PORT, e.g. {DEFAULT_LISTEN}, not {listen:?}"));
        }
        if self.max_requests.is_some_and(|n| !(1..=MAX_MAX_REQUESTS).contains(&n)) {
            problem("max_requests", "max_requests", format!("must be between 1 and {MAX_MAX_REQUESTS}"));
        }
        if self.max_waiting.is_some_and(|n| n > MAX_MAX_WAITING) {
            problem("max_waiting", "max_waiting", format!("must be at most {MAX_MAX_WAITING}"));
        }
        if self.max_wait_seconds.is_some_and(|s| !MAX_WAIT_SECONDS.contains(&s)) {
            let (least, most) = (MAX_WAIT_SECONDS.start(), MAX_WAIT_SECONDS.end());
            problem("max_wait_seconds", "max_wait_seconds", format!("must be between {least} and {most}"));
        }
        if self.api_keys.iter().any(|key| key.trim().is_empty()) {
            let message = "must not be empty: that would let everybody in who sends none";
            problem("api_keys", "--api-key", message.into());
        }
        if let Some(message) = self.allowed_origins.iter().find_map(|origin| origin::check_configured(origin).err()) {
            problem("allowed_origins", "allowed_origins", format!("has a wrong entry: {message}"));
        }
        if let Some(message) = self.allowed_hosts.iter().find_map(|name| host::check_configured(name).err()) {
            problem("allowed_hosts", "allowed_hosts", format!("has a wrong entry: {message}"));
        }
        if is_empty(&self.model.source) {
            problem("model.source", "--model", "must not be empty".into());
        }
        if is_empty(&self.model.name) {
            problem("model.name", "--name", "must not be empty".into());
        }
        if self.model.aliases.iter().any(|alias| alias.trim().is_empty()) {
            problem("model.aliases", "aliases", "must not have an empty name".into());
        }
        if let Some(name) = self.model.policy.as_ref().filter(|name| policy::by_name(name).is_none()) {
            let names = POLICIES.map(|policy| policy.name()).join(", ");
            problem("model.policy", "--policy", format!("must be one of {names}, not {name:?}"));
        }
        if let Some(address) = self.model.prefill.iter().find(|address| !is_node_address(address)) {
            let message = format!("must be HOST:PORT or a URL like http://spark.local:9000, not {address:?}");
            problem("model.prefill", "--prefill", message);
        }
        for (key, message) in self.model.engine.problems() {
            problem(&format!("model.engine.{key}"), &flag(key), message);
        }
        found.extend(keys::problems(&self.keys));
        found
    }
}

/// Each admitted request costs some kilobytes: more than these are a mistyped number.
const MAX_MAX_REQUESTS: usize = 1_000_000;

/// Whose turn it is, is looked for among all of them.
const MAX_MAX_WAITING: usize = 10_000;

/// No client waits longer.
const MAX_WAIT_SECONDS: std::ops::RangeInclusive<f64> = 0.0..=3_600.0;

/// The byte at which the value of a key begins.
fn position(text: &str, key: &str) -> Option<usize> {
    let root = DeTable::parse(text).ok()?;
    let mut table = root.get_ref();
    let mut at = None;
    for part in key.split('.') {
        let (name, index) = part.strip_suffix(']').and_then(|part| part.split_once('[')).unzip();
        // A key that is missing is missed where its table begins.
        let Some(value) = table.get(name.unwrap_or(part)) else { return at };
        let value = match index.and_then(|index| index.parse::<usize>().ok()) {
            Some(index) => value.get_ref().as_array()?.get(index)?,
            None => value,
        };
        at = Some(value.span().start);
        match value.get_ref() {
            DeValue::Table(inner) => table = inner,
            _ => return at,
        }
    }
    at
}

fn is_node_address(address: &str) -> bool {
    let url = reqwest::Url::parse(&node_url(address));
    url.is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host() && url.path() == "/")
}

/// A node's address as a URL: without a scheme it is plain HTTP.
pub fn node_url(address: &str) -> String {
    let url = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    url.trim_end_matches('/').to_owned()
}

#[cfg(test)]
mod tests;
