//! The vectors of texts, which are computed between the steps of generation.

use super::jobs::EmbedJob;

/// Computes vectors of texts in the scheduler's thread.
pub(crate) trait Vectors {
    fn push(&mut self, job: EmbedJob);

    fn is_idle(&self) -> bool;

    /// The number of tokens still to be computed.
    fn backlog(&self) -> usize;

    /// Computes at most `limit` tokens, or one longer text that cannot be divided.
    fn step(&mut self, limit: Option<usize>);
}
