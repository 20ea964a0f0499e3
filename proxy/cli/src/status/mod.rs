//! `baton status`: the state of a running endpoint, as tables or as JSON.

mod table;

use std::io::IsTerminal;
use std::time::Duration;

use baton_proxy::observe::snapshot::EndpointState;
use baton_proxy::serve::CommandFailure;
use clap::Args;

use super::endpoint::EndpointArgs;
use super::terminal;

/// Options of `baton status`.
#[derive(Args)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    endpoint: EndpointArgs,
    /// Print the state as JSON
    #[arg(long)]
    json: bool,
    /// Print the state every second, until Ctrl-C
    #[arg(long, short)]
    watch: bool,
}

/// Longer than a busy endpoint takes to answer, shorter than a person waits.
const DEADLINE: Duration = Duration::from_secs(5);

/// The pause between two states of `--watch`.
const INTERVAL: Duration = Duration::from_secs(1);

/// A state has some kilobytes per model.
const MAX_STATE_BYTES: usize = 16 << 20;

/// Moves the cursor home and clears what is below: the next table is painted over the last one.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Prints the state, once or every second. Errors: the endpoint cannot be reached or refuses, or the text cannot be written.
pub(super) async fn run(args: StatusArgs) -> Result<(), CommandFailure> {
    let paint_over = args.watch && !args.json && std::io::stdout().is_terminal();
    loop {
        let state = fetch(&args).await?;
        let text = if args.json { serde_json::to_string(&state)? + "\n" } else { table::render(&state) };
        let clear = if paint_over { CLEAR } else { "" };
        let is_read = terminal::print(format_args!("{clear}{text}"))?;
        if !is_read || !args.watch {
            return Ok(());
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

async fn fetch(args: &StatusArgs) -> Result<EndpointState, CommandFailure> {
    let endpoint = &args.endpoint;
    let base = endpoint.base()?;
    let response = endpoint.ask(DEADLINE, |client, base| client.get(format!("{base}/baton/state"))).await?;
    match response.status().as_u16() {
        200 => {}
        403 => return Err(CommandFailure(format!("{base} shows its state only to operators' keys"))),
        status => return Err(CommandFailure(format!("{base} is not a Baton endpoint: it answered {status}"))),
    }
    let answer = endpoint.answer(response, MAX_STATE_BYTES).await?;
    serde_json::from_value(answer)
        .map_err(|_| CommandFailure(format!("{base} is not a Baton endpoint of this version")))
}
