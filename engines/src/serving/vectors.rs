//! The vectors of texts, which are computed between the steps of generation.

use std::sync::mpsc::{Receiver, TryRecvError};

use super::jobs::{EmbedJob, SchedulerMessage};

/// Computes vectors of texts in the scheduler's thread.
pub(crate) trait Vectors {
    fn push(&mut self, job: EmbedJob);

    fn is_idle(&self) -> bool;

    /// The number of tokens still to be computed.
    fn backlog(&self) -> usize;

    /// Computes at most `limit` tokens, or one longer text that cannot be divided.
    fn step(&mut self, limit: Option<usize>);
}

/// Runs until every handle is dropped. The loop of a model that only gives vectors.
pub(super) fn run(mut vectors: impl Vectors, messages: &Receiver<SchedulerMessage>) {
    // The engine refuses all other requests before they get here.
    let take = |vectors: &mut dyn Vectors, message| {
        if let SchedulerMessage::Embed(job) = message {
            vectors.push(*job);
        }
    };
    loop {
        if vectors.is_idle() {
            match messages.recv() {
                Ok(message) => take(&mut vectors, message),
                Err(_) => return,
            }
        }
        loop {
            match messages.try_recv() {
                Ok(message) => take(&mut vectors, message),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        vectors.step(None);
    }
}
