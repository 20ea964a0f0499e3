//! The states of a text's tokens, which the worker computes in a slot of their own.

use baton_schemas::{EngineError, Token};

use super::worker::{PythonFailure, Request, SharedWorker};
use crate::serving::text_vectors::TextModel;

/// Knows the state of the last token: the only pooling of these models, which were trained to generate.
pub(crate) struct MlxTexts {
    worker: SharedWorker,
    n_embd: usize,
    /// The worker's slot for texts.
    slot: usize,
    /// How many workers were lost when the text was begun.
    n_lost: u64,
    last: Vec<f32>,
}

impl MlxTexts {
    /// `slot` is the one after those of sequences.
    pub(super) fn new(worker: SharedWorker, n_embd: usize, slot: usize) -> Self {
        MlxTexts { worker, n_embd, slot, n_lost: 0, last: Vec::new() }
    }
}

impl TextModel for MlxTexts {
    fn add(&mut self, text: &[Token], from: usize) -> Result<(), EngineError> {
        let lost = || EngineError::Unavailable { reason: "the engine's worker was lost, and is started again".into() };
        let mut worker = self.worker.borrow_mut();
        if from == 0 {
            self.n_lost = worker.n_lost;
        } else if self.n_lost != worker.n_lost {
            return Err(lost());
        }
        let tokens: Vec<u8> = text[from..].iter().flat_map(|token| token.to_le_bytes()).collect();
        let state = worker.call(&Request::Embed { from }, &[&tokens], self.n_embd * size_of::<f32>());
        let state = state.map_err(|error| match error {
            PythonFailure::Refused(why) => EngineError::internal(why),
            PythonFailure::Lost(_) => lost(),
        })?;
        self.last.clear();
        self.last.extend(state.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        Ok(())
    }

    fn pooled(&self) -> &[f32] {
        &self.last
    }

    fn forget(&mut self) {
        self.last.clear();
        let mut worker = self.worker.borrow_mut();
        // A worker that is started later has no text.
        if worker.process_id().is_some()
            && let Err(error) = worker.call(&Request::Cut { slot: self.slot, n: 0 }, &[], 0)
        {
            tracing::warn!(%error, "the KV of a text stays in the worker until the next text");
        }
    }
}
