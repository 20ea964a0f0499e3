//! `baton completions SHELL`: the script by which a shell completes commands and options.

use baton_proxy::serve::CommandFailure;
use clap::Args;
use clap_complete::Shell;

use super::terminal;

/// Options of `baton completions`.
#[derive(Args)]
pub(super) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the completion script for a shell.
pub(super) fn run(args: &CompletionsArgs, mut command: clap::Command) -> Result<(), CommandFailure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "baton", &mut script);
    Ok(terminal::print_line(String::from_utf8_lossy(&script).trim_end())?)
}
