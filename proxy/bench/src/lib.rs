//! `baton bench`: measures an engine, handoffs, the planner or a running endpoint, and a baseline in the same run. All but
//! `serve` and `mock` drive whole clusters of nodes, real ones on loopback or simulated ones, through the proxy's public
//! parts.
//!
//! ```text
//! baton bench handoff --help
//! ```

#[cfg(feature = "llama")]
mod backends;
#[cfg(feature = "llama")]
pub mod codec;
#[cfg(feature = "llama")]
mod engine;
#[cfg(feature = "llama")]
mod handoff;
mod line_chart;
#[cfg(feature = "llama")]
mod memory;
mod mock;
mod plan;
mod relay;
mod serve;
mod table;
#[cfg(feature = "llama")]
mod timeline;
#[cfg(feature = "llama")]
mod workers;

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
    /// Every device of this machine alone, and every handoff between two of them: exactness, and what it costs.
    #[cfg(feature = "llama")]
    Backends(backends::BackendsBenchArgs),
    /// What each KV codec costs in exactness and time, and what it saves.
    #[cfg(feature = "llama")]
    Codec(codec::CodecBenchArgs),
    /// Prefill, decode, latency and memory of the engine, compared with a plain llama.cpp loop.
    #[cfg(feature = "llama")]
    Engine(engine::EngineBenchArgs),
    /// KV handoff between two nodes on loopback: overlap, wire speed, memory, fairness, codecs.
    #[cfg(feature = "llama")]
    Handoff(handoff::HandoffBenchArgs),
    /// A running endpoint, or any OpenAI-compatible servers side by side: latency, throughput, processor time, and whether
    /// their replies are correct.
    Serve(Box<serve::ServeBenchArgs>),
    /// A light server with made-up text at a set speed, to measure what stands in front of it.
    Mock(mock::MockArgs),
    /// One model on 0, 1 and 2 workers, each pinned to a core, over links of several speeds: prefill and decode rates.
    #[cfg(feature = "llama")]
    Workers(workers::WorkersBenchArgs),
    /// The route planner compared with every fixed route, on simulated machines and links, or on real nodes.
    Plan(plan::PlanBenchArgs),
}

/// Runs a benchmark and prints its figures.
pub async fn run(args: BenchArgs) -> Result<(), CommandFailure> {
    match args.what {
        #[cfg(feature = "llama")]
        What::Backends(args) => backends::run(args).await,
        #[cfg(feature = "llama")]
        What::Codec(args) => codec::run(args).await,
        #[cfg(feature = "llama")]
        What::Engine(args) => engine::run(args).await,
        #[cfg(feature = "llama")]
        What::Handoff(args) => handoff::run(args).await,
        #[cfg(feature = "llama")]
        What::Workers(args) => workers::run(args).await,
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
