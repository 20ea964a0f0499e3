//! Options of `baton-bench speculate`.

use std::path::PathBuf;

use clap::Args;

use crate::report::ReportFiles;

/// Options of `baton-bench speculate`.
#[derive(Args)]
pub(crate) struct SpeculateBenchArgs {
    /// A .gguf file, a catalogue name, or a shape that is filled with random weights: dense-1b (1 GB), mtp-1b (1 GB, with a
    /// head), dense-8b (4.8 GB),
    /// moe-30b-a3b (17.4 GB)
    #[arg(long, short, default_value = "smollm2")]
    pub(super) model: String,
    /// Also measure this draft model, a .gguf file: beside the model, and as a draft node, which is a process of its own
    #[arg(long, value_name = "FILE")]
    pub(super) draft: Option<PathBuf>,
    /// Also measure this llama-server, without and with the same drafters: the program, as `make llama` builds it
    #[arg(long, value_name = "PROGRAM")]
    pub(super) peer: Option<PathBuf>,
    /// The share of tokens that are right where replies are predicted by the client
    #[arg(long, default_value_t = 0.9, value_name = "SHARE")]
    pub(super) right: f64,
    /// Repetitions of each question; medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(super) rounds: u32,
    /// Tokens of each reply at most
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(8..=2048))]
    pub(super) tokens: u32,
    /// Streams at once
    #[arg(long, value_delimiter = ',', default_value = "1,4", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) streams: Vec<u32>,
    /// Temperature of the replies; 0 is greedy
    #[arg(long, default_value_t = 0.0)]
    pub(super) temperature: f32,
    /// Compute threads
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(super) threads: Option<u32>,
    /// Measure nothing: print what published machines would gain, by the cost model alone
    #[arg(long)]
    pub(super) simulate: bool,
    #[command(flatten)]
    pub(super) files: ReportFiles,
}
