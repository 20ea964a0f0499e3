//! `baton-bench many`: one endpoint with many nodes and many slow streams, and two endpoints that share nodes.
//!
//! The endpoints are processes of `baton`, whose CPU and memory are measured. The nodes are simulated engines behind real node servers
//! with sockets of their own, all in one further process. A machine that gives a token every two seconds is slow; ten thousand
//! such streams are what a company's machines give. What a plan costs is measured in this process, with the endpoint's own planner.

mod args;
mod cell;
mod host;
mod planning;
mod report;
mod size;

use std::collections::BTreeSet;

use baton_proxy::http::edge::open_files;
use baton_proxy::serve::CommandFailure;

pub(crate) use self::args::ManyBenchArgs;
use self::report::ManyFigures;
use self::size::MAX_STREAMS_OF_NODE;
use crate::report::Destination;

/// Runs the benchmark.
pub(crate) async fn run(args: ManyBenchArgs) -> Result<(), CommandFailure> {
    open_files::raise_limit();
    if let (Some(n_nodes), Some(n_slots)) = (args.host_nodes, args.host_slots) {
        return host::serve(n_nodes, n_slots, args.token_every).await;
    }
    let destination = Destination::open("many", &args.files, &args.charts)?;
    let mut figures = ManyFigures { token_every_ms: args.token_every, ..ManyFigures::default() };
    let shared = (args.shared_nodes > 0).then_some(args.shared_nodes);
    let planned: BTreeSet<u32> = args.nodes.iter().copied().chain(shared).collect();
    for n_nodes in planned {
        figures.planning.extend(planning::measure(n_nodes, args.rounds).await?);
    }
    for size in args.sizes() {
        match size.n_streams.div_ceil(size.n_nodes) <= MAX_STREAMS_OF_NODE {
            true => figures.cells.push(cell::measure(size, &args).await?),
            // It is shown as not possible.
            false => figures.impossible.push(size),
        }
        destination.save(&figures)?;
    }
    destination.publish(&figures, &figures.report())
}
