//! The file as it is written, and its conversion into the checked configuration.
//!
//! A new key is a field here, with its range and its flag if it has one (the range is compared with the file; a flag's range
//! is checked in `problems.rs`), and a field of [`ServeConfig`] or of one of its
//! parts. Rules between keys and forms of texts are checked in `problems.rs`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_planner::deadlines::Deadlines;
use baton_planner::policy::PolicyName;
use baton_schemas::sampling_fields::SamplingFields;
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use schemars::JsonSchema;
use serde::Deserialize;

use super::adoption::{self, AdoptionConfig};
use super::defaults::{DEFAULT_LISTEN, DEFAULT_MODEL, OWN_KEY_VARIABLE};
use super::engine_options::{self, EngineFlags};
use super::error::ConfigError;
use super::keys::{self, RawKey};
use super::on_demand_models::{self, RawLoading, RawOnDemandModel};
use super::serve_config::{RoutingConfig, ServeConfig, StartupConfig};
use super::transport_args::TransportArgs;
use super::upstream::{self, RawUpstream};
use super::wake::{self, RawWake};
use crate::admission::{AdmissionLimits, DEFAULT_MAX_WAIT, DEFAULT_MAX_WAITING};
use crate::http::AccessConfig;
use crate::request::kv_loss::LossyKv;

/// Each admitted request costs some kilobytes: a larger number is mistyped.
const MAX_MAX_REQUESTS: u32 = 1_000_000;

/// Admission searches all waiting requests for the next one.
const MAX_MAX_WAITING: u32 = 10_000;

/// Longer than clients wait.
const MAX_WAIT_SECONDS: u32 = 3_600;

/// A shorter deadline would fail in any busy moment; a longer one is longer than clients wait.
const MIN_DEADLINE_MS: u32 = 100;
const MAX_DEADLINE_MS: u32 = 3_600_000;

/// The smallest factor is 1: with a smaller one, a correct prediction would miss its deadline.
const MAX_DEADLINE_FACTOR: u32 = 1_000;

/// Groups of flags in the help. The ten common ones have none, and stand first.
const ENDPOINT: &str = "Endpoint";
const NETWORK: &str = "Network";

/// The file as written; every key may be absent. A field with `#[arg(long)]` has a flag, too. Not `Debug`: it holds keys.
#[derive(Default, Args, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RawConfig {
    /// The address of the endpoint [default: 127.0.0.1:8080]
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// A second address with the same routes, for clients that expect Ollama at its own port: 127.0.0.1:11434
    #[arg(long, value_name = "HOST:PORT", help_heading = ENDPOINT)]
    pub ollama_listen: Option<String>,
    /// The most places of all models and upstreams: replies generated at once.
    #[arg(skip)]
    #[schemars(range(min = 1, max = MAX_MAX_REQUESTS))]
    pub max_requests: Option<usize>,
    /// Requests in the queue at once.
    #[arg(skip)]
    #[schemars(range(max = MAX_MAX_WAITING))]
    pub max_waiting: Option<usize>,
    /// Maximum wait in the queue, in seconds.
    #[arg(skip)]
    #[schemars(range(min = 0, max = MAX_WAIT_SECONDS))]
    pub max_wait_seconds: Option<f64>,
    /// A key clients must present; repeat for several. Better in the configuration file: arguments show in `ps`
    #[arg(long = "api-key", value_name = "KEY", env = OWN_KEY_VARIABLE, hide_env_values = true)]
    #[schemars(extend("x-secret" = true))]
    pub api_keys: Vec<String>,
    /// Keys with limits, by their hashes.
    #[arg(skip)]
    #[schemars(extend("x-secret" = true))]
    pub keys: Vec<RawKey>,
    /// Let callers with different keys reuse each other's cached prompts.
    #[arg(skip)]
    pub share_prefix_cache: Option<bool>,
    /// The KV of requests that name none.
    #[arg(skip)]
    pub lossy_kv: Option<LossyKv>,
    /// Origins of web pages that may call, in addition to localhost.
    #[arg(skip)]
    pub allowed_origins: Vec<String>,
    /// Host names that a loopback listener answers to, in addition to this machine's own.
    #[arg(skip)]
    pub allowed_hosts: Vec<String>,
    /// Let operators pull, copy and delete models on all machines over HTTP; without API keys, let everybody
    #[arg(long, num_args = 0, default_missing_value = "true", help_heading = ENDPOINT)]
    pub allow_model_management: Option<bool>,
    /// Trust the CA certificates in this PEM file for nodes at https://, in addition to the system's
    #[arg(long, value_name = "FILE", help_heading = NETWORK)]
    pub tls_ca: Option<PathBuf>,
    /// Allow plain HTTP: the cluster key, prompts and KV are sent unencrypted. Only on a trusted network
    #[arg(long, num_args = 0, default_missing_value = "true", help_heading = NETWORK)]
    pub allow_plain_http: Option<bool>,
    /// Use the nodes in the local network that prove the cluster key (`baton node` announces itself). Without a model here, no
    /// engine is started here; needs a pairing or BATON_CLUSTER_KEY
    #[arg(long, num_args = 0, default_missing_value = "true")]
    pub discover: Option<bool>,
    /// Use other servers on this machine and on paired ones as upstreams: Ollama, LM Studio, llama-server, vLLM, mlx_lm.server, another
    /// Baton. Without a model here, no engine is started here
    #[arg(long, num_args = 0, default_missing_value = "true", help_heading = ENDPOINT)]
    pub adopt: Option<bool>,
    /// Use the servers on this machine of the network, too; repeat for several. Needs --allow-plain-http
    #[arg(long = "adopt-host", value_name = "HOST[:PORT]", help_heading = ENDPOINT)]
    pub adopt_hosts: Vec<String>,
    /// Names for models of upstreams: `UPSTREAM/MODEL` each.
    #[arg(skip)]
    pub aliases: BTreeMap<String, Vec<String>>,
    /// A folder for what outlives the process: the usage of keys. "" for none [default: the system's, if it exists]
    #[arg(long, value_name = "FOLDER", value_parser = OsStringValueParser::new().map(PathBuf::from), help_heading = ENDPOINT)]
    pub state_folder: Option<PathBuf>,
    /// The folder of this machine's pairing. No key of the file: the command finds it.
    #[arg(skip)]
    #[serde(skip)]
    pub paired: Option<PathBuf>,
    /// Deadlines of steps with a predicted time.
    #[arg(skip)]
    pub deadlines: RawDeadlines,
    /// The model.
    #[command(flatten)]
    pub model: RawModel,
    /// Models that are loaded on demand.
    #[arg(skip)]
    pub models: Vec<RawOnDemandModel>,
    /// Limits for loading models on demand.
    #[arg(skip)]
    pub loading: RawLoading,
    /// Upstreams.
    #[arg(skip)]
    pub upstream: Vec<RawUpstream>,
    /// Nodes whose machines sleep.
    #[arg(skip)]
    pub wake: Vec<RawWake>,
    /// Trace export.
    #[arg(skip)]
    pub tracing: RawTracing,
}

