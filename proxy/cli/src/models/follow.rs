//! Shows the progress of a transfer until it ends.

use std::time::Duration;

use baton_fetch::progress;
use baton_proxy::serve::CommandFailure;
use baton_schemas::machine_models::{ClusterModels, ModelTransfer, OrderTaken, TransferState};

use super::ask::list;
use crate::endpoint::EndpointArgs;
use crate::terminal;

/// The pause between two looks.
const INTERVAL: Duration = Duration::from_millis(500);

/// Looks in a row at which the machine does not answer, after which nobody waits any more.
const MAX_SILENT: u32 = 20;

/// Follows a transfer to a machine. Errors: it fails or is cancelled, or the machine is lost.
///
/// `name` is the one under which the endpoint is to serve it.
pub(super) async fn follow(
    endpoint: &EndpointArgs,
    machine: &str,
    name: Option<&str>,
    taken: OrderTaken,
) -> Result<(), CommandFailure> {
    let Some(number) = taken.transfer else { return Ok(()) };
    let progress = progress::to_stderr();
    let mut total_bytes = None;
    let mut n_silent = 0;
    loop {
        let Some(transfer) = transfer_to(machine, list(endpoint).await?) else {
            n_silent += 1;
            if n_silent >= MAX_SILENT {
                return Err(CommandFailure(format!("{machine} does not answer any more")));
            }
            tokio::time::sleep(INTERVAL).await;
            continue;
        };
        n_silent = 0;
        if transfer.number != number {
            return Err(CommandFailure(format!("{machine} was started again: give the order again to continue")));
        }
        let ModelTransfer { model, state, problem, .. } = transfer;
        if transfer.total_bytes.is_some() && transfer.total_bytes != total_bytes {
            total_bytes = transfer.total_bytes;
            progress.started(&model, total_bytes);
        }
        // Before that there is no name to show.
        if total_bytes.is_some() {
            progress.reached(transfer.done_bytes);
        }
        match state {
            TransferState::Preparing | TransferState::Receiving => {}
            TransferState::Done => {
                if total_bytes.is_some() {
                    progress.finished();
                }
                let but = match (problem, name) {
                    (Some(problem), _) => format!("; {problem}"),
                    (None, Some(name)) => format!(", served as {name}"),
                    (None, None) => String::new(),
                };
                return Ok(terminal::print_line(format_args!("{model} is on {machine}{but}"))?);
            }
            TransferState::Failed => {
                return Err(CommandFailure(problem.unwrap_or_else(|| "the transfer failed".to_owned())));
            }
            TransferState::Cancelled => return Err(CommandFailure(format!("the transfer to {machine} was cancelled"))),
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

fn transfer_to(machine: &str, models: ClusterModels) -> Option<ModelTransfer> {
    models.machines.into_iter().find(|report| report.machine == machine)?.folder?.transfer
}
