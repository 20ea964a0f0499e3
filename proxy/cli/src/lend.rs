//! `baton lend`: the child that lends devices for one session of a worker. [`baton_engines::workers::child`] does it.

use baton_engines::workers::child::{self, Lent};
use baton_proxy::serve::CommandFailure;
use baton_schemas::node::ChildEvent;
use clap::Args;
use rustix::process::Signal;

use super::{lifeline, terminal};

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
    let lending = match args.describe {
        true => child::describe(&lent).map(Some),
        // The parent has written all that it writes.
        false => child::run(&lent, || lifeline::tie_to_parent(Signal::KILL, None)).map(|()| None),
    };
    match lending {
        Ok(devices) => Ok(devices.map_or(Ok(()), |devices| {
            terminal::print_line(serde_json::to_string(&devices).map_err(std::io::Error::from)?)
        })?),
        Err(error) => {
            let summary = "the devices cannot be lent".into();
            lifeline::tell_parent(&ChildEvent::Failed { message: error.to_string(), summary });
            // ggml's thread still runs: an orderly end would free what it uses.
            rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).map_err(std::io::Error::from)?;
            Err(CommandFailure(error.to_string()))
        }
    }
}
