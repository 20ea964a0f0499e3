//! Computes vectors of texts between the steps of generation: each text in a cache of its own, piece by piece, so that no
//! slot loses KV to it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use baton_schemas::embed::{EmbedEvent, EmbeddingFacts, Pooling};
use baton_schemas::{EngineError, Token};

use super::cache::SlotCache;
use super::forward::{Model, SlotRows};
use crate::embed::normalised;
use crate::gguf::Gguf;
use crate::serving::jobs::{EmbedJob, EngineLoad};
use crate::serving::memory::available_memory;
use crate::serving::vectors::Vectors;

/// The most tokens of a text: the limit of OpenAI's models.
const MAX_TEXT: u32 = 8_192;

/// Owns the queue of texts, and the KV of the one that is computed.
pub(super) struct TextVectors {
    model: Arc<Model>,
    pooling: Pooling,
    /// Tokens of a step without streams.
    n_step: usize,
    bytes_per_token: u64,
    shared: Arc<EngineLoad>,
    jobs: VecDeque<EmbedJob>,
    /// The KV of the first job's first text: one slot.
    cache: [SlotCache; 1],
    /// The pooled states of the tokens that are computed.
    pooled: Vec<f32>,
}

/// The facts about a model's vectors. A file that names no pooling holds a model that was not trained for embeddings; its
/// vector is the state of the last token, the only one that attends to the whole text.
pub(super) fn facts(gguf: &Gguf, n_embd: usize, n_ctx: u32) -> EmbeddingFacts {
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

impl TextVectors {
    pub(super) fn new(
        model: Arc<Model>,
        pooling: Pooling,
        n_step: usize,
        bytes_per_token: u64,
        shared: Arc<EngineLoad>,
    ) -> Self {
        let cache = [SlotCache::default()];
        TextVectors {
            model,
            pooling,
            n_step,
            bytes_per_token,
            shared,
            jobs: VecDeque::new(),
            cache,
            pooled: Vec::new(),
        }
    }

    /// Drops the jobs whose readers have left, and frees their queue places.
    fn drop_cancelled(&mut self) {
        if self.jobs.front().is_some_and(|job| job.events.is_closed()) {
            self.forget();
        }
        self.retain(|job| !job.events.is_closed());
    }

    fn retain(&mut self, keep: impl FnMut(&EmbedJob) -> bool) {
        let n_before = self.jobs.len();
        self.jobs.retain(keep);
        self.shared.n_queued.fetch_sub(n_before - self.jobs.len(), Ordering::AcqRel);
    }

    fn forget(&mut self) {
        self.cache = [SlotCache::default()];
        self.pooled.clear();
    }

    /// Computes a piece of the first text, at most `limit` tokens. Returns the tokens that it had.
    fn compute(&mut self, limit: usize) -> Option<usize> {
        let text = self.jobs.front_mut()?.begin()?.clone();
        let from = self.cache[0].n;
        let end = text.len().min(from + limit);
        if let Err(error) = self.add(&text[..end]) {
            self.forget();
            if let Some(mut job) = self.jobs.pop_front() {
                job.inputs.clear();
                job.send(Err(error));
                self.shared.n_queued.fetch_sub(1, Ordering::AcqRel);
            }
        } else if end == text.len() {
            self.deliver();
        }
        Some(end - from)
    }

    /// Computes the tokens after those that the cache holds, and pools their states.
    fn add(&mut self, tokens: &[Token]) -> Result<(), EngineError> {
        let from = self.cache[0].n;
        let needed = self.bytes_per_token.saturating_mul(tokens.len() as u64 + super::cache::GROWTH as u64);
        if from == 0 && needed > available_memory() {
            return Err(EngineError::Unavailable { reason: "no vectors can be computed: memory is short".into() });
        }
        let model = &self.model;
        let n_rows = tokens.len() - from;
        let wanted: Vec<u32> = match self.pooling {
            Pooling::Mean => (0..n_rows as u32).collect(),
            Pooling::Cls => vec![0],
            Pooling::Last => vec![n_rows as u32 - 1],
        };
        let part = SlotRows { slot: 0, rows: 0..n_rows, from };
        let reserved = self.cache[0].reserve(tokens.len(), &model.shape, &model.device);
        let states = reserved.and_then(|()| model.states(&tokens[from..], &[part], &mut self.cache));
        let states: Vec<f32> = states
            .and_then(|states| model.normed(&states, &wanted)?.flatten_all()?.to_vec1())
            .map_err(EngineError::internal)?;
        let n_embd = model.shape.n_embd;
        match self.pooling {
            Pooling::Last => self.pooled = states,
            Pooling::Cls if from == 0 => self.pooled = states,
            Pooling::Cls => {}
            // Its length is set to 1 in the end, so that the sum does.
            Pooling::Mean => {
                self.pooled.resize(n_embd, 0.0);
                for state in states.chunks(n_embd) {
                    self.pooled.iter_mut().zip(state).for_each(|(sum, value)| *sum += value);
                }
            }
        }
        Ok(())
    }

    /// Sends the vector of the first text, whose tokens are all computed.
    fn deliver(&mut self) {
        let vector = normalised(&self.pooled);
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

impl Vectors for TextVectors {
    fn push(&mut self, job: EmbedJob) {
        self.jobs.push_back(job);
    }

    fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    fn backlog(&self) -> usize {
        self.jobs.iter().flat_map(|job| &job.inputs).map(Vec::len).sum::<usize>() - self.cache[0].n
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
