//! The configuration file: raw TOML, one check, then values that cannot be wrong.
//!
//! Flags win over the file, the file over the defaults. Nothing reads the environment after start-up.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::de::DeTable;

use crate::admission::DEFAULT_MAX_REQUESTS;
use crate::engine_args::{EngineArgs, flag};
use crate::http::{host, origin};
use crate::plan::policy::{self, POLICIES, Policy};
use crate::transport_args::TransportArgs;

/// Loopback: whoever wants to be reachable from elsewhere says so.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:8080";

/// Where Ollama's clients look by themselves. Not listened to unless asked: an Ollama may be running there.
pub const OLLAMA_LISTEN: &str = "127.0.0.1:11434";

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
    #[error("{}: {message}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// With the line and, for a value, the key.
        message: String,
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
    /// `HOST:PORT` of a second listener, for Ollama's clients.
    pub ollama_listen: Option<String>,
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
    /// PEM file of CA certificates that nodes are trusted by, beside the system's.
    pub tls_ca: Option<PathBuf>,
    /// Let the cluster key and prompts travel readable between machines.
    pub allow_plain_http: bool,
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
    /// `HOST:PORT` of a second listener with the same routes, for clients that expect Ollama at its own port.
    pub ollama_listen: Option<String>,
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
    /// URLs of nodes that compute prompts for it.
    pub prefill: Vec<String>,
    /// How requests are planned.
    pub policy: &'static dyn Policy,
    /// Whether idle nodes and links are measured with made-up prompts.
    pub calibrate: bool,
    /// How nodes are reached.
    pub transport: TransportArgs,
    /// How the engine runs it.
    pub engine: EngineArgs,
}

impl RawConfig {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<RawConfig, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|error| ConfigError::Unreadable { path: path.to_owned(), error })?;
        let invalid = |at: Option<usize>, message: &str| {
            let line = at.map(|at| 1 + text.bytes().take(at).filter(|&byte| byte == b'\n').count());
            let place = line.map_or_else(String::new, |line| format!("line {line}: "));
            ConfigError::Invalid { path: path.to_owned(), message: format!("{place}{message}") }
        };
        let raw: RawConfig =
            toml::from_str(&text).map_err(|e| invalid(e.span().map(|span| span.start), e.message()))?;
        match raw.problem() {
            None => Ok(raw),
            Some(Problem { key, message, .. }) => Err(invalid(position(&text, &key), &format!("{key} {message}"))),
        }
    }

    /// Checks every value, after flags were laid over those of a file. A file's own were checked when it was read, so
    /// what is wrong here came with a flag.
    pub fn check(self) -> Result<ServeConfig, ConfigError> {
        if let Some(Problem { flag, message, .. }) = self.problem() {
            return Err(ConfigError::Flag(format!("{flag} {message}")));
        }
        Ok(ServeConfig {
            listen: self.listen.unwrap_or_else(|| DEFAULT_LISTEN.to_owned()),
            ollama_listen: self.ollama_listen,
            max_requests: self.max_requests.unwrap_or(DEFAULT_MAX_REQUESTS),
            api_keys: self.api_keys,
            share_prefix_cache: self.share_prefix_cache.unwrap_or(false),
            allowed_origins: self.allowed_origins,
            allowed_hosts: self.allowed_hosts,
            source: self.model.source.unwrap_or_else(|| DEFAULT_MODEL.to_owned()),
            name: self.model.name,
            aliases: self.model.aliases,
            calibrate: self.model.calibrate.unwrap_or(true),
            policy: self.model.policy.as_deref().and_then(policy::by_name).unwrap_or(POLICIES[0]),
            prefill: self.model.prefill.iter().map(|address| node_url(address)).collect(),
            transport: TransportArgs { tls_ca: self.tls_ca, allow_plain_http: self.allow_plain_http },
            engine: self.model.engine,
        })
    }

    /// The first value that is out of range.
    fn problem(&self) -> Option<Problem> {
        let is_empty = |text: &Option<String>| text.as_ref().is_some_and(|text| text.trim().is_empty());
        let is_address = |listen: &str| {
            listen.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        };
        let problem = |key: &str, flag: &str, message: String| {
            Some(Problem { key: key.to_owned(), flag: flag.to_owned(), message })
        };
        if let Some(listen) = self.listen.as_ref().filter(|listen| !is_address(listen)) {
            return problem("listen", "--listen", format!("must be HOST:PORT, e.g. {DEFAULT_LISTEN}, not {listen:?}"));
        }
        if let Some(listen) = self.ollama_listen.as_ref().filter(|listen| !is_address(listen)) {
            let message = format!("must be HOST:PORT, e.g. {OLLAMA_LISTEN}, not {listen:?}");
            return problem("ollama_listen", "--ollama-listen", message);
        }
        if self.max_requests.is_some_and(|n| !(1..=MAX_MAX_REQUESTS).contains(&n)) {
            return problem("max_requests", "max_requests", format!("must be between 1 and {MAX_MAX_REQUESTS}"));
        }
        if self.api_keys.iter().any(|key| key.trim().is_empty()) {
            let message = "must not be empty: that would let everybody in who sends none";
            return problem("api_keys", "--api-key", message.into());
        }
        if let Some(message) = self.allowed_origins.iter().find_map(|origin| origin::check_configured(origin).err()) {
            return problem("allowed_origins", "allowed_origins", format!("has a wrong entry: {message}"));
        }
        if let Some(message) = self.allowed_hosts.iter().find_map(|name| host::check_configured(name).err()) {
            return problem("allowed_hosts", "allowed_hosts", format!("has a wrong entry: {message}"));
        }
        if is_empty(&self.model.source) {
            return problem("model.source", "--model", "must not be empty".into());
        }
        if is_empty(&self.model.name) {
            return problem("model.name", "--name", "must not be empty".into());
        }
        if self.model.aliases.iter().any(|alias| alias.trim().is_empty()) {
            return problem("model.aliases", "aliases", "must not have an empty name".into());
        }
        if let Some(name) = self.model.policy.as_ref().filter(|name| policy::by_name(name).is_none()) {
            let names = POLICIES.map(|policy| policy.name()).join(", ");
            return problem("model.policy", "--policy", format!("must be one of {names}, not {name:?}"));
        }
        if let Some(address) = self.model.prefill.iter().find(|address| !is_node_address(address)) {
            let message = format!("must be HOST:PORT or a URL like http://spark.local:9000, not {address:?}");
            return problem("model.prefill", "--prefill", message);
        }
        let (key, message) = self.model.engine.problem()?;
        problem(&format!("model.engine.{key}"), &flag(key), message)
    }
}

