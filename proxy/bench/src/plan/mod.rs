//! `baton-bench plan`: compares the planner with every fixed route, on simulated machines.
//!
//! Planning, learning and failover are those of a running endpoint. Machines and network are simulated, with a clock
//! that skips waiting times. With `--upstreams` only upstreams are planned, which are simulated, too. With `--popular` only the models that people run now are planned, by published rates. With
//! `--model` the nodes are real processes on this machine, and the links are paced; with `--real` an endpoint predicts long
//! prompts after bursts.

mod bursts;
mod cells;
mod chart;
mod cluster;
mod drift;
#[cfg(feature = "llama")]
pub(crate) mod first_tokens;
mod grading;
mod grid;
mod popular;
mod published;
mod real;
mod real_bursts;
mod report;
mod returns;
mod slowest_link;
#[cfg(feature = "llama")]
pub(crate) mod traces;
mod upstreams;

use baton_engines::registry::EngineKind;
use baton_proxy::serve::CommandFailure;
use baton_proxy::serve::model_files;
use clap::Args;

use self::report::PlanFigures;
use crate::report::{ChartFolder, Destination, ReportFiles};

/// Options of `baton-bench plan`.
#[derive(Args)]
pub(super) struct PlanBenchArgs {
    #[command(flatten)]
    files: ReportFiles,
    #[command(flatten)]
    charts: ChartFolder,
    /// Measure real nodes with this model on this machine instead, with paced links; takes some minutes
    #[arg(long, short, value_name = "PATH|NAME", conflicts_with = "svg")]
    model: Option<String>,
    /// Measure predictions after bursts instead, with an endpoint and real nodes on this machine; takes some minutes
    #[arg(long, conflicts_with = "svg")]
    real: bool,
    /// Only the models that people run now, planned with published rates; takes a moment
    #[arg(long, conflicts_with_all = ["svg", "model", "real"])]
    popular: bool,
    /// Only upstreams: the planner beside other routers' rules, on four simulated servers; takes some minutes
    #[arg(long, conflicts_with_all = ["svg", "model", "real", "popular"])]
    upstreams: bool,
}

/// The model of `--real`: small enough for every machine.
const DEFAULT_MODEL: &str = "smollm2";

/// Runs the benchmark.
pub(super) async fn run(args: PlanBenchArgs) -> Result<(), CommandFailure> {
    let destination = Destination::open("plan", &args.files, &args.charts)?;
    if args.popular {
        let figures = popular::run();
        return destination.publish(&figures, &figures.report());
    }
    if args.upstreams {
        let figures = tokio::task::spawn_blocking(upstreams::run).await?;
        return destination.publish(&figures, &figures.report());
    }
    if args.real {
        let model = args.model.as_deref().unwrap_or(DEFAULT_MODEL);
        let figures = real_bursts::run(model_files::locate_or_pull(model, EngineKind::default()).await?).await?;
        return destination.publish(&figures, &figures.report());
    }
    if let Some(model) = &args.model {
        let figures = real::run(model_files::locate_or_pull(model, EngineKind::default()).await?).await?;
        return destination.publish(&figures, &figures.report());
    }
    // On one thread with a paused clock, so that hours of load take seconds.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build()?;
    let figures = tokio::task::spawn_blocking(move || runtime.block_on(measure())).await??;
    destination.publish(&figures, &figures.report())
}

async fn measure() -> Result<PlanFigures, CommandFailure> {
    let cells = grid::run().await?;
    let drift = drift::run().await?;
    let returns = returns::run().await?;
    Ok(PlanFigures {
        note: "simulation",
        summary: grid::summarize(&cells),
        return_summary: returns::summarize(&returns),
        returns,
        never_slower: cells,
        bursts: bursts::run().await?,
        published: published::run().await?,
        popular: popular::run(),
        slowest_links: slowest_link::run().await?,
        grading: grading::run().await?,
        corrected_from: drift::corrected_from(&drift, report::CORRECTED),
        drift,
    })
}
