//! What the owner of a machine wants of it: by flags, or asked for in the terminal.

use std::io::{BufRead, Read};

use baton_proxy::serve::CommandFailure;
use clap::ValueEnum;

use super::args::{BootChoice, SetupArgs, SetupPairing, SetupRole};
use crate::terminal;

/// All answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answers {
    pub role: SetupRole,
    pub model: String,
    pub pair: SetupPairing,
    pub service: BootChoice,
}

/// A typed line has no more bytes. A path may have 4096.
const MAX_LINE_BYTES: u64 = 8 << 10;

/// Answers that are not understood before a question is given up, as when a script is at the other end.
const MAX_TRIES: usize = 5;

/// Asks for what no flag gives. `proposed` has the answers of those who only press Enter.
pub(super) fn ask(args: &SetupArgs, proposed: Answers, is_paired: bool) -> Result<Answers, CommandFailure> {
    let mut answers = proposed;
    if args.role.is_none() {
        answers.role =
            question("What does this machine do? endpoint, prefill, decode or worker", "endpoint", |text| {
                <SetupRole as ValueEnum>::from_str(text, true)
                    .map_err(|_| "must be endpoint, prefill, decode or worker".to_owned())
            })?;
    }
    if args.model.is_none() && answers.role != SetupRole::Worker {
        let proposed = answers.model.clone();
        answers.model =
            question("Which model? A file, a catalogue name, or OWNER/REPO", &proposed, |text| Ok(text.to_owned()))?;
    }
    if args.pair.is_none() && !is_paired {
        let (words, proposed) = match answers.role {
            SetupRole::Endpoint => {
                ("Pair it with other machines? show, a code that another machine shows, or no", "no")
            }
            _ => ("Which code does `baton pair` show on the endpoint's machine?", ""),
        };
        answers.pair = question(words, proposed, str::parse)?;
    }
    if args.service.is_none() {
        answers.service = question("Start it now and at every boot?", "yes", str::parse)?;
    }
    Ok(answers)
}

/// Asks until the answer is one. Errors: nobody answers.
fn question<T>(words: &str, proposed: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<T, CommandFailure> {
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
    let answer: BootChoice = question(words, "no", str::parse)?;
    Ok(answer == BootChoice::On)
}

/// A typed line without its end. `None` at the end of the input.
fn line() -> Result<Option<String>, CommandFailure> {
    let mut line = String::new();
    let n = std::io::stdin().lock().take(MAX_LINE_BYTES).read_line(&mut line)?;
    Ok((n > 0).then(|| line.trim().to_owned()))
}
