//! `baton node`: parses, and prints what happens. [`baton_node`] does it.

use std::path::PathBuf;

use baton_engines::engine_options::WrittenOptions;
use baton_link::node::ListenAddress;
use baton_node::{
    CertificateFiles, IdleTime, NodeEvent, NodeOptions, NodeTask, ReadyNode, Serves, SleepSettings, WayToRun,
};
use baton_pairing::PairingCode;
use baton_proxy::config::engine_options::{self, EngineFlags, OPTIONS_FLAG};
use baton_proxy::config::transport_args::TransportArgs;
use baton_proxy::serve::{CommandFailure, signals};
use baton_schemas::node::Role;
use clap::{Args, ValueEnum};

use super::engine_line::engine_line;
use super::pair::{PairFirst, first_machine, pair_first};
use super::terminal;

/// Options of `baton node`.
#[derive(Args)]
pub(super) struct NodeArgs {
    /// A .gguf file, a folder of safetensors (--engine mlx), a catalogue name, or OWNER/REPO[:FILE] on the Hugging Face hub [default: smollm2]
    #[arg(long, short, value_name = "PATH|NAME")]
    model: Option<PathBuf>,
    /// The model's name, which endpoints use unless they configure another [default: from the catalogue or the file]
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    name: Option<String>,
    /// HOST:PORT or unix:PATH. The cluster key comes from the environment variable BATON_CLUSTER_KEY, or from `baton pair`
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9000")]
    listen: ListenAddress,
    /// Which task the node has
    #[arg(long, value_enum, value_name = "ROLE", default_value = "both")]
    role: NodeRole,
    /// Pair this machine first, unless it is paired: join the cluster of the machine that shows this code
    #[arg(long, value_name = "CODE", conflicts_with_all = ["allow_plain_http", "child"])]
    pair: Option<PairingCode>,
    /// With --pair: the address of the machine that shows the code, instead of searching for it
    #[arg(long, value_name = "HOST[:PORT]", requires = "pair", value_parser = first_machine)]
    at: Option<String>,
    /// Speak TLS, with the certificate in this PEM file; it and the key are read again on SIGHUP
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The certificate's private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    #[command(flatten)]
    transport: TransportArgs,
    /// Announce this node in the local network, for `baton serve --discover`. A node that only this machine can reach
    /// announces nothing
    #[arg(long, value_enum, value_name = "ON|OFF", default_value = "on", help_heading = "Network")]
    announce: Announce,
    /// After this time without a request, run --sleep-command: 30m, 1h30m, or seconds
    #[arg(long, value_name = "TIME", requires = "sleep_command", conflicts_with = "child", help_heading = "Sleep")]
    sleep_after: Option<IdleTime>,
    /// Sends this machine to sleep, such as `systemctl suspend`; the shell runs it as this user
    #[arg(long, value_name = "COMMAND", requires = "sleep_after", conflicts_with = "child", help_heading = "Sleep")]
    sleep_command: Option<String>,
    /// With --role worker: lend at most so much of each device's memory [default: all that is free]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(16..=1 << 24), help_heading = "Network")]
    lend_memory: Option<u32>,
    #[command(flatten)]
    engine: EngineFlags,
    /// The engine's options as one JSON value, for a child; flags win
    #[arg(long = OPTIONS_FLAG, value_name = "JSON", hide = true, requires = "child", value_parser = engine_options::of_json)]
    engine_options: Option<WrittenOptions>,
    /// Serve at this address instead of --listen, and end when standard input does: another process restarts this one
    #[arg(long, value_name = "ADDRESS", hide = true, conflicts_with = "child")]
    kept: Option<ListenAddress>,
    /// Report on standard output, and end when standard input does
    #[arg(long, hide = true)]
    child: bool,
}

/// Whether a node announces itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Announce {
    On,
    Off,
}

