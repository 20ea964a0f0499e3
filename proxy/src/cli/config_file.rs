//! How mistakes in a configuration are told at a terminal.

use super::{Failure, terminal};
use crate::config::ConfigError;

/// Prints a line for each mistake of a file. What is left to say is how many there are, and what is wrong with flags.
pub(super) fn told(error: ConfigError) -> Failure {
    let ConfigError::Mistakes(mistakes) = &error else { return error.into() };
    let Some(path) = mistakes.path.as_ref().filter(|_| !mistakes.in_file.is_empty()) else {
        return Failure(mistakes.flags.join("; "));
    };
    mistakes.lines().iter().for_each(|line| terminal::note(format_args!("{line}")));
    let n = mistakes.in_file.len();
    let flags = if mistakes.flags.is_empty() { "" } else { ", and the command line is wrong, too" };
    Failure(format!("{} has {n} mistake{}{flags}", path.display(), if n == 1 { "" } else { "s" }))
}
