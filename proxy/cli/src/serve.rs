//! `baton serve`: the endpoint, with an engine of its own in a child process, in front of nodes, or both.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_process::parent;
use baton_proxy::config::transport_args::found_pairing;
use baton_proxy::config::{
    API_KEY_VARIABLE, ConfigError, ConfigFile, ConfigFlags, OWN_KEY_VARIABLE, ServeConfig, engine_options,
};
use baton_proxy::log_target::NOTICE;
use baton_proxy::serve::{
    CommandFailure, ConfigSource, DRAIN_DEADLINE, Endpoint, ReadyEndpoint, check_start, local_problems, signals,
};
use baton_schemas::counted::counted;
use baton_schemas::node::ChildEvent;
use clap::Args;
use rustix::process::Signal;

use super::banner::Banner;
use super::lan_address::lan_address;
use super::log::{self, LogFormat};
use super::pair::{PairFirst, pair_first};
use super::{config_file, discover, terminal};

/// Options of `baton serve`. A flag wins over the configuration file.
#[derive(Clone, Args)]
pub(super) struct ServeArgs {
    /// Configuration file; see configs/
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: ConfigFlags,
    /// Show a code for `baton node --pair CODE`, and start when a machine has joined, or at once if this one is paired already. Then
    /// search for nodes, as with --discover
    #[arg(long, conflicts_with = "allow_plain_http")]
    pair: bool,
    /// End when standard input does, for a command that starts an endpoint of its own
    #[arg(long, hide = true)]
    pub(super) child: bool,
}

impl ServeArgs {
    /// The collector of traces that the file names. Mistakes in the file are reported later, when the command reads it.
    pub(super) fn collector(&self) -> Option<String> {
        self.config.as_ref()?;
        self.read().ok()?.check(Vec::new()).ok()?.startup.otlp_endpoint
    }

    /// The checked configuration: flags over the file over the defaults. Errors: every mistake in either.
    fn check(&self) -> Result<ServeConfig, ConfigError> {
        self.check_file(self.config.as_deref())
    }

    /// The same with another file.
    fn check_file(&self, file: Option<&Path>) -> Result<ServeConfig, ConfigError> {
        let file = self.read_file(file)?;
        let more = local_problems(&file.raw);
        file.check(more)
    }

    /// A remark about a configuration without mistakes.
    fn remark(&self) -> Option<String> {
        let model = self.read().ok()?.raw.model;
        engine_options::unused_model(model.source.is_some(), &model.engine)
    }

    fn read(&self) -> Result<ConfigFile, ConfigError> {
        self.read_file(self.config.as_deref())
    }

    fn read_file(&self, file: Option<&Path>) -> Result<ConfigFile, ConfigError> {
        let file = file.map_or_else(|| Ok(ConfigFile::default()), ConfigFile::read)?;
        let mut file = file.with_flags(&self.flags)?.with_pairing(found_pairing());
        if self.pair {
            file.raw.discover = Some(true);
        }
        if self.child {
            // An endpoint that a command starts for itself uses no file of the endpoint that serves.
            file.raw.state_folder = Some(PathBuf::new());
        }
        Ok(file)
    }
}

/// Refuses an empty key, which clap would take for no key at all.
fn refuse_an_empty_variable() -> Result<(), CommandFailure> {
    if std::env::var(OWN_KEY_VARIABLE).is_ok_and(|key| key.trim().is_empty()) {
        return Err(CommandFailure(format!("{OWN_KEY_VARIABLE} is set but empty: give it a key, or unset it")));
    }
    Ok(())
}

/// Says that the key of commands does not protect this endpoint. Errors: it has no key at all, and others can reach it.
fn tell_of_the_clients_key(config: &ServeConfig) -> Result<(), CommandFailure> {
    let is_set = std::env::var(API_KEY_VARIABLE).is_ok_and(|key| !key.trim().is_empty());
    if config.access.needs_key() || !is_set {
        return Ok(());
    }
    let remark = format!(
        "{API_KEY_VARIABLE} is the key that commands present to an endpoint, and {OWN_KEY_VARIABLE} or --api-key the one that this \
         endpoint wants to see"
    );
    let is_open = config.startup.listens().any(|address| !is_loopback(address));
    if is_open {
        return Err(CommandFailure(format!(
            "{remark}. It would need no key, and other machines can reach it: set one"
        )));
    }
    terminal::note(format_args!("baton: {remark}. This one needs no key"));
    Ok(())
}

