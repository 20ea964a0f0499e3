//! What the owner of a machine wants of it: by flags, or asked for in the terminal.

use baton_proxy::serve::CommandFailure;
use clap::ValueEnum;

use super::args::{BootChoice, SetupArgs, SetupPairing, SetupRole};
use crate::question::question;

/// All answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answers {
    pub role: SetupRole,
    pub model: String,
    pub pair: SetupPairing,
    pub service: BootChoice,
    /// Other servers on this machine are used, too.
    pub adopt: BootChoice,
}

/// Findings on the machine. Questions that it answers are not asked.
pub(super) struct SetupMachine {
    pub is_paired: bool,
    /// Something here starts services at boot.
    pub has_services: bool,
    /// Other servers that run here, in words.
    pub servers: Vec<String>,
}

/// Asks for what no flag gives. `proposed` has the answers of those who only press Enter.
pub(super) fn ask(args: &SetupArgs, proposed: Answers, machine: &SetupMachine) -> Result<Answers, CommandFailure> {
    let SetupMachine { is_paired, has_services, servers } = machine;
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
    if args.adopt.is_none() && answers.role == SetupRole::Endpoint && !servers.is_empty() {
        let words = format!("Serve the models of {} on this machine, too?", servers.join(" and "));
        answers.adopt = question(&words, "yes", str::parse)?;
    }
    if args.pair.is_none() && !*is_paired {
        let (words, proposed) = match answers.role {
            SetupRole::Endpoint => {
                ("Pair it with other machines? show, a code that another machine shows, or no", "no")
            }
            _ => ("Which code does `baton pair` show on the endpoint's machine?", ""),
        };
        answers.pair = question(words, proposed, str::parse)?;
    }
    if args.service.is_none() && *has_services {
        answers.service = question("Start it now and at every boot?", "yes", str::parse)?;
    }
    Ok(answers)
}
