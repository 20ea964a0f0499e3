//! `baton doctor`: what this machine computes on, and whether KV really moves between its devices and from other nodes.
//!
//! A node is started on every device, twice: one computes prompts, the other takes their KV and generates, and its
//! replies are compared with those that it gives alone. Nothing outlives the command. `docs/backends.md` explains it.

mod compare;
mod examine;
mod report;

use baton_proxy::config::transport_args::TransportArgs;
use baton_proxy::serve::{CommandFailure, signals};
use clap::Args;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use self::examine::Examination;

/// Options of `baton doctor`.
#[derive(Args)]
pub(super) struct DoctorArgs {
    /// A .gguf file or a catalogue name
    #[arg(long, short, default_value = "smollm2")]
    model: String,
    /// Tokens of each prompt
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(16..=8_192))]
    tokens: u32,
    /// Tokens that are generated and compared
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(2..=512))]
    new_tokens: u32,
    /// Compute threads of each node [default: one per core]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=512))]
    threads: Option<u32>,
    /// Try these devices only, by name and by commas [default: cpu and every GPU]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    devices: Vec<String>,
    /// Also take KV from this node on another machine; needs BATON_CLUSTER_KEY; repeat for several
    #[arg(long, value_name = "HOST:PORT|URL")]
    prefill: Vec<String>,
    #[command(flatten)]
    transport: TransportArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs every check; a signal ends it, and every process it started, at once.
pub(super) async fn run(args: DoctorArgs) -> Result<(), CommandFailure> {
    let stop = CancellationToken::new();
    signals::stop_on_signal(stop.clone());
    tokio::select! {
        done = check(args) => done,
        () = stop.cancelled() => Err(CommandFailure("stopped".into())),
    }
}

#[allow(clippy::print_stdout, reason = "the report is the command's result")]
async fn check(args: DoctorArgs) -> Result<(), CommandFailure> {
    let json = args.json;
    let report = Examination::begin(args).await?.complete().await?;
    match json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => print!("{report}"),
    }
    match report.n_failed() {
        0 => Ok(()),
        n => Err(CommandFailure(format!("{n} of the checks failed"))),
    }
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "verdict", content = "why")]
enum Verdict {
    /// Equal to the bit.
    Exact,
    /// As close as different kernels are.
    Close,
    /// Wrong, or it did not work.
    Failed(String),
}
