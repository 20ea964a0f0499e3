//! `baton lend`: the child that lends devices for one session of a worker. [`baton_node::lend`] does it.

use baton_engines::workers::child::Lent;
use baton_node::lend;
use baton_proxy::serve::CommandFailure;
use clap::Args;

use super::terminal;

/// Options of `baton lend`.
#[derive(Args)]
pub(super) struct LendArgs {
    /// The one device, by its name
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Threads of the processor
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    threads: Option<u32>,
    /// Bytes of memory
    #[arg(long, value_name = "BYTES")]
    max_memory: Option<u64>,
    /// Print what would be lent, and end
    #[arg(long)]
    describe: bool,
}

/// Lends until the process ends.
pub(super) fn run(args: &LendArgs) -> Result<(), CommandFailure> {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let n_threads = args.threads.map_or_else(cores, |n| n as usize);
    let lent = Lent { device: args.device.clone(), n_threads, max_memory: args.max_memory };
    if !args.describe {
        lend::run(&lent);
    }
    let devices = serde_json::to_string(&lend::describe(&lent))?;
    Ok(terminal::print_line(devices)?)
}
