//! The checked configuration of `baton serve`, in parts by what a reload does with them.

use std::collections::BTreeSet;
use std::path::PathBuf;

use baton_engines::engine_options::WrittenOptions;
use baton_planner::deadlines::Deadlines;
use baton_planner::policy::PolicyName;
use baton_schemas::sampling_fields::SamplingFields;
use baton_upstream::UpstreamSettings;

use super::adoption::AdoptionConfig;
use super::on_demand_models::{LoadingConfig, OnDemandModelConfig};
use super::transport_args::TransportArgs;
use super::wake::NodeWake;
use crate::admission::AdmissionLimits;
use crate::http::AccessConfig;
use crate::observe::WrittenSetting;

/// A checked configuration of `baton serve`.
#[derive(Debug, Clone)]
pub struct ServeConfig {
    /// Settings that only a restart changes.
    pub startup: StartupConfig,
    /// Keys, hosts and origins of accepted requests.
    pub access: AccessConfig,
    /// Requests served at once and waiting for that.
    pub admission: AdmissionLimits,
    /// The public name of `[model]`, if it is not to follow from the source.
    pub name: Option<String>,
    /// More public names.
    pub aliases: Vec<String>,
    /// Sampling defaults for requests that set none.
    pub sampling: SamplingFields,
    /// The engines of `[model]`, and how requests are routed to them.
    pub routing: RoutingConfig,
    /// Upstreams.
    pub upstreams: Vec<UpstreamSettings>,
    /// The search for other servers.
    pub adoption: AdoptionConfig,
    /// Models that are loaded on demand.
    pub models: Vec<OnDemandModelConfig>,
    /// Limits for loading models on demand.
    pub loading: LoadingConfig,
    /// The settings of the file and the flags, for operators.
    pub written: Vec<WrittenSetting>,
    /// Keys of the file that have no effect, because their flags are given.
    pub overridden: Vec<String>,
}

impl ServeConfig {
    /// The folders in which its engines keep KV.
    pub fn store_folders(&self) -> BTreeSet<PathBuf> {
        let engines = self.models.iter().map(|model| &model.engine).chain([&self.startup.engine]);
        engines.filter_map(|engine| engine.kv_store.as_ref()?.disk.clone()).collect()
    }
}

/// Settings that only a restart changes. A reload keeps the old ones and names the keys that changed.
#[derive(Debug, Clone, PartialEq)]
pub struct StartupConfig {
    /// `HOST:PORT` of the endpoint.
    pub listen: String,
    /// `HOST:PORT` of a second listener with the same routes, for clients that expect Ollama at its own port.
    pub ollama_listen: Option<String>,
    /// How nodes are reached.
    pub transport: TransportArgs,
    /// Nodes are searched for in the local network.
    pub discover: bool,
    /// A path, a catalogue name, or `owner/repo[:file]`: what this endpoint's own engine runs.
    pub source: String,
    /// How the engine runs it.
    pub engine: WrittenOptions,
    /// A collector of traces, without the path.
    pub otlp_endpoint: Option<String>,
    /// A folder for what outlives the process. Empty: none is used. `None`: the system's, if there is one.
    pub state_folder: Option<PathBuf>,
}

impl StartupConfig {
    /// Every `HOST:PORT` that it listens at.
    pub fn listens(&self) -> impl Iterator<Item = &str> {
        [self.listen.as_str()].into_iter().chain(self.ollama_listen.as_deref())
    }

    /// The keys whose values differ, by their names in the file.
    pub fn changed_keys(&self, other: &StartupConfig) -> Vec<&'static str> {
        let StartupConfig { listen, ollama_listen, transport, discover, source, engine, otlp_endpoint, state_folder } =
            self;
        let allows_plain_http = transport.allow_plain_http;
        let is_paired_otherwise = transport.paired != other.transport.paired;
        changed(&[
            ("listen", *listen != other.listen),
            ("ollama_listen", *ollama_listen != other.ollama_listen),
            ("tls_ca", transport.tls_ca != other.transport.tls_ca),
            ("allow_plain_http", allows_plain_http != other.transport.allow_plain_http),
            // No key: the command finds it, unless plain HTTP is allowed.
            ("pairing", is_paired_otherwise && allows_plain_http == other.transport.allow_plain_http),
            ("discover", *discover != other.discover),
            ("model.source", *source != other.source),
            ("model.engine", *engine != other.engine),
            ("tracing.otlp_endpoint", *otlp_endpoint != other.otlp_endpoint),
            ("state_folder", *state_folder != other.state_folder),
        ])
    }
}

/// The engines of `[model]`, and how requests are routed to them. Changes together or not at all.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutingConfig {
    /// True if `[model]` has an engine here. Without one, nodes generate.
    pub has_own_engine: bool,
    /// URLs of nodes that compute prompts.
    pub prefill: Vec<String>,
    /// URLs of nodes that generate.
    pub decode: Vec<String>,
    /// How requests are planned.
    pub policy: PolicyName,
    /// Deadlines of steps with a predicted time.
    pub deadlines: Deadlines,
    /// True if idle nodes and links are measured with made-up prompts.
    pub calibrate: bool,
    /// Nodes whose machines can be woken.
    pub wake: Vec<NodeWake>,
}

impl RoutingConfig {
    /// The keys whose values differ, by their names in the file.
    pub fn changed_keys(&self, other: &RoutingConfig) -> Vec<&'static str> {
        let RoutingConfig { has_own_engine, prefill, decode, policy, deadlines, calibrate, wake } = self;
        changed(&[
            ("model.source", *has_own_engine != other.has_own_engine),
            ("model.prefill", *prefill != other.prefill),
            ("model.decode", *decode != other.decode),
            ("model.policy", *policy != other.policy),
            ("deadlines", *deadlines != other.deadlines),
            ("model.calibrate", *calibrate != other.calibrate),
            ("wake", *wake != other.wake),
        ])
    }
}

fn changed(keys: &[(&'static str, bool)]) -> Vec<&'static str> {
    keys.iter().filter_map(|(key, has_changed)| has_changed.then_some(*key)).collect()
}
