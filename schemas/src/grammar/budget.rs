//! How much the grammars of a request may be written as.

use super::{GrammarError, MAX_GRAMMAR};
use crate::constraint::Rule;

/// The most bytes that all grammars of a request may be written as.
const MAX_WRITTEN: usize = 16 * MAX_GRAMMAR;

/// The bytes that the grammars of a request may still be written as.
#[derive(Debug)]
pub(crate) struct WriteBudget {
    left: usize,
}

impl Default for WriteBudget {
    fn default() -> Self {
        WriteBudget { left: MAX_WRITTEN }
    }
}

impl WriteBudget {
    /// Takes the bytes of a text that is about to be written. Errors: there are not as many left.
    pub(super) fn take(&mut self, n_bytes: usize) -> Result<(), GrammarError> {
        self.left = self.left.checked_sub(n_bytes).ok_or(GrammarError::TooLarge)?;
        Ok(())
    }

    /// Takes the bytes of one [`Rule`], without its texts.
    pub(super) fn take_rule(&mut self) -> Result<(), GrammarError> {
        self.take(size_of::<Rule>())
    }

    /// Returns the bytes that were taken.
    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        MAX_WRITTEN - self.left
    }
}
