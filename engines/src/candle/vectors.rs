//! The states of a text's tokens, in a cache of their own.

use std::sync::Arc;

use baton_schemas::embed::Pooling;
use baton_schemas::{EngineError, Token};

use super::cache::SlotCache;
use super::forward::{SlotRows, Transformer};
use crate::serving::memory::available_memory;
use crate::serving::text_vectors::TextModel;

/// Owns the KV of the text that is computed.
pub(crate) struct CandleTexts {
    model: Arc<Transformer>,
    pooling: Pooling,
    bytes_per_token: u64,
    /// One slot.
    cache: [SlotCache; 1],
    /// The pooled states of the tokens that are computed.
    pooled: Vec<f32>,
}

impl CandleTexts {
    pub(super) fn new(model: Arc<Transformer>, pooling: Pooling, bytes_per_token: u64) -> Self {
        CandleTexts { model, pooling, bytes_per_token, cache: [SlotCache::default()], pooled: Vec::new() }
    }
}

impl TextModel for CandleTexts {
    fn add(&mut self, text: &[Token], from: usize) -> Result<(), EngineError> {
        let needed = self.bytes_per_token.saturating_mul(text.len() as u64 + super::cache::GROWTH as u64);
        if from == 0 && needed > available_memory() {
            return Err(EngineError::Unavailable { reason: "no vectors can be computed: memory is short".into() });
        }
        let model = &self.model;
        let n_rows = text.len() - from;
        let wanted: Vec<u32> = match self.pooling {
            Pooling::Mean => (0..n_rows as u32).collect(),
            Pooling::Cls => vec![0],
            Pooling::Last => vec![n_rows as u32 - 1],
        };
        let part = SlotRows { slot: 0, rows: 0..n_rows, from };
        let reserved = self.cache[0].reserve(text.len(), &model.shape, &model.device);
        let states = reserved.and_then(|()| model.states(&text[from..], &[part], &mut self.cache));
        let states: Vec<f32> = states
            .and_then(|states| model.normed(&states, &wanted)?.flatten_all()?.to_vec1())
            .map_err(EngineError::internal)?;
        let n_embd = model.shape.n_embd;
        match self.pooling {
            Pooling::Last => self.pooled = states,
            Pooling::Cls if from == 0 => self.pooled = states,
            Pooling::Cls => {}
            // The sum does, since its length is set to 1 in the end.
            Pooling::Mean => {
                self.pooled.resize(n_embd, 0.0);
                for state in states.chunks(n_embd) {
                    self.pooled.iter_mut().zip(state).for_each(|(sum, value)| *sum += value);
                }
            }
        }
        Ok(())
    }

    fn pooled(&self) -> &[f32] {
        &self.pooled
    }

    fn forget(&mut self) {
        self.cache = [SlotCache::default()];
        self.pooled.clear();
    }
}
