//! The configuration: one file, flags over it, one check, then values that cannot be wrong.
//!
//! Flags win over the file, the file over the defaults. Every mistake is reported at once, in the file and in the flags. Nothing reads the
//! environment after start-up.

mod diagnose;
pub mod engine_args;
mod file;
mod hint;
mod keys;
mod own_models;
mod problems;
mod raw;
mod schema;
pub mod transport_args;
mod upstream;

use std::path::{Path, PathBuf};

use baton_engines::upstream::UpstreamSettings;
use baton_planner::deadlines::Deadlines;
use baton_planner::policy::Policy;
use baton_schemas::sampling_fields::SamplingFields;

pub use self::file::ConfigFile;
pub(crate) use self::file::read_text;
pub use self::keys::{RawKey, hash_text};
pub use self::own_models::{LoadingConfig, OwnModelConfig, RawOwnModel};
pub use self::problems::{ConfigProblem, node_url};
pub use self::raw::{RawConfig, RawDeadlines, RawModel, RawTracing};
pub use self::upstream::RawUpstream;
use crate::config::engine_args::EngineArgs;
use crate::config::transport_args::TransportArgs;
use crate::http::AccessConfig;
use crate::http::ConfiguredKey;
use crate::request::admission::Bounds;

/// Loopback: other machines reach the endpoint only if the operator says so.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:8080";

/// Where Ollama's clients look by themselves. Not listened to unless asked: an Ollama may be running there.
pub const OLLAMA_LISTEN: &str = "127.0.0.1:11434";

/// The embedded default: small enough for any machine, with a licence that lets anyone use it.
pub const DEFAULT_MODEL: &str = "smollm2";

/// A configuration that cannot be used. The message names the file, the line and the key.
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
    /// There are mistakes in the file or the flags.
    #[error("{}", .0.lines().join("; "))]
    Mistakes(Mistakes),
    /// A file or variable changed between its check and its use.
    #[error("{0}")]
    Later(String),
}

/// Everything that is wrong.
#[derive(Debug)]
pub struct Mistakes {
    /// The file.
    pub path: Option<PathBuf>,
    /// Each with its line: it is not TOML, or has an unknown key, or a value of the wrong type or out of range, or one that
    /// cannot be used on this machine.
    pub in_file: Vec<String>,
    /// Each with its flag: a value is out of range, or cannot be used on this machine.
    pub flags: Vec<String>,
}

impl Mistakes {
    /// One line for each, `FILE: line N: …`.
    pub fn lines(&self) -> Vec<String> {
        let file = self.path.as_deref().unwrap_or(Path::new("")).display();
        let in_file = self.in_file.iter().map(|mistake| format!("{file}: {mistake}"));
        in_file.chain(self.flags.iter().cloned()).collect()
    }
}

/// A checked configuration of `baton serve`.
#[derive(Debug, Clone)]
pub struct ServeConfig {
    /// `HOST:PORT` of the endpoint.
    pub listen: String,
    /// `HOST:PORT` of a second listener with the same routes, for clients that expect Ollama at its own port.
    pub ollama_listen: Option<String>,
    /// Requests served at once and waiting for that.
    pub bounds: Bounds,
    /// Keys without limits; none of them is empty. The API is open if there are no keys of either kind.
    pub api_keys: Vec<String>,
    /// Keys with limits.
    pub keys: Vec<ConfiguredKey>,
    /// True if callers with different keys share cached prompts.
    pub share_prefix_cache: bool,
    /// Additional CORS origins.
    pub allowed_origins: Vec<String>,
    /// Additional host names.
    pub allowed_hosts: Vec<String>,
    /// A path, a catalogue name, or `owner/repo[:file]`: what this endpoint's own engine runs.
    pub source: String,
    /// True if `[model]` has an engine here. Without one, nodes generate.
    pub has_own_engine: bool,
    /// The public name, if it is not to follow from the source.
    pub name: Option<String>,
    /// More public names.
    pub aliases: Vec<String>,
    /// URLs of nodes that compute prompts.
    pub prefill: Vec<String>,
    /// URLs of nodes that generate.
    pub decode: Vec<String>,
    /// How requests are planned.
    pub policy: &'static dyn Policy,
    /// Deadlines of steps with a predicted time.
    pub deadlines: Deadlines,
    /// True if idle nodes and links are measured with made-up prompts.
    pub calibrate: bool,
    /// How nodes are reached.
    pub transport: TransportArgs,
    /// Other servers that speak text.
    pub upstreams: Vec<UpstreamSettings>,
    /// How the engine runs it.
    pub engine: EngineArgs,
    /// How tokens are drawn where a client does not say.
    pub sampling: SamplingFields,
    /// Own models that are loaded on demand.
    pub models: Vec<OwnModelConfig>,
    /// How those are loaded.
    pub loading: LoadingConfig,
    /// A collector of traces, without the path.
    pub otlp_endpoint: Option<String>,
}

impl ServeConfig {
    /// Who may call.
    pub fn access(&self) -> AccessConfig {
        AccessConfig {
            api_keys: self.api_keys.clone(),
            keys: self.keys.clone(),
            share_prefix_cache: self.share_prefix_cache,
            allowed_hosts: self.allowed_hosts.clone(),
            allowed_origins: self.allowed_origins.clone(),
        }
    }

    /// Returns true if clients must present a key.
    pub fn needs_key(&self) -> bool {
        !self.api_keys.is_empty() || !self.keys.is_empty()
    }
}

#[cfg(test)]
mod tests;
