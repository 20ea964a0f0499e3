//! Questions to the person at the terminal.

use std::io::{BufRead, IsTerminal, Read};

use baton_proxy::serve::CommandFailure;

use super::terminal;

/// A typed line has no more bytes. A path may have 4096.
const MAX_LINE_BYTES: u64 = 8 << 10;

/// Answers that are not understood before a question is given up, as when a script is at the other end.
const MAX_TRIES: usize = 5;

/// Returns true if somebody can be asked.
pub(super) fn is_person_there() -> bool {
    std::io::stdin().is_terminal() && std::io::stdout().is_terminal()
}

/// Asks until the answer is one. Errors: nobody answers.
pub(super) fn question<T>(
    words: &str,
    proposed: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<T, CommandFailure> {
    for _ in 0..MAX_TRIES {
        let hint = if proposed.is_empty() { String::new() } else { format!(" [{proposed}]") };
        terminal::print(format_args!("{words}{hint}: "))?;
        let line = line()?.ok_or_else(|| CommandFailure("no answer; nothing was changed".into()))?;
        let text = if line.is_empty() { proposed } else { &line };
        match parse(text) {
            Ok(answer) => return Ok(answer),
            Err(problem) => terminal::print_line(problem)?,
        }
    }
    Err(CommandFailure(format!("no usable answer in {MAX_TRIES} tries; nothing was changed")))
}

/// Asks for a yes. Errors: nobody answers.
pub(super) fn confirmed(words: &str) -> Result<bool, CommandFailure> {
    question(words, "no", yes_or_no)
}

/// Reads a yes or a no.
pub(super) fn yes_or_no(text: &str) -> Result<bool, String> {
    for (words, is_yes) in [(["y", "yes", "on"], true), (["n", "no", "off"], false)] {
        if words.iter().any(|word| text.eq_ignore_ascii_case(word)) {
            return Ok(is_yes);
        }
    }
    Err("must be yes or no".to_owned())
}

/// A typed line without its end. `None` at the end of the input.
fn line() -> Result<Option<String>, CommandFailure> {
    let mut line = String::new();
    let n = std::io::stdin().lock().take(MAX_LINE_BYTES).read_line(&mut line)?;
    Ok((n > 0).then(|| line.trim().to_owned()))
}
