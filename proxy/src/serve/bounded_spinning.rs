//! Bounds how long the idle threads of OpenMP spin in this process.

use std::os::unix::process::CommandExt;
use std::process::Command;

use super::CommandFailure;
use super::supervisor::THREAD_WAIT;

/// Starts this program again with the variables set, unless they are: the runtimes read them before `main`. See
/// [`THREAD_WAIT`]. A choice that is already in the environment stands. For commands that compute with llama.cpp.
pub fn with_bounded_spinning() -> Result<(), CommandFailure> {
    let chosen = THREAD_WAIT.iter().map(|(name, _)| *name).chain(["OMP_WAIT_POLICY"]);
    if chosen.into_iter().any(|name| std::env::var_os(name).is_some()) {
        return Ok(());
    }
    let program = std::env::current_exe()?;
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_else(|| program.clone().into());
    Err(Command::new(program).arg0(name).args(args).envs(THREAD_WAIT).exec().into())
}
