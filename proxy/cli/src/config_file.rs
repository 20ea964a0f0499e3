//! Prints the mistakes in a configuration.

use std::path::Path;

use baton_proxy::config::ConfigError;
use baton_proxy::serve::CommandFailure;
use baton_schemas::counted::counted;

use super::terminal;

/// Prints a line for each mistake and returns their number as the failure. A single mistake is itself the failure.
pub(super) fn print_mistakes(error: ConfigError) -> CommandFailure {
    let ConfigError::Mistakes(mistakes) = &error else { return error.into() };
    let n_in_file = mistakes.in_file.len();
    let n_flags = mistakes.flags.len();
    if n_in_file + n_flags == 1 {
        return CommandFailure(mistakes.lines().join(""));
    }
    mistakes.lines().iter().for_each(|line| terminal::note(format_args!("{line}")));
    let count = |n: usize| counted(n, "mistake");
    let file = mistakes.path.as_deref().unwrap_or(Path::new("")).display();
    CommandFailure(match (n_in_file, n_flags) {
        (_, 0) => format!("{file} has {}", count(n_in_file)),
        (0, _) => format!("the command line has {}", count(n_flags)),
        _ => format!("{file} has {}, and the command line has {}", count(n_in_file), count(n_flags)),
    })
}
