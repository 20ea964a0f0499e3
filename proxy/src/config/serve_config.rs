//! The checked configuration of `baton serve`.

use baton_engines::upstream::UpstreamSettings;
use baton_planner::deadlines::Deadlines;
use baton_planner::policy::Policy;
use baton_schemas::sampling_fields::SamplingFields;

use super::engine_args::EngineArgs;
use super::own_models::{LoadingConfig, OwnModelConfig};
use super::transport_args::TransportArgs;
use crate::http::{AccessConfig, ConfiguredKey};
use crate::request::admission::Bounds;

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