/// Each admitted request costs some kilobytes: more than these are a mistyped number.
const MAX_MAX_REQUESTS: usize = 1_000_000;

/// The byte at which the value of a key begins.
fn position(text: &str, key: &str) -> Option<usize> {
    let root = DeTable::parse(text).ok()?;
    let (first, rest) = key.split_once('.').map_or((key, None), |(first, rest)| (first, Some(rest)));
    let mut value = root.get_ref().get(first)?;
    for part in rest.into_iter().flat_map(|rest| rest.split('.')) {
        value = value.get_ref().as_table().and_then(|table: &DeTable<'_>| table.get(part))?;
    }
    Some(value.span().start)
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
    fn mistakes_are_named_with_their_line_and_key() {
        let check = |text: &str, line: usize, key: &str| {
            let message = read(text).unwrap_err();
            assert!(message.contains(&format!("line {line}: ")) && message.contains(key), "{text}: {message}");
            assert!(!message.contains("--"), "no flag is at fault: {message}");
        };
        check("listen = \"127.0.0.1:1\"\n\nlisten_on = 3\n", 3, "listen_on");
        check("listen = \"8080\"", 1, "listen");
        check("# é\nlisten = \"h:99999\"", 2, "listen");
        check("ollama_listen = \"11434\"", 1, "ollama_listen");
        check("\nmax_requests = 0", 2, "max_requests");
        check("\n\napi_keys = [\"\"]", 3, "api_keys");
        check("allowed_origins = [\"chat.example.com\"]", 1, "chat.example.com");
        check("allowed_hosts = [\n\"https://x\"]", 1, "allowed_hosts");
        check("[model]\nsource = \"\"", 2, "model.source");
        check("[model]\nsource = 3", 2, "integer");
        check("[model]\n\nsauce = \"x\"", 3, "sauce");
        check("[model]\nname = \" \"", 2, "model.name");
        check("[model]\naliases = [\"\"]", 2, "model.aliases");
        check("[model.engine]\n\nslots = 0", 3, "model.engine.slots must be between 1 and 128");
        check("[model]\nengine.slots = 300", 2, "model.engine.slots");
        check("[model.engine]\nslots = -1", 2, "-1");
        check("[model.engine]\nslot = 1", 2, "slot");
        check("[model.engine]\nengine = \"sim\"\nsim_decode_tps = -1.0", 3, "sim_decode_tps");
    }

    #[test]
    fn a_wrong_flag_is_named_as_one() {
        let check = |change: fn(&mut RawConfig), flag: &str| {
            let mut raw = RawConfig::default();
            change(&mut raw);
            let message = raw.check().unwrap_err().to_string();
            assert!(message.starts_with(flag), "{message}");
        };
        check(|raw| raw.listen = Some("8080".into()), "--listen must be HOST:PORT");
        check(|raw| raw.ollama_listen = Some("x".into()), "--ollama-listen must be HOST:PORT");
        check(|raw| raw.api_keys = vec![String::new()], "--api-key ");
        check(|raw| raw.model.source = Some(String::new()), "--model ");
        check(|raw| raw.model.name = Some(String::new()), "--name ");
        check(|raw| raw.model.engine.ctx_size = Some(1), "--ctx-size must be between 64");
        check(|raw| raw.model.engine.sim_prefill_tps = Some(f64::NAN), "--sim-prefill-tps ");
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