/// `[deadlines]` as written.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RawDeadlines {
    /// No deadline is shorter.
    #[schemars(range(min = MIN_DEADLINE_MS, max = MAX_DEADLINE_MS))]
    pub floor_ms: Option<u64>,
    /// Deadline ÷ prediction.
    #[schemars(range(min = 1, max = MAX_DEADLINE_FACTOR))]
    pub factor: Option<f64>,
    /// No deadline is longer.
    #[schemars(range(min = MIN_DEADLINE_MS, max = MAX_DEADLINE_MS))]
    pub max_ms: Option<u64>,
    /// Start a second route when the first token is late.
    pub hedge: Option<bool>,
}

impl RawDeadlines {
    /// Fills in the defaults.
    pub(super) fn typed(&self) -> Deadlines {
        let defaults = Deadlines::default();
        Deadlines {
            floor: self.floor_ms.map_or(defaults.floor, Duration::from_millis),
            factor: self.factor.unwrap_or(defaults.factor),
            max: self.max_ms.map_or(defaults.max, Duration::from_millis),
            hedge: self.hedge.unwrap_or(defaults.hedge),
        }
    }
}

/// `[tracing]` as written.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RawTracing {
    /// A collector's address for OTLP over HTTP.
    pub otlp_endpoint: Option<String>,
}

/// `[model]` as written.
#[derive(Debug, Default, Args, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RawModel {
    /// A .gguf file, a catalogue name, or OWNER/REPO or OWNER/REPO:FILE on the Hugging Face hub [default: smollm2]
    #[arg(long = "model", short = 'm', value_name = "PATH|NAME", display_order = 0)]
    pub source: Option<String>,
    /// The model's public name [default: from the model]
    #[arg(long, value_name = "NAME", help_heading = ENDPOINT)]
    pub name: Option<String>,
    /// More public names.
    #[arg(skip)]
    pub aliases: Vec<String>,
    /// A node that generates (`baton node --role decode` or `both`); without a scheme http://, on a paired machine https://; repeat
    /// for several. Without a model here, no engine is started here; needs a pairing or BATON_CLUSTER_KEY
    #[arg(long, alias = "node", value_name = "HOST:PORT|URL")]
    pub decode: Vec<String>,
    /// A node that computes prompts or drafts for others (`baton node --role prefill` or `draft`); without a scheme http://, on a paired machine https://; repeat
    /// for several; needs a pairing or BATON_CLUSTER_KEY
    #[arg(long, value_name = "HOST:PORT|URL")]
    pub prefill: Vec<String>,
    /// Do not measure idle nodes and links with made-up prompts; rates are learned from requests alone
    #[arg(long = "no-calibration", num_args = 0, default_missing_value = "false", help_heading = ENDPOINT)]
    pub calibrate: Option<bool>,
    /// How requests are planned: fastest, always_handoff, direct, round_robin, least_loaded [default: fastest]
    #[arg(long, value_name = "NAME", help_heading = ENDPOINT)]
    pub policy: Option<String>,
    /// Sampling defaults for requests that set none.
    #[arg(skip)]
    pub sampling: SamplingFields,
    /// How the engine runs it.
    #[command(flatten)]
    pub engine: EngineFlags,
}

