//! `baton-bench plan`: compares the planner with every fixed route, on simulated machines.
//!
//! Planning, learning and failover are those of a running endpoint. Machines and network are simulated, with a clock
//! that skips waiting times. With `--model` the nodes are real processes on this machine, and the links are paced.

mod bursts;
mod chart;
mod cluster;
mod drift;
mod grading;
mod grid;
mod published;
mod real;
mod report;
mod slowest_link;

use std::path::PathBuf;

use baton_engines::registry::EngineKind;
use baton_proxy::serve::CommandFailure;
use baton_proxy::serve::model_files;
use clap::Args;

use self::report::PlanBenchReport;

/// Options of `baton-bench plan`.
#[derive(Args)]
pub(super) struct PlanBenchArgs {
    /// Also write every figure as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write an SVG chart of where handoffs pay
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Measure real nodes with this model on this machine instead, with paced links; takes some minutes
    #[arg(long, short, value_name = "PATH|NAME", conflicts_with = "svg")]
    model: Option<String>,
}

/// Runs everything and prints it as Markdown.
pub(super) async fn run(args: PlanBenchArgs) -> Result<(), CommandFailure> {
    if let Some(model) = &args.model {
        let report = real::run(model_files::locate_or_pull(model, EngineKind::default()).await?).await?;
        if let Some(path) = &args.json {
            std::fs::write(path, serde_json::to_vec(&report)?)?;
        }
        report.print();
        return Ok(());
    }
    // On one thread with a paused clock, so that hours of load take seconds.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build()?;
    let report = tokio::task::spawn_blocking(move || runtime.block_on(measure())).await??;
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_vec(&report)?)?;
    }
    if let Some(path) = &args.svg {
        std::fs::write(path, chart::break_even(&report.never_slower))?;
    }
    report.print();
    Ok(())
}

async fn measure() -> Result<PlanBenchReport, CommandFailure> {
    let cells = grid::run().await?;
    let drift = drift::run().await?;
    Ok(PlanBenchReport {
        note: "simulation",
        summary: grid::summarize(&cells),
        never_slower: cells,
        bursts: bursts::run().await?,
        published: published::run().await?,
        slowest_links: slowest_link::run().await?,
        grading: grading::run().await?,
        corrected_from: drift::corrected_from(&drift, report::CORRECTED),
        drift,
    })
}