/// Returns true for an address that only this machine reaches. A name may be another machine's.
fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// Serves until a signal stops it.
pub(super) async fn run(args: ServeArgs) -> Result<(), CommandFailure> {
    let (is_child, is_paired_first) = (args.child, args.pair);
    if is_child {
        parent::tie_to(Signal::TERM);
    }
    refuse_an_empty_variable()?;
    let mut config = args.check().map_err(config_file::print_mistakes)?;
    if !is_child {
        tell_of_the_clients_key(&config)?;
    }
    if args.pair {
        // Before the owner walks to the other machine.
        if config.startup.transport.allow_plain_http {
            return Err(CommandFailure(
                "--pair is for TLS: remove allow_plain_http = true from the configuration".into(),
            ));
        }
        check_start(&config).await?;
        pair_first(PairFirst::Admit).await?;
        // It has found the pairing now.
        config = args.check().map_err(config_file::print_mistakes)?;
    }
    if let Some(remark) = args.remark() {
        terminal::note(format_args!("baton: {remark}"));
    }
    let path = args.config.clone();
    let read = move |instead: Option<&Path>| args.check_file(instead.or(args.config.as_deref()));
    let source = ConfigSource { path, read: Arc::new(read) };
    let start = Endpoint::start(config, source);
    // Pairing has listened to signals, which now do nothing by themselves.
    let mut endpoint = if is_paired_first { signals::end_process_meanwhile(start).await? } else { start.await? };
    endpoint.drain_on_signal(print_drain);
    match endpoint.ready().await? {
        Some(ready) if is_child => {
            parent::tell(&ChildEvent::Ready { address: ready.addresses.first().copied() });
        }
        Some(ready) => print_ready(&ready),
        None => {}
    }
    endpoint.finished().await
}

/// Prints how many requests still run.
fn print_drain(n_running: usize) {
    if n_running > 0 {
        let requests = counted(n_running, "request");
        let seconds = DRAIN_DEADLINE.as_secs();
        terminal::note(format_args!("baton: finishing {requests}, for {seconds} s at most; signal again to stop now"));
    }
}

/// Prints the banner, and warns about unsafe settings.
fn print_ready(ready: &ReadyEndpoint) {
    let ReadyEndpoint { addresses, ollama, models, engine, needs_key, discovery } = ready;
    let engine = engine.as_deref();
    // Without a chat template a model only continues texts.
    let chats = engine.is_none_or(|info| info.has_chat_template);
    let Some(&address) = addresses.first() else { return };
    // Upstreams may list their models later.
    let model = models.first().map(String::as_str);
    if let (Some(model), false) = (model, chats) {
        tracing::warn!("{model} has no chat template and refuses chats: give it one with --chat-template-file FILE");
    }
    if log::format() == LogFormat::Json {
        // A log that programs read has no text for people between its lines.
        let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let (addresses, models) = (addresses.join(" "), models.join(", "));
        tracing::info!(target: NOTICE, addresses, models, needs_key, "the endpoint is ready");
        return warn_of_open_addresses(ready);
    }
    let lan = if address.ip().is_unspecified() { lan_address(address) } else { None };
    let others = models.get(1..).unwrap_or_default();
    let banner = Banner { address, lan, ollama: *ollama, model, others, engine, needs_key: *needs_key, chats };
    let text = match discovery {
        Some(discovery) => format!("{}\n\n{banner}", discover::lines(discovery)),
        None => banner.to_string(),
    };
    terminal::announce(text);
    warn_of_open_addresses(ready);
}

fn warn_of_open_addresses(ready: &ReadyEndpoint) {
    for address in ready.addresses.iter().filter(|address| !address.ip().is_loopback() && !ready.needs_key) {
        tracing::warn!(
            "anyone who can reach {address} can use this server, because it requires no key. Set api_keys or --api-key"
        );
    }
}
