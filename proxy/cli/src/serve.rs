//! `baton serve`: the endpoint, with an engine of its own in a child process, in front of nodes, or both.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;

use baton_proxy::config::engine_args::EngineArgs;
use baton_proxy::config::transport_args::TransportArgs;
use baton_proxy::config::{ConfigError, ConfigFile, ServeConfig};
use baton_proxy::serve::{CommandFailure, ConfigSource, DRAIN_DEADLINE, Endpoint, ReadyEndpoint, local_problems};
use clap::Args;

use super::banner::Banner;
use super::{config_file, terminal};

/// The environment variable of `--api-key`.
pub(super) const API_KEY_VARIABLE: &str = "BATON_API_KEY";

/// Options of `baton serve`. A flag wins over the configuration file.
#[derive(Clone, Args)]
pub(super) struct ServeArgs {
    /// Configuration file; see configs/
    #[arg(long, short, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// A .gguf file, a catalogue name, or OWNER/REPO[:FILE] on the Hugging Face hub [default: smollm2]
    #[arg(long, short, value_name = "PATH|NAME")]
    model: Option<String>,
    /// The address of the endpoint [default: 127.0.0.1:8080]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// A second address with the same routes, for clients that expect Ollama at its own port: 127.0.0.1:11434
    #[arg(long, value_name = "HOST:PORT")]
    ollama_listen: Option<String>,
    /// The model's public name [default: from the model]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// A key clients must present; repeat for several. Better in the configuration file: arguments show in `ps`
    #[arg(long = "api-key", value_name = "KEY", env = API_KEY_VARIABLE, hide_env_values = true)]
    api_keys: Vec<String>,
    /// A node that generates (`baton node --role decode` or `both`), http:// if no scheme is given; repeat for several.
    /// Without a model here, no engine is started here; needs BATON_CLUSTER_KEY
    #[arg(long, alias = "node", value_name = "HOST:PORT|URL")]
    decode: Vec<String>,
    /// A node that computes prompts (`baton node --role prefill`), http:// if no scheme is given; repeat for several;
    /// needs BATON_CLUSTER_KEY
    #[arg(long, value_name = "HOST:PORT|URL")]
    prefill: Vec<String>,
    /// Do not measure idle nodes and links with made-up prompts; rates are learned from requests alone
    #[arg(long)]
    no_calibration: bool,
    /// How requests are planned: fastest, always_handoff, direct, round_robin, least_loaded [default: fastest]
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    #[command(flatten)]
    transport: TransportArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

impl ServeArgs {
    /// The collector of traces that the file names. Mistakes in the file are reported later, when the command reads it.
    pub(super) fn collector(&self) -> Option<String> {
        self.config.as_ref()?;
        let (file, by_flags) = self.clone().read().ok()?;
        file.check(&by_flags, Vec::new()).ok()?.otlp_endpoint
    }

    /// The checked configuration: flags over the file over the defaults. Errors: every mistake in either.
    pub(super) fn into_config(self) -> Result<ServeConfig, ConfigError> {
        let (file, by_flags) = self.read()?;
        let more = local_problems(&file.raw);
        file.check(&by_flags, more)
    }

