//! `baton-bench`: measures an engine, handoffs, the planner or running servers, and a baseline in the same run.
//!
//! It is a program of its own, because operators need none of it: `make bench` builds it, and `baton bench` starts it where
//! it lies beside `baton`. All benchmarks but `serve` and `mock` drive whole clusters of nodes, simulated ones or real ones
//! on loopback, for which they start that `baton`.
//!
//! ```text
//! baton-bench handoff --help
//! ```

#[cfg(feature = "llama")]
mod backends;
#[cfg(feature = "llama")]
mod codec;
mod compare;
#[cfg(feature = "llama")]
mod engine;
#[cfg(feature = "llama")]
mod handoff;
#[cfg(feature = "llama")]
mod kv_store;
mod layers;
#[cfg(feature = "llama")]
mod llama_server;
mod many;
#[cfg(feature = "llama")]
mod memory;
mod mock;
mod plan;
mod relay;
mod report;
mod serve;
#[cfg(feature = "llama")]
mod speculate;
#[cfg(feature = "llama")]
mod timeline;
#[cfg(feature = "llama")]
mod workers;

use std::process::ExitCode;

use baton_engines::QUIET_LLAMA;
use baton_proxy::log_target::NOTICE;
use baton_proxy::serve::CommandFailure;
use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// As `baton` has it, so that the client of `serve` costs as little as a request in `baton`.
#[cfg(target_os = "linux")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Measures Baton: its engine, KV handoffs, the planner, or running servers side by side.
#[derive(Parser)]
#[command(name = "baton-bench", version, about, propagate_version = true, arg_required_else_help = true)]
struct CommandLine {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// How exactly a model's KV has to be kept, so that the lossy codecs kvq and kvq_fast lose less: writes a profile.
    #[cfg(feature = "llama")]
    CalibrateCodec(codec::calibrate::CalibrateArgs),
    /// Every device of this machine alone, and every handoff between two of them: exactness, and what it costs.
    #[cfg(feature = "llama")]
    Backends(backends::BackendsBenchArgs),
    /// What each KV codec costs in exactness and time, and what it saves.
    #[cfg(feature = "llama")]
    Codec(codec::CodecBenchArgs),
    /// Nothing: says what became worse or better between two reports of one benchmark, beyond their noise.
    Compare(compare::CompareArgs),
    /// Prefill, decode, latency and memory of the engine, compared with a plain llama.cpp loop.
    #[cfg(feature = "llama")]
    Engine(engine::EngineBenchArgs),
    /// KV handoff between two nodes on loopback: overlap, wire speed, memory, fairness, codecs.
    #[cfg(feature = "llama")]
    Handoff(handoff::HandoffBenchArgs),
    /// The first token of prompts whose KV is in a slot, in memory, on disk after a restart, on another node, and computed.
    #[cfg(feature = "llama")]
    KvStore(kv_store::StoreBenchArgs),
    /// The first token of prompts of which a worker computes the first layers, by their number, and both sides' memory.
    Layers(layers::LayersBenchArgs),
    /// One endpoint with many nodes and many slow streams, and two that share nodes: CPU, memory, lateness, and what a plan costs.
    Many(many::ManyBenchArgs),
    /// A running endpoint, or any OpenAI-compatible servers side by side: latency, throughput, processor time, and whether
    /// their replies are correct.
    Serve(Box<serve::ServeBenchArgs>),
    /// A light server with made-up text at a set speed, to measure what stands in front of it.
    Mock(mock::MockArgs),
    /// The same questions without and with speculation: editing code, summarising, JSON, prose.
    #[cfg(feature = "llama")]
    Speculate(speculate::SpeculateBenchArgs),
    /// One model on 0, 1 and 2 workers, each pinned to a core, over links of several speeds: prefill and decode rates.
    #[cfg(feature = "llama")]
    Workers(workers::WorkersBenchArgs),
    /// The route planner compared with every fixed route, on simulated machines and links, or on real nodes.
    Plan(plan::PlanBenchArgs),
}

fn main() -> ExitCode {
    let CommandLine { what } = CommandLine::parse();
    start_log();
    match start(what) {
        Ok(()) => ExitCode::SUCCESS,
        Err(CommandFailure(message)) => {
            // A library's error may span several lines.
            eprintln!("baton-bench: {}", message.split_whitespace().collect::<Vec<_>>().join(" "));
            ExitCode::FAILURE
        }
    }
}

fn start(what: What) -> Result<(), CommandFailure> {
    // The engine that is compared computes here.
    #[cfg(feature = "llama")]
    baton_node::with_bounded_spinning()?;
    baton_tryout::program::run_children_beside_this()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(measure(what));
    // A blocking task that is stuck (a model that is still loading) must not keep the process.
    runtime.shutdown_background();
    result
}

/// Writes warnings to standard error, or what RUST_LOG selects.
fn start_log() {
    let default = format!("warn,{NOTICE}=info");
    let asked = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or(default);
    let filter = EnvFilter::new(format!("{QUIET_LLAMA},{asked}"));
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false).with_env_filter(filter).init();
}

async fn measure(what: What) -> Result<(), CommandFailure> {
    match what {
        #[cfg(feature = "llama")]
        What::CalibrateCodec(args) => codec::calibrate::run(args).await,
        #[cfg(feature = "llama")]
        What::Backends(args) => backends::run(args).await,
        #[cfg(feature = "llama")]
        What::Codec(args) => codec::run(args).await,
        What::Compare(args) => compare::run(&args),
        #[cfg(feature = "llama")]
        What::Engine(args) => engine::run(args).await,
        #[cfg(feature = "llama")]
        What::Handoff(args) => handoff::run(args).await,
        #[cfg(feature = "llama")]
        What::KvStore(args) => kv_store::run(args).await,
        #[cfg(feature = "llama")]
        What::Speculate(args) => speculate::run(args).await,
        #[cfg(feature = "llama")]
        What::Workers(args) => workers::run(args).await,
        What::Layers(args) => layers::run(args).await,
        What::Many(args) => on_one_thread(move || many::run(args)).await,
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