/// The task of a node.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum NodeRole {
    /// Computes prompts' KV for decode nodes.
    Prefill,
    /// Generates.
    Decode,
    /// Either.
    Both,
    /// Sends decode nodes candidates for their next tokens: a small model with their vocabulary.
    Draft,
    /// Has no model: lends its devices to another node (--workers).
    Worker,
}

impl NodeArgs {
    /// Returns true if another process of Baton has started this one.
    pub(super) fn has_parent(&self) -> bool {
        self.child || self.kept.is_some()
    }

    fn way(&self) -> WayToRun {
        let has_workers = self.engine.workers.as_ref().is_some_and(|workers| !workers.is_empty());
        match (self.child, &self.kept) {
            (true, _) => WayToRun::Child,
            (false, Some(_)) => WayToRun::Kept,
            (false, None) if has_workers => WayToRun::Keeper,
            (false, None) => WayToRun::Alone,
        }
    }

    /// What is asked for, except for the pairing.
    fn options(self) -> NodeOptions {
        NodeOptions {
            way: self.way(),
            task: match self.role {
                NodeRole::Prefill => NodeTask::Engine(Role::Prefill),
                NodeRole::Decode => NodeTask::Engine(Role::Decode),
                NodeRole::Both => NodeTask::Engine(Role::Both),
                NodeRole::Draft => NodeTask::Engine(Role::Draft),
                NodeRole::Worker => NodeTask::Worker,
            },
            model: self.model,
            name: self.name,
            listen: self.kept.unwrap_or(self.listen),
            tls: self.tls_cert.zip(self.tls_key).map(|(certificate, key)| CertificateFiles { certificate, key }),
            transport: self.transport,
            announces: matches!(self.announce, Announce::On),
            sleep: self.sleep_after.zip(self.sleep_command).map(|(after, command)| SleepSettings { after, command }),
            lend_memory: self.lend_memory,
            engine: self.engine.0.or(self.engine_options.unwrap_or_default()),
        }
    }
}

/// Runs until a signal stops it.
pub(super) async fn run(mut args: NodeArgs) -> Result<(), CommandFailure> {
    // A kept process belongs to a command that is paired.
    let code = args.pair.take().filter(|_| args.kept.is_none());
    let at = args.at.take();
    let options = args.options();
    let is_paired_first = code.is_some();
    if let Some(code) = code {
        // Before the code is used up.
        baton_node::check(&options).await?;
        pair_first(PairFirst::Join { code, at }).await?;
    }
    if options.way == WayToRun::Keeper {
        return baton_node::keep(&options).await;
    }
    let start = baton_node::start(options, print);
    // Pairing has listened to signals, which now do nothing by themselves.
    let node = if is_paired_first { signals::end_process_meanwhile(start).await? } else { start.await? };
    node.finished().await
}

fn print(event: NodeEvent) {
    match event {
        NodeEvent::Remark(remark) => terminal::note(format_args!("baton node: {remark}")),
        NodeEvent::WaitsForWorker { worker, reason } => {
            terminal::note(format_args!("baton node: waits for the worker {worker}: {reason}"));
        }
        NodeEvent::CertificateRead => terminal::note("baton node: the certificate was read again"),
        NodeEvent::Ready(ready) => print_ready(&ready),
    }
}

fn print_ready(ready: &ReadyNode) {
    if let Some(address) = ready.address {
        terminal::note(format_args!("baton node is ready on {address}"));
        if ready.is_paired && address.ip().to_canonical().is_loopback() {
            terminal::note("Only this machine can reach it: --listen 0.0.0.0:9000 lets the cluster find it");
        }
    }
    match &ready.serves {
        Serves::Engine(Some(info)) if ready.address.is_some() => {
            terminal::note(format_args!("with {}", engine_line(info)));
        }
        Serves::Engine(_) => {}
        Serves::Devices(devices) => terminal::note(format_args!("It lends {}", devices.join(", "))),
    }
}
