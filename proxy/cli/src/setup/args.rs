//! Options of `baton setup`.

use std::str::FromStr;

use baton_pairing::PairingCode;
use clap::{Args, ValueEnum};

use crate::question::yes_or_no;

/// Options of `baton setup`.
#[derive(Args)]
pub(crate) struct SetupArgs {
    /// What this machine does
    #[arg(long, value_enum, value_name = "ROLE")]
    pub(super) role: Option<SetupRole>,
    /// A .gguf file, a catalogue name, or OWNER/REPO[:FILE] on the Hugging Face hub
    #[arg(long, value_name = "PATH|NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(super) model: Option<String>,
    /// `show` shows a code for other machines, a code joins the machine that shows it, `no` leaves this machine as it is
    #[arg(long, value_name = "CODE|show|no")]
    pub(super) pair: Option<SetupPairing>,
    /// Start it now and at every boot
    #[arg(long, value_enum, value_name = "ON|OFF")]
    pub(super) service: Option<BootChoice>,
    /// Use other servers on this machine, such as Ollama, too (an endpoint)
    #[arg(long, value_enum, value_name = "ON|OFF")]
    pub(super) adopt: Option<BootChoice>,
    /// Ask nothing. Without a flag: an endpoint, smollm2, no pairing, no service
    #[arg(long, short)]
    pub(super) yes: bool,
    /// Undo what `baton setup` has made on this machine. Models stay
    #[arg(long, conflicts_with_all = ["role", "model", "pair", "service", "adopt"])]
    pub(super) remove: bool,
}

/// What a machine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum SetupRole {
    /// Serves a model to clients, alone or with nodes.
    Endpoint,
    /// Computes prompts for an endpoint on another machine.
    Prefill,
    /// Generates for an endpoint on another machine.
    Decode,
    /// Lends its devices to a node on another machine; has no model.
    Worker,
}

/// Whether this machine is paired, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SetupPairing {
    No,
    Show,
    Join(PairingCode),
}

impl FromStr for SetupPairing {
    type Err = String;

    fn from_str(text: &str) -> Result<SetupPairing, String> {
        for (word, choice) in [("no", SetupPairing::No), ("show", SetupPairing::Show)] {
            if text.eq_ignore_ascii_case(word) {
                return Ok(choice);
            }
        }
        let code = text.parse::<PairingCode>();
        code.map(SetupPairing::Join).map_err(|error| format!("{error}; `show` and `no` are the other values"))
    }
}

/// Whether it starts at every boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum BootChoice {
    On,
    Off,
}

impl FromStr for BootChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<BootChoice, String> {
        yes_or_no(text).map(|is_yes| if is_yes { BootChoice::On } else { BootChoice::Off })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pairing_is_a_code_or_one_of_two_words() {
        assert_eq!("NO".parse(), Ok(SetupPairing::No));
        assert_eq!("show".parse(), Ok(SetupPairing::Show));
        let code = "417-3815-9062";
        assert_eq!(code.parse(), Ok(SetupPairing::Join(code.parse().unwrap())));
        assert!("maybe".parse::<SetupPairing>().unwrap_err().contains("`show` and `no`"));
        assert!("".parse::<SetupPairing>().is_err(), "a node's machine needs a code");
    }
}
