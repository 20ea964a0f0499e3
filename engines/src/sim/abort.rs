//! A fault for tests: the process aborts on one text, as a real engine does on a bug in C++.

use baton_schemas::Token;

use super::text;

/// The variable that sets the fault of an engine's process; see [`SimAbort::parse`].
pub const ABORT_VARIABLE: &str = "BATON_SIM_ABORT";

/// Aborts the process during this work on a text that contains `text`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimAbort {
    pub during: SimWork,
    pub text: String,
}

/// Some work of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
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
        self.into()
    }
}

impl SimAbort {
    /// Parses `WORK:TEXT`, with a word of [`SimWork`]. Errors: what is wrong.
    pub fn parse(value: &str) -> Result<SimAbort, String> {
        let (word, text) = value.split_once(':').filter(|(_, text)| !text.is_empty()).ok_or("must be WORK:TEXT")?;
        let during = SimWork::ALL.into_iter().find(|work| work.as_str() == word).ok_or_else(|| {
            let known = SimWork::ALL.map(SimWork::as_str).join(", ");
            format!("unknown work {word:?}; must be one of {known}")
        })?;
        Ok(SimAbort { during, text: text.to_owned() })
    }

    /// The value that [`SimAbort::parse`] reads.
    pub fn to_value(&self) -> String {
        format!("{}:{}", self.during.as_str(), self.text)
    }

    /// Aborts if this work on these tokens is the fault.
    pub(super) fn check(fault: Option<&SimAbort>, work: SimWork, tokens: &[Token]) {
        let Some(fault) = fault.filter(|fault| fault.during == work) else { return };
        if String::from_utf8_lossy(&text::bytes(tokens)).contains(&fault.text) {
            std::process::abort();
        }
    }
}
