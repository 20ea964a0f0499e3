//! What another KV does to a model's predictions: the KV of a prompt, out of the model and into it again, and the logits
//! of tokens that are given ("teacher-forced").
//!
//! `baton-bench codec` compares codecs with it.

use baton_model::gguf::Gguf;
use baton_schemas::Token;
use baton_schemas::kv::{Chunk, KeyRotation, KvLayout, StatePart};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;

use super::import_state::ImportState;
use super::placement::ImportBlob;
use super::probe::{self, NoHandoff};
use super::reference::Reference;
use super::transfer::{self, KvTransfer, TransferError};
use super::vocabulary::token;
use crate::serving::LoadError;

/// The slot of all prompts, one at a time.
const SLOT: u32 = 0;

/// Why a trial failed.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// The model or its context cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The model's KV cannot be handed over.
    #[error(transparent)]
    NoHandoff(#[from] NoHandoff),
    /// The KV cannot be exported or imported.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// llama.cpp did not compute a batch.
    #[error("a batch of {0} tokens cannot be computed")]
    Decode(usize),
}

/// A prompt's KV, out of the model.
#[derive(Debug, Clone)]
pub struct PromptKv {
    /// Its rows.
    pub chunks: Vec<Chunk>,
    /// The states of its end, of a model with recurrent layers.
    pub state: Option<StatePart>,
}

impl PromptKv {
    /// Returns the number of bytes of all rows and states.
    pub fn n_bytes(&self) -> usize {
        self.chunks.iter().map(Chunk::n_bytes).sum::<usize>() + self.state.as_ref().map_or(0, StatePart::n_bytes)
    }
}

/// A context of one slot, which is empty between calls.
pub struct KvTrial<'m> {
    context: LlamaContext<'m>,
    transfer: KvTransfer,
    rotation: Option<KeyRotation>,
}

impl<'m> KvTrial<'m> {
    /// Creates a context of `n_cells` tokens. The model's options must have one slot, and ubatches as large as the
    /// largest batch.
    pub fn new(model: &'m Reference, n_cells: u32) -> Result<KvTrial<'m>, TrialError> {
        let options = model.options();
        let gguf = Gguf::open(options.path()?).map_err(LoadError::from)?;
        let mut context = model.context(n_cells)?;
        let transfer = probe::probe(&mut context, model.model(), &gguf, options.slots(), None)?.shared()?;
        let rotation = gguf.key_rotation(options.rope, transfer.layout()).ok();
        Ok(KvTrial { context, transfer, rotation })
    }

    /// The shape of the KV.
    pub fn layout(&self) -> &KvLayout {
        self.transfer.layout()
    }

    /// How K is rotated, if that can be undone.
    pub fn rotation(&self) -> Option<&KeyRotation> {
        self.rotation.as_ref()
    }

    /// Computes a prompt `n_chunk` tokens at a time, and exports each chunk, and the states of the end.
    pub fn prefill(&mut self, prompt: &[Token], n_chunk: usize) -> Result<PromptKv, TrialError> {
        let mut chunks = Vec::new();
        let mut p0 = 0;
        for tokens in prompt.chunks(n_chunk.max(1)) {
            self.compute(p0, tokens, false)?;
            let p1 = p0 + tokens.len() as u32;
            chunks.push(self.transfer.export(&mut self.context, SLOT, p0..p1, p1)?);
            p0 = p1;
        }
        let has_states = !self.layout().states.is_empty();
        let state = has_states.then(|| self.transfer.export_state(&self.context, SLOT, p0)).transpose()?;
        transfer::clear(&mut self.context, SLOT);
        Ok(PromptKv { chunks, state })
    }

    /// Imports a prompt's KV and computes `tokens` after it. Returns the logits after each token, `[n_tokens][n_vocab]`.
    pub fn logits(&mut self, prompt: &PromptKv, tokens: &[Token]) -> Result<Vec<Vec<f32>>, TrialError> {
        let mut p0 = 0;
        for chunk in &prompt.chunks {
            let blob = ImportBlob::build(chunk, self.transfer.form()).map_err(TransferError::from)?;
            self.transfer.import(&mut self.context, SLOT, p0, &blob)?;
            p0 = chunk.p1;
        }
        if let Some(part) = &prompt.state {
            let states = ImportState::build(part, self.layout()).map_err(TransferError::from)?;
            self.transfer.import_state(&mut self.context, SLOT, &states)?;
        }
        self.compute(p0, tokens, true)?;
        let logits = (0..tokens.len()).map(|i| self.context.get_logits_ith(i as i32).to_vec()).collect();
        transfer::clear(&mut self.context, SLOT);
        Ok(logits)
    }

    fn compute(&mut self, p0: u32, tokens: &[Token], has_logits: bool) -> Result<(), TrialError> {
        let failed = || TrialError::Decode(tokens.len());
        let mut batch = LlamaBatch::new(tokens.len(), 1);
        for (position, &t) in (p0..).zip(tokens) {
            batch.add(token(t), position.cast_signed(), &[SLOT.cast_signed()], has_logits).map_err(|_| failed())?;
        }
        self.context.decode(&mut batch).map_err(|_| failed())?;
        self.context.synchronize();
        Ok(())
    }
}
