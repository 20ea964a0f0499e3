//! The fault for tests: the process aborts on one text.

use baton_schemas::Token;

use super::text;
use crate::engine_options::{SimAbort, SimWork};

/// The tokens of a reply that come before an abort during [`SimWork::Decode`].
pub(super) const DECODE_TOKENS: usize = 8;

impl SimAbort {
    /// Aborts if this work on these tokens is the fault.
    pub(super) fn check(fault: Option<&SimAbort>, work: SimWork, tokens: &[Token]) {
        let Some(fault) = fault.filter(|fault| fault.during == work) else { return };
        if String::from_utf8_lossy(&text::bytes(tokens)).contains(&fault.text) {
            std::process::abort();
        }
    }
}
