//! Settings that libraries read from the environment before `main`, or only once. To change them, this process starts its
//! own program again in its place.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use baton_engines::engine_options::{EngineKind, WrittenOptions};
use baton_engines::registry::THREADS_VARIABLE;
use baton_proxy::serve::{CommandFailure, THREAD_WAIT};

/// Bounds how long OpenMP's threads spin before they sleep. See [`THREAD_WAIT`]. A choice that is already in the environment
/// stands.
pub fn with_bounded_spinning() -> Result<(), CommandFailure> {
    let chosen = THREAD_WAIT.iter().map(|(name, _)| *name).chain(["OMP_WAIT_POLICY"]);
    if chosen.into_iter().any(|name| std::env::var_os(name).is_some()) || cfg!(not(feature = "llama")) {
        return Ok(());
    }
    Err(again(THREAD_WAIT.map(|(name, value)| (name, value.into()))))
}

/// Gives candle its number of threads.
pub(crate) fn set_threads(engine: &WrittenOptions) -> Result<(), CommandFailure> {
    let threads = engine.threads.filter(|_| engine.kind() == EngineKind::Candle);
    let Some(threads) = threads.map(|n| OsString::from(n.to_string())) else { return Ok(()) };
    if std::env::var_os(THREADS_VARIABLE).as_ref() == Some(&threads) {
        return Ok(());
    }
    Err(again([(THREADS_VARIABLE, threads)]))
}

/// Returns only with an error.
fn again(variables: impl IntoIterator<Item = (&'static str, OsString)>) -> CommandFailure {
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_else(|| "baton".into());
    match std::env::current_exe() {
        Ok(program) => Command::new(program).arg0(name).args(args).envs(variables).exec().into(),
        Err(error) => error.into(),
    }
}
