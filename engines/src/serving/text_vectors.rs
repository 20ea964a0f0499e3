//! Computes vectors of texts between the steps of generation: one text after another, piece by piece.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use baton_model::gguf::Gguf;
use baton_schemas::embed::{EmbedEvent, EmbeddingFacts, Pooling};
use baton_schemas::{EngineError, Token};

use super::jobs::{EmbedJob, EngineLoad};
use super::vectors::Vectors;
use crate::embed::normalised;

/// The most tokens of a text: the limit of OpenAI's models.
const MAX_TEXT: u32 = 8_192;

/// Computes one text at a time, in KV of its own, so that no slot loses KV to it.
pub(crate) trait TextModel {
    /// Computes the tokens of a text after the first `from`, which are computed, and pools their states.
    fn add(&mut self, text: &[Token], from: usize) -> Result<(), EngineError>;

    /// The pooled state of the text's tokens. Its length does not matter.
    fn pooled(&self) -> &[f32];

    /// Drops the text.
    fn forget(&mut self);
}

/// Owns the queue of texts.
pub(crate) struct TextVectors<M> {
    model: M,
    /// Tokens of a step without streams.
    n_step: usize,
    shared: Arc<EngineLoad>,
    jobs: VecDeque<EmbedJob>,
    /// The tokens of the first job's first text that are computed.
    n_done: usize,
}

/// The facts about a model's vectors. A file that names no pooling holds a model that was not trained for embeddings. Its
/// vector is the state of the last token, the only one that attends to the whole text.
pub(crate) fn facts(gguf: &Gguf, n_embd: usize, n_ctx: u32) -> EmbeddingFacts {
    // llama.cpp's numbers.
    let named = match gguf.pooling_type() {
        Some(1) => Some(Pooling::Mean),
        Some(2) => Some(Pooling::Cls),
        Some(3) => Some(Pooling::Last),
        _ => None,
    };
    EmbeddingFacts {
        n_embd: n_embd as u32,
        n_ctx: n_ctx.min(MAX_TEXT),
        pooling: named.unwrap_or(Pooling::Last),
        is_trained: named.is_some(),
    }
}

impl<M: TextModel> TextVectors<M> {
    /// A step cannot be interrupted, so it is as small as one of a prompt: `n_step` tokens.
    pub(crate) fn new(model: M, n_step: usize, shared: Arc<EngineLoad>) -> Self {
        TextVectors { model, n_step, shared, jobs: VecDeque::new(), n_done: 0 }
    }

    /// Drops the jobs whose readers have left, and frees their queue places.
    fn drop_cancelled(&mut self) {
        if self.jobs.front().is_some_and(|job| job.events.is_closed()) {
            self.forget();
        }
        let n_before = self.jobs.len();
        self.jobs.retain(|job| !job.events.is_closed());
        self.shared.n_queued.fetch_sub(n_before - self.jobs.len(), Ordering::AcqRel);
    }

    fn forget(&mut self) {
        self.n_done = 0;
        self.model.forget();
    }

    /// Computes a piece of the first text, at most `limit` tokens. Returns the tokens that it had.
    fn compute(&mut self, limit: usize) -> Option<usize> {
        let text = self.jobs.front_mut()?.begin()?;
        let from = self.n_done;
        let end = text.len().min(from + limit);
        let is_whole = end == text.len();
        if let Err(error) = self.model.add(&text[..end], from) {
            self.forget();
            if let Some(mut job) = self.jobs.pop_front() {
                job.inputs.clear();
                job.send(Err(error));
                self.shared.n_queued.fetch_sub(1, Ordering::AcqRel);
            }
            return Some(end - from);
        }
        self.n_done = end;
        if is_whole {
            self.deliver();
        }
        Some(end - from)
    }

    /// Sends the vector of the first text, whose tokens are all computed.
    fn deliver(&mut self) {
        let vector = normalised(self.model.pooled());
        self.forget();
        let Some(mut job) = self.jobs.pop_front() else { return };
        let is_error = vector.is_err();
        job.inputs.pop_front();
        job.send(vector.map(EmbedEvent::Vector));
        if is_error || job.inputs.is_empty() {
            if !is_error {
                job.finish();
            }
            self.shared.n_queued.fetch_sub(1, Ordering::AcqRel);
        } else {
            // Each request gets its turn to be first.
            self.jobs.push_back(job);
        }
    }
}

impl<M: TextModel> Vectors for TextVectors<M> {
    fn push(&mut self, job: EmbedJob) {
        self.jobs.push_back(job);
    }

    fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    fn backlog(&self) -> usize {
        self.jobs.iter().flat_map(|job| &job.inputs).map(Vec::len).sum::<usize>() - self.n_done
    }

    fn step(&mut self, limit: Option<usize>) {
        self.drop_cancelled();
        let mut left = limit.map_or(self.n_step, |limit| limit.clamp(1, self.n_step));
        while left > 0
            && let Some(n) = self.compute(left)
        {
            left = left.saturating_sub(n.max(1));
        }
    }
}
