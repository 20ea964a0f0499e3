//! How mistakes in a configuration are told at a terminal.

use super::{Failure, terminal};
use crate::config::ConfigError;

/// Prints a line for each mistake of a file. What is left to say is how many there are.
pub(super) fn told(error: ConfigError) -> Failure {
    let ConfigError::Mistakes(mistakes) = &error else { return error.into() };
    let Some(path) = &mistakes.path else { return error.into() };
    let lines = mistakes.lines();
    lines.iter().for_each(|line| terminal::note(format_args!("{line}")));
    let s = if lines.len() == 1 { "" } else { "s" };
    Failure(format!("{} has {} mistake{s}", path.display(), lines.len()))
}
