//! The configuration file: raw TOML, one check, then values that cannot be wrong.
//!
//! Flags win over the file, the file over the defaults. Nothing reads the environment after start-up.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::admission::DEFAULT_MAX_REQUESTS;
use crate::engine_args::EngineArgs;

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
    /// The file is not TOML, or has an unknown key or a value of the wrong type.
    #[error("{}: {message}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// With line and column.
        message: String,
    },
    /// A value is out of range, in the file or as a flag.
    #[error("{0}")]
    Value(String),
}

/// The file as written; every key may be absent.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawConfig {
    /// `HOST:PORT` of the endpoint.
    pub listen: Option<String>,
    /// Requests served at once.
    pub max_requests: Option<usize>,
    /// Keys a client must present one of. None: open.
    pub api_keys: Vec<String>,
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
    /// How the engine runs it.
    pub engine: EngineArgs,
}

/// A checked configuration of `baton serve`.
#[derive(Debug, Clone, PartialEq)]
pub struct ServeConfig {
    /// `HOST:PORT` of the endpoint.
    pub listen: String,
    /// Requests served at once, at least 1.
    pub max_requests: usize,
    /// Keys a client must present one of; empty: open. None of them is empty.
    pub api_keys: Vec<String>,
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
    /// How the engine runs it.
    pub engine: EngineArgs,
}

impl RawConfig {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<RawConfig, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|error| ConfigError::Unreadable { path: path.to_owned(), error })?;
        toml::from_str(&text).map_err(|e| {
            let line = e.span().map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            let place = line.map_or_else(String::new, |line| format!("line {line}: "));
            ConfigError::Invalid { path: path.to_owned(), message: format!("{place}{}", e.message()) }
        })
    }

    /// Checks every value.
    pub fn check(self) -> Result<ServeConfig, ConfigError> {
        let wrong = |message: &str| Err(ConfigError::Value(message.to_owned()));
        let listen = self.listen.unwrap_or_else(|| DEFAULT_LISTEN.to_owned());
        if listen.rsplit_once(':').is_none_or(|(host, port)| host.is_empty() || port.parse::<u16>().is_err()) {
            return wrong(&format!("listen = {listen:?} is not HOST:PORT, e.g. {DEFAULT_LISTEN}"));
        }
        let max_requests = self.max_requests.unwrap_or(DEFAULT_MAX_REQUESTS);
        if !(1..=1_000_000).contains(&max_requests) {
            return wrong("max_requests must be between 1 and 1000000");
        }
        if self.api_keys.iter().any(|key| key.trim().is_empty()) {
            return wrong("api_keys holds an empty key: that would let everybody in who sends none");
        }
        let source = self.model.source.unwrap_or_else(|| DEFAULT_MODEL.to_owned());
        if source.is_empty() || self.model.name.as_ref().is_some_and(String::is_empty) {
            return wrong("a model's source and name must not be empty");
        }
        Ok(ServeConfig {
            listen,
            max_requests,
            api_keys: self.api_keys,
            share_prefix_cache: self.share_prefix_cache.unwrap_or(false),
            allowed_origins: self.allowed_origins,
            allowed_hosts: self.allowed_hosts,
            source,
            name: self.model.name,
            aliases: self.model.aliases,
            engine: self.model.engine,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ServeConfig, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        RawConfig::read(file.path()).and_then(RawConfig::check).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_file_is_the_defaults() {
        let config = read("").unwrap();
        assert_eq!((config.listen.as_str(), config.source.as_str()), (DEFAULT_LISTEN, DEFAULT_MODEL));
        assert!(config.api_keys.is_empty() && !config.share_prefix_cache);
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        let unknown = read("listen = \"127.0.0.1:1\"\n\nlisten_on = 3\n").unwrap_err();
        assert!(unknown.contains("line 3") && unknown.contains("listen_on"), "{unknown}");
        for wrong in [
            "listen = \"8080\"",
            "listen = \"h:99999\"",
            "max_requests = 0",
            "api_keys = [\"\"]",
            "[model]\nsource = \"\"",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_example_is_valid() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
        let mut n_files = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            RawConfig::read(&path).and_then(RawConfig::check).unwrap_or_else(|e| panic!("{e}"));
            n_files += 1;
        }
        assert!(n_files > 0);
    }
}
