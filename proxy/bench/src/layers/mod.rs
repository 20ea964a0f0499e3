//! `baton-bench layers`: the first token of prompts of which a worker computes the first layers, by their number, and the memory that
//! both sides take for the weights. `--simulate` computes it for published machines instead ([`simulated`]).
//!
//! A real endpoint and a real worker run on this machine, each with one thread of computing. Times are those of a client.

#[cfg(feature = "llama")]
mod measured;
mod simulated;

use baton_proxy::serve::CommandFailure;
use clap::Args;

use super::report::{ChartFolder, Destination, ReportFiles};

/// Options of `baton-bench layers`.
#[derive(Args)]
pub(super) struct LayersBenchArgs {
    /// A .gguf file or a catalogue name
    #[arg(long, short, default_value = "smollm2")]
    model: String,
    /// Numbers of lent layers, by commas; 0 is the machine alone [default: 0 to all in six steps]
    #[arg(long, value_delimiter = ',')]
    lent: Vec<u32>,
    /// Prompt lengths in tokens, by commas
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [2_000, 8_000],
        value_parser = clap::value_parser!(u32).range(64..=100_000)
    )]
    lengths: Vec<u32>,
    /// Repetitions; medians are reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Leave out `--lend-layers auto`, whose choice takes minutes
    #[arg(long)]
    no_auto: bool,
    /// Measure nothing: compute it for a DGX Spark and an M3 Ultra, by their published rates
    #[arg(long, conflicts_with_all = ["model", "lent", "lengths", "rounds", "no_auto"])]
    simulate: bool,
    #[command(flatten)]
    files: ReportFiles,
}

/// Runs the benchmark.
pub(super) async fn run(args: LayersBenchArgs) -> Result<(), CommandFailure> {
    let destination = Destination::open("layers", &args.files, &ChartFolder::default())?;
    if args.simulate {
        let figures = simulated::run();
        return destination.publish(&figures, &simulated::report(&figures));
    }
    #[cfg(feature = "llama")]
    return measured::run(&args, &destination).await;
    #[cfg(not(feature = "llama"))]
    Err(CommandFailure("this build has no llama.cpp: only --simulate runs".into()))
}
