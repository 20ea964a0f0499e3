//! `baton bench` and `baton demo`: measure an engine, handoffs, the planner or a running endpoint, and a baseline in the
//! same run. All but `serve` and `mock` drive whole clusters of nodes, real ones on loopback or simulated ones, through the
//! proxy's public parts.
//!
//! The entry points are [`run`] and [`demo::run`]; `baton doctor` uses [`capture`], [`node_process`] and [`prompts`], too.
//!
//! ```text
//! baton bench handoff --help
//! baton demo
//! ```

pub mod capture;
pub mod demo;
mod engine;
mod handoff;
mod line_chart;
mod memory;
mod mock;
mod node;
pub mod node_process;
mod plan;
pub mod prompts;
mod relay;
mod serve;
mod stats;
mod table;
mod timeline;

use std::path::PathBuf;

use baton_proxy::serve::CommandFailure;
use clap::{Args, Subcommand};

/// Options of `baton bench`.
#[derive(Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Prefill, decode, latency and memory of the engine, compared with a plain llama.cpp loop.
    Engine(EngineBenchArgs),
    /// KV handoff between two nodes on loopback: overlap, wire speed, memory, fairness, codecs.
    Handoff(handoff::HandoffBenchArgs),
    /// A running endpoint, or any OpenAI-compatible servers side by side: latency, throughput, processor time, and whether
    /// their replies are correct.
    Serve(Box<serve::ServeBenchArgs>),
    /// A light server with made-up text at a set speed, to measure what stands in front of it.
    Mock(mock::MockArgs),
    /// The route planner compared with every fixed route, on simulated machines and links, or on real nodes.
    Plan(plan::PlanBenchArgs),
}

/// Options of `baton bench engine`.
#[derive(Args)]
pub(crate) struct EngineBenchArgs {
    /// A .gguf file or a catalogue name
    #[arg(long, short, default_value = "smollm2")]
    model: String,
    /// Repetitions; medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Measure only these parts (all, unless given)
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PARTS")]
    only: Vec<EnginePart>,
    /// Compute threads of the engine and of the plain loop
    #[arg(long)]
    threads: Option<u32>,
    /// Also write the figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A part of `baton bench engine`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum EnginePart {
    /// Prompts of 512 and 2,000 tokens.
    Prefill,
    /// 1, 4 and 8 streams, and one with idle conversations in the cache.
    Decode,
    /// A long prompt that joins running streams.
    Joining,
    /// Resident memory, compared with the buffer sizes that llama.cpp reports.
    Memory,
}

/// Runs a benchmark and prints its figures.
pub async fn run(args: BenchArgs) -> Result<(), CommandFailure> {
    match args.what {
        What::Engine(args) => engine::run(args).await,
        What::Handoff(args) => handoff::run(args).await,
        What::Serve(args) => on_one_thread(move || serve::run(*args)).await,
        What::Mock(args) => on_one_thread(move || mock::run(args)).await,
        What::Plan(args) => plan::run(args).await,
    }
}

/// Runs a command on a thread with an event loop of its own: threads that wake each other would cost what is measured.
async fn on_one_thread<F>(command: impl FnOnce() -> F + Send + 'static) -> Result<(), CommandFailure>
where
    F: Future<Output = Result<(), CommandFailure>>,
{
    let run = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        tokio::task::LocalSet::new().block_on(&runtime, command())
    };
    tokio::task::spawn_blocking(run).await?
}
