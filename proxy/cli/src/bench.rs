//! `baton bench` and `baton calibrate-codec`: start `baton-bench`, the program with the benchmarks, if it lies beside this one.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use baton_proxy::serve::CommandFailure;
use clap::Args;

/// Everything after the command is for the other program, `--help` and `--version` too.
#[derive(Args)]
#[command(disable_help_flag = true, disable_version_flag = true)]
pub(super) struct BenchArgs {
    /// What `baton-bench` is given; without anything, it lists what it can measure
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// Becomes `baton-bench` with these arguments. Returns only if that is impossible.
pub(super) fn run(command: Option<&str>, args: &BenchArgs) -> Result<(), CommandFailure> {
    let program = std::env::current_exe()?.with_file_name("baton-bench");
    if !program.is_file() {
        let missing = program.display();
        return Err(CommandFailure(format!(
            "the benchmarks are a program of their own, and there is no {missing}. In Baton's source, `make bench` builds it"
        )));
    }
    Err(Command::new(program).args(command).args(&args.args).exec().into())
}
