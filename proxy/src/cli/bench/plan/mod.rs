//! `baton bench plan`: the planner beside every fixed route, on simulated machines.
//!
//! Planning, learning and failover are those of a running endpoint; machines and network are simulated, in a clock that
//! jumps over waiting. All figures are of the simulation.

mod cluster;
mod drift;
mod grading;
mod grid;
mod machines;
mod published;

use std::time::Instant;

use super::PlanBenchArgs;
use crate::cli::Failure;

/// Runs everything and prints it.
pub(super) async fn run(args: PlanBenchArgs) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build()?;
    tokio::task::spawn_blocking(move || runtime.block_on(measure(args))).await?
}

#[allow(clippy::print_stdout)]
async fn measure(args: PlanBenchArgs) -> Result<(), Failure> {
    let t = Instant::now();
    println!("{:#?}", published::run().await?);
    println!("{:?}", t.elapsed());
    let drift = drift::run().await?;
    for l in &drift { println!("{l:?}"); }
    println!("corrected {:?} {:?}", drift::corrected_from(&drift, 0.1), t.elapsed());
    let cells = grid::run().await?;
    println!("{:?}", t.elapsed());
    for s in grid::summarize(&cells) { println!("{s:?}"); }
    if let Some(path) = args.json { std::fs::write(path, serde_json::to_string(&cells)?)?; }
    for l in grading::run().await? { println!("{l:?}"); }
    println!("{:?}", t.elapsed());
    Ok(())
}
