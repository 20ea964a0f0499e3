//! `baton status`: the state of a running endpoint, as tables or as JSON.

mod table;

use std::io::IsTerminal;
use std::time::Duration;

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

/// The pause between two states of `--watch`.
const INTERVAL: Duration = Duration::from_secs(1);

/// Moves the cursor home and clears what is below: the next table is painted over the last one.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Prints the state, once or every second. Errors: the endpoint cannot be reached or refuses, or the text cannot be written.
pub(super) async fn run(args: StatusArgs) -> Result<(), CommandFailure> {
    let paint_over = args.watch && !args.json && std::io::stdout().is_terminal();
    loop {
        let state = args.endpoint.state().await?;
        let text = if args.json { serde_json::to_string(&state)? + "\n" } else { table::render(&state) };
        let clear = if paint_over { CLEAR } else { "" };
        let is_read = terminal::print(format_args!("{clear}{text}"))?;
        if !is_read || !args.watch {
            return Ok(());
        }
        tokio::time::sleep(INTERVAL).await;
    }
}
