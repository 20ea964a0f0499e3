//! `baton doctor`: lists this machine's devices, and checks that KV moves between them and from other nodes.
//!
//! It starts two nodes on every device. One computes prompts; the other takes their KV and generates, and its replies are
//! compared with the replies that it gives alone. All processes end with the command. `docs/backends.md` explains it.

mod args;
mod compare;
mod examine;
mod report;

use baton_proxy::serve::signals::OnHangup;
use baton_proxy::serve::{CommandFailure, signals};
use tokio_util::sync::CancellationToken;

pub(crate) use self::args::DoctorArgs;
use self::examine::Examination;

/// Runs every check. A signal ends the command and all its processes at once.
pub(super) async fn run(args: DoctorArgs) -> Result<(), CommandFailure> {
    let stop = CancellationToken::new();
    signals::stop_on_signal(stop.clone(), OnHangup::Stops);
    tokio::select! {
        done = check(args) => done,
        () = stop.cancelled() => Err(CommandFailure("stopped".into())),
    }
}

#[allow(clippy::print_stdout, reason = "the report is the command's result")]
async fn check(args: DoctorArgs) -> Result<(), CommandFailure> {
    let json = args.json;
    let report = Examination::begin(args).await?.complete().await?;
    match json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => print!("{report}"),
    }
    match report.n_failed() {
        0 => Ok(()),
        n => Err(CommandFailure(format!("{n} of the checks failed"))),
    }
}
