//! The `baton` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    baton_proxy::cli::main()
}
