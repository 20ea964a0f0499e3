//! The rows of a batch of guesses.

use super::super::context::BatchToken;

/// The slots that have no row in a batch. Their KV goes first if there are no cells for it.
pub(super) fn slots_without_rows(batch: &[BatchToken], n_slots: usize) -> Vec<usize> {
    (0..n_slots).filter(|slot| batch.iter().all(|row| row.slot as usize != *slot)).collect()
}
