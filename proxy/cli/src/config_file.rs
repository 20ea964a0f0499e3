//! How mistakes in a configuration are told at a terminal.

use std::path::Path;

use baton_proxy::config::ConfigError;
use baton_proxy::serve::Failure;

use super::terminal;

/// Prints a line for each mistake; what is left to say is how many there are. One alone is all there is to say.
pub(super) fn told(error: ConfigError) -> Failure {
    let ConfigError::Mistakes(mistakes) = &error else { return error.into() };
    let (n_in_file, n_flags) = (mistakes.in_file.len(), mistakes.flags.len());
    if n_in_file + n_flags == 1 {
        return Failure(mistakes.lines().join(""));
    }
    mistakes.lines().iter().for_each(|line| terminal::note(format_args!("{line}")));
    let count = |n: usize| format!("{n} mistake{}", if n == 1 { "" } else { "s" });
    let file = mistakes.path.as_deref().unwrap_or(Path::new("")).display();
    Failure(match (n_in_file, n_flags) {
        (_, 0) => format!("{file} has {}", count(n_in_file)),
        (0, _) => format!("the command line has {}", count(n_flags)),
        _ => format!("{file} has {}, and the command line has {}", count(n_in_file), count(n_flags)),
    })
}
