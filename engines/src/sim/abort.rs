//! A fault for tests: the process aborts on one text, as a real engine does on a bug in C++.

use baton_schemas::Token;

use super::text;

/// The variable that sets the fault of a node's process: `WORK:TEXT`, with a word of [`SimWork`].
pub const ABORT_VARIABLE: &str = "BATON_SIM_ABORT";

/// Aborts the process during this work on a text that contains `text`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimAbort {
    pub during: SimWork,
    pub text: String,
}

/// Some work of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SimWork {
    /// Rendering and tokenizing.
    Tokenize,
    /// Computing a prompt, for itself or for another node.
    Prefill,
    /// Generating, after `DECODE_TOKENS` tokens.
    Decode,
    /// Computing vectors.
    Embed,
}

/// The tokens of a reply that come before the abort.
pub(super) const DECODE_TOKENS: usize = 8;

impl SimWork {
    const ALL: [SimWork; 4] = [SimWork::Tokenize, SimWork::Prefill, SimWork::Decode, SimWork::Embed];

    fn as_str(self) -> &'static str {
        match self {
            SimWork::Tokenize => "tokenize",
            SimWork::Prefill => "prefill",
            SimWork::Decode => "decode",
            SimWork::Embed => "embed",
        }
    }
}

impl SimAbort {
    /// Reads [`ABORT_VARIABLE`].
    pub fn from_environment() -> Option<SimAbort> {
        let value = std::env::var(ABORT_VARIABLE).ok()?;
        let (word, text) = value.split_once(':')?;
        let during = SimWork::ALL.into_iter().find(|work| work.as_str() == word)?;
        Some(SimAbort { during, text: text.to_owned() })
    }

    /// Aborts if this work on these tokens is the fault.
    pub(super) fn check(fault: Option<&SimAbort>, work: SimWork, tokens: &[Token]) {
        let Some(fault) = fault.filter(|fault| fault.during == work) else { return };
        if String::from_utf8_lossy(&text::bytes(tokens)).contains(&fault.text) {
            std::process::abort();
        }
    }
}