impl RawModel {
    /// Returns true if the table names an engine to start here.
    fn names_an_engine(&self) -> bool {
        self.source.is_some() || self.engine.engine.is_some()
    }
}

impl RawConfig {
    /// Returns true if an engine is started here for `[model]`: if the table names a model or an engine, or if nothing else
    /// generates.
    pub fn has_own_engine(&self) -> bool {
        let others = self.model.decode.len() + self.upstream.len() + self.models.len();
        let searches = self.discover.unwrap_or(false) || self.adopts();
        self.model.names_an_engine() || (others == 0 && !searches)
    }

    /// Returns true if other servers are looked for.
    pub(super) fn adopts(&self) -> bool {
        self.adopt.unwrap_or(false) || !self.adopt_hosts.is_empty()
    }

    /// Takes relative paths from this folder.
    pub(super) fn resolve(&mut self, folder: &Path) {
        let of_models = self.models.iter_mut().map(|own| &mut own.engine);
        of_models.chain([&mut self.model.engine.0]).for_each(|options| engine_options::resolve(options, folder));
        let of_upstreams = self.upstream.iter_mut().map(|upstream| &mut upstream.key_file);
        // An empty path is no folder.
        let state = self.state_folder.as_mut().filter(|folder| !folder.as_os_str().is_empty());
        for path in of_upstreams.chain([&mut self.tls_ca]).flatten().chain(state) {
            *path = folder.join(&*path);
        }
        let sources = self.model.source.iter_mut().chain(self.models.iter_mut().map(|own| &mut own.source));
        for source in sources.filter(|source| names_a_file(source)) {
            // A path that is no UTF-8 stays relative to the working directory.
            if let Some(path) = folder.join(&*source).to_str() {
                *source = path.to_owned();
            }
        }
    }

    /// How nodes and upstreams are reached.
    pub(crate) fn transport(&self) -> TransportArgs {
        let allow_plain_http = self.allow_plain_http.unwrap_or(false);
        let paired = self.paired.clone().filter(|_| !allow_plain_http);
        TransportArgs { tls_ca: self.tls_ca.clone(), allow_plain_http, paired }
    }

    /// The checked values. Errors: a key of an upstream can no longer be read.
    pub(super) fn typed(self) -> Result<ServeConfig, ConfigError> {
        let has_own_engine = self.has_own_engine();
        let transport = self.transport();
        let urls =
            |addresses: &[String]| addresses.iter().map(|address| transport.node_url(address)).collect::<Vec<_>>();
        let prefill = urls(&self.model.prefill);
        let decode = urls(&self.model.decode);
        let aliases = adoption::aliases(&self.aliases);
        let upstreams = upstream::checked(&self.upstream, &aliases)?;
        let wake = wake::checked(&self.wake, &transport);
        Ok(ServeConfig {
            startup: StartupConfig {
                listen: self.listen.unwrap_or_else(|| DEFAULT_LISTEN.to_owned()),
                ollama_listen: self.ollama_listen,
                transport,
                discover: self.discover.unwrap_or(false),
                source: self.model.source.unwrap_or_else(|| DEFAULT_MODEL.to_owned()),
                engine: self.model.engine.0,
                otlp_endpoint: self.tracing.otlp_endpoint,
                state_folder: self.state_folder,
            },
            admission: AdmissionLimits {
                max_requests: self.max_requests,
                max_waiting: self.max_waiting.unwrap_or(DEFAULT_MAX_WAITING),
                max_wait: self.max_wait_seconds.map_or(DEFAULT_MAX_WAIT, Duration::from_secs_f64),
            },
            access: AccessConfig {
                api_keys: self.api_keys,
                keys: keys::checked(self.keys),
                scope_key: None,
                share_prefix_cache: self.share_prefix_cache.unwrap_or(false),
                allowed_origins: self.allowed_origins,
                allowed_hosts: self.allowed_hosts,
                allow_model_management: self.allow_model_management.unwrap_or(false),
                lossy_kv: self.lossy_kv.unwrap_or_default(),
            },
            name: self.model.name,
            aliases: self.model.aliases,
            sampling: self.model.sampling,
            routing: RoutingConfig {
                has_own_engine,
                prefill,
                decode,
                policy: self.model.policy.as_deref().and_then(PolicyName::parse).unwrap_or_default(),
                deadlines: self.deadlines.typed(),
                calibrate: self.model.calibrate.unwrap_or(true),
                wake,
            },
            upstreams,
            adoption: AdoptionConfig { adopts: self.adopt.unwrap_or(false), hosts: self.adopt_hosts, aliases },
            models: on_demand_models::checked(self.models),
            loading: self.loading.typed(),
            written: Vec::new(),
            overridden: Vec::new(),
        })
    }
}

/// Returns true if a model's source is a path, and not a name of the catalogue or a hub.
fn names_a_file(source: &str) -> bool {
    let is_gguf = Path::new(source).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    source.starts_with("./") || source.starts_with("../") || (is_gguf && !source.contains(':'))
}