    /// The file with the flags over it, and the keys that these set.
    fn read(self) -> Result<(ConfigFile, BTreeSet<String>), ConfigError> {
        let mut file = self.config.as_deref().map_or_else(|| Ok(ConfigFile::default()), ConfigFile::read)?;
        let raw = &mut file.raw;
        let mut by_flags = BTreeSet::new();
        let mut set = |key: &str, is_given: bool| {
            if is_given {
                by_flags.insert(key.to_owned());
            }
            is_given
        };
        for (key, flag, value) in [
            ("listen", self.listen, &mut raw.listen),
            ("ollama_listen", self.ollama_listen, &mut raw.ollama_listen),
            ("model.source", self.model, &mut raw.model.source),
            ("model.name", self.name, &mut raw.model.name),
            ("model.policy", self.policy, &mut raw.model.policy),
        ] {
            if set(key, flag.is_some()) {
                *value = flag;
            }
        }
        for (key, flag, value) in [
            ("api_keys", self.api_keys, &mut raw.api_keys),
            ("model.prefill", self.prefill, &mut raw.model.prefill),
            ("model.decode", self.decode, &mut raw.model.decode),
        ] {
            if set(key, !flag.is_empty()) {
                *value = flag;
            }
        }
        if set("tls_ca", self.transport.tls_ca.is_some()) {
            raw.tls_ca = self.transport.tls_ca;
        }
        raw.allow_plain_http |= self.transport.allow_plain_http;
        raw.model.calibrate = self.no_calibration.then_some(false).or(raw.model.calibrate);
        for key in self.engine.keys() {
            set(&format!("model.engine.{key}"), true);
        }
        raw.model.engine = self.engine.over(std::mem::take(&mut raw.model.engine));
        Ok((file, by_flags))
    }
}

/// Refuses an empty key, which clap would take for no key at all.
fn refuse_an_empty_variable() -> Result<(), CommandFailure> {
    if std::env::var(API_KEY_VARIABLE).is_ok_and(|key| key.trim().is_empty()) {
        return Err(CommandFailure(format!("{API_KEY_VARIABLE} is set but empty: give it a key, or unset it")));
    }
    Ok(())
}

/// Serves until a signal stops it.
pub(super) async fn run(args: ServeArgs) -> Result<(), CommandFailure> {
    refuse_an_empty_variable()?;
    let config = args.clone().into_config().map_err(config_file::print_mistakes)?;
    let source = ConfigSource { path: args.config.clone(), read: Arc::new(move || args.clone().into_config()) };
    let mut endpoint = Endpoint::start(config, source).await?;
    endpoint.drain_on_signal(print_drain);
    if let Some(ready) = endpoint.ready().await? {
        print_ready(&ready);
    }
    endpoint.finished().await
}

/// Prints how many requests still run.
fn print_drain(n_running: usize) {
    if n_running > 0 {
        let requests = if n_running == 1 { "request" } else { "requests" };
        let seconds = DRAIN_DEADLINE.as_secs();
        terminal::note(format_args!(
            "baton: finishing {n_running} {requests}, for {seconds} s at most; signal again to stop now"
        ));
    }
}

/// Prints the banner, and warns about unsafe settings.
fn print_ready(ready: &ReadyEndpoint) {
    let ReadyEndpoint { addresses, models, takes_chats: chats, needs_key } = ready;
    let Some(&address) = addresses.first() else { return };
    // Upstreams may list their models later.
    let model = models.first().map_or("upstreams", String::as_str);
    if !chats {
        tracing::warn!("{model} has no chat template and refuses chats: give it one with --chat-template-file FILE");
    }
    let lan = if address.ip().is_unspecified() { lan_address(address) } else { None };
    let banner =
        Banner { address, lan, ollama: addresses.get(1).copied(), model, needs_key: *needs_key, chats: *chats };
    let mut text = banner.to_string();
    let others = models.get(1..).unwrap_or_default();
    if !others.is_empty() {
        text += &format!("\nOther models: {}", others.join(", "));
    }
    if let Err(error) = terminal::print_line(text) {
        tracing::debug!(%error, "the ready message could not be written: standard output is closed");
    }
    for address in addresses.iter().filter(|address| !address.ip().is_loopback() && !needs_key) {
        tracing::warn!(
            "anybody who can reach {address} can use this server, because it asks for no key. Set api_keys or --api-key"
        );
    }
}

/// This machine's address in its network, which the system chooses for a packet to another machine. Nothing is sent.
fn lan_address(listening: SocketAddr) -> Option<IpAddr> {
    // Addresses reserved for documentation (RFC 5737 and 3849), so never in use.
    let (any, elsewhere) = match listening {
        SocketAddr::V4(_) => ("0.0.0.0:0", "192.0.2.1:9"),
        SocketAddr::V6(_) => ("[::]:0", "[2001:db8::1]:9"),
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(elsewhere).ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}
