//! Contexts that prefill chunk by chunk and export the chunks.

use std::ops::Range;
use std::path::Path;

use baton_engines::llama::checkpoint;
use baton_engines::llama::import_state::ImportState;
use baton_engines::llama::placement::ImportBlob;
use baton_engines::llama::probe::{NoHandoff, probe};
use baton_engines::llama::reference::Reference;
use baton_engines::llama::transfer::KvTransfer;
use baton_engines::registry::EngineOptions;
use baton_model::gguf::Gguf;
use baton_model::options::CacheTypes;
use baton_schemas::kv::{Chunk, LayerRows, SectionRows, StatePart};
use bytes::Bytes;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::token::LlamaToken;

use crate::models;

pub(crate) const N_SLOTS: u32 = 2;
pub(crate) const SCRATCH: i32 = N_SLOTS as i32;
const N_UBATCH: u32 = 512;

/// A loaded model.
pub(crate) struct Rig {
    reference: Reference,
    gguf: Gguf,
}

impl Rig {
    pub(crate) fn load(model: &Path) -> Rig {
        Self::with_caches(model, CacheTypes::default())
    }

    /// The same with KV of these types.
    pub(crate) fn with_caches(model: &Path, cache_types: CacheTypes) -> Rig {
        let config = EngineOptions {
            cache_types,
            n_slots: Some(N_SLOTS),
            n_threads: Some(1),
            n_ubatch: Some(N_UBATCH),
            ..models::of_llama(model)
        };
        Rig { reference: Reference::load(config).unwrap(), gguf: Gguf::open(model).unwrap() }
    }

    /// Creates and probes an engine's context with `n_cells`.
    pub(crate) fn try_context(&self, n_cells: u32) -> Result<Context<'_>, NoHandoff> {
        let mut ctx = self.reference.context(n_cells).unwrap();
        let kv = probe(&mut ctx, self.reference.model(), &self.gguf, N_SLOTS, None)?.shared()?;
        Ok(Context { ctx, kv })
    }

    pub(crate) fn context(&self, n_cells: u32) -> Context<'_> {
        self.try_context(n_cells).unwrap()
    }

    /// A prompt of `n` tokens of prose.
    pub(crate) fn prose(&self, n: usize) -> Vec<u32> {
        let towns = ["Bergen", "Lisbon", "Kyoto", "Quito", "Dakar"];
        let text =
            (0..).map(|i| format!("On day {i} the ship sailed from {}, carrying {} crates. ", towns[i % 5], i * 7));
        let mut tokens = self.reference.tokenize(&text.take(n / 10 + 10).collect::<String>());
        assert!(tokens.len() >= n);
        tokens.truncate(n);
        tokens
    }

    /// `n` pseudo-random tokens, for models without a tokenizer.
    pub(crate) fn noise(&self, n: usize) -> Vec<u32> {
        let n_vocab = self.reference.model().n_vocab() as u64;
        (1..=n as u64).map(|i| (i.wrapping_mul(6_364_136_223_846_793_005) >> 33) % n_vocab).map(|t| t as u32).collect()
    }
}

/// A context and its transfer.
pub(crate) struct Context<'m> {
    pub(crate) ctx: LlamaContext<'m>,
    pub(crate) kv: KvTransfer,
}

impl Context<'_> {
    /// Computes tokens as one ubatch at position `p0` of a slot. Returns the logits of the last one.
    pub(crate) fn compute(&mut self, slot: u32, p0: u32, tokens: &[u32]) -> Vec<f32> {
        let mut batch = LlamaBatch::new(tokens.len(), 1);
        for (i, &t) in tokens.iter().enumerate() {
            let last = i + 1 == tokens.len();
            batch.add(LlamaToken(t as i32), (p0 as usize + i) as i32, &[slot as i32], last).unwrap();
        }
        self.ctx.decode(&mut batch).unwrap();
        self.ctx.get_logits_ith(tokens.len() as i32 - 1).to_vec()
    }

    /// Computes tokens one by one. Returns the logits of each.
    pub(crate) fn steps(&mut self, slot: u32, p0: u32, tokens: &[u32]) -> Vec<Vec<f32>> {
        (p0..).zip(tokens).map(|(position, token)| self.compute(slot, position, &[*token])).collect()
    }

    /// Computes the tokens of `positions`, `n_chunk` at a time.
    pub(crate) fn compute_chunks(&mut self, slot: u32, tokens: &[u32], positions: Range<u32>, n_chunk: usize) {
        for p0 in positions.clone().step_by(n_chunk) {
            let p1 = positions.end.min(p0 + n_chunk as u32);
            self.compute(slot, p0, &tokens[p0 as usize..p1 as usize]);
        }
    }

    /// Prefills all tokens but the last, `n_chunk` at a time, and exports each chunk as soon as it is computed.
    pub(crate) fn prefill(&mut self, slot: u32, tokens: &[u32], n_chunk: usize) -> Vec<Chunk> {
        let prefill = &tokens[..tokens.len() - 1];
        let chunks = prefill.chunks(n_chunk).enumerate().map(|(i, chunk)| {
            let p0 = (i * n_chunk) as u32;
            self.compute(slot, p0, chunk);
            self.export(slot, p0, p0 + chunk.len() as u32)
        });
        chunks.collect()
    }

    pub(crate) fn export(&mut self, slot: u32, p0: u32, p1: u32) -> Chunk {
        let chunk = self.kv.export(&mut self.ctx, slot, p0..p1, p1).unwrap();
        assert_eq!(self.ctx.kv_cache_seq_pos_max(SCRATCH), -1, "scratch was left full");
        chunk
    }

    pub(crate) fn blob(&self, chunk: &Chunk) -> ImportBlob {
        ImportBlob::build(chunk, self.kv.form()).unwrap()
    }

    pub(crate) fn import(&mut self, slot: u32, chunks: &[Chunk]) {
        for chunk in chunks {
            let blob = self.blob(chunk);
            self.kv.import(&mut self.ctx, slot, chunk.p0, &blob).unwrap();
            assert_eq!(self.ctx.kv_cache_seq_pos_max(SCRATCH), -1, "scratch was left full");
        }
    }

    pub(crate) fn export_state(&mut self, slot: u32, position: u32) -> StatePart {
        self.kv.export_state(&self.ctx, slot, position).unwrap()
    }

    pub(crate) fn import_state(&mut self, slot: u32, part: &StatePart) {
        let states = ImportState::build(part, self.kv.layout()).unwrap();
        self.kv.import_state(&mut self.ctx, slot, &states).unwrap();
    }

    pub(crate) fn checkpoint(&mut self, slot: u32) -> Bytes {
        checkpoint::take(&self.ctx, slot).unwrap()
    }

    pub(crate) fn return_to(&mut self, slot: u32, n_keep: u32, checkpoint: &Bytes) {
        checkpoint::return_to(&mut self.ctx, slot, n_keep, checkpoint).unwrap();
    }

    pub(crate) fn has_states(&self) -> bool {
        !self.kv.layout().states.is_empty()
    }

    pub(crate) fn can_continue(&self, slot: u32, n_present: usize) -> bool {
        self.kv.can_continue(&self.ctx, slot, n_present as u32)
    }
}

/// Checks that the rows of `part` equal those of `whole` at the same positions, as far as `whole` has them.
pub(crate) fn assert_part_of(part: &Chunk, whole: &Chunk) {
    for (part_rows, whole_rows) in part.sections.iter().zip(&whole.sections) {
        let positions = part_rows.start.max(whole_rows.start)..part.p1;
        if positions.is_empty() {
            continue;
        }
        for (a, b) in part_rows.layers.iter().zip(&whole_rows.layers) {
            for (a, b) in [(&a.k, &b.k), (&a.v, &b.v)] {
                let a = slice(a, part_rows.start..part.p1, &positions);
                assert!(a == slice(b, whole_rows.start..whole.p1, &positions), "rows of {positions:?} differ");
            }
        }
    }
}

/// The rows at `wanted`, from rows at `positions`.
fn slice<'r>(rows: &'r [u8], positions: Range<u32>, wanted: &Range<u32>) -> &'r [u8] {
    let row_bytes = rows.len() / positions.len();
    let row = |position: u32| (position - positions.start) as usize * row_bytes;
    &rows[row(wanted.start)..row(wanted.end)]
}

/// The chunk without its windowed rows.
pub(crate) fn without_window(chunk: &Chunk) -> Chunk {
    let mut chunk = chunk.clone();
    for SectionRows { start, layers } in chunk.sections.iter_mut().skip(1) {
        *start = chunk.p1;
        layers.fill(LayerRows { k: Default::default(), v: Default::default() });
    }
    chunk
}

/// Kullback-Leibler divergence of two next-token distributions, in nats.
pub(crate) fn divergence(logits: &[f32], other: &[f32]) -> f64 {
    let p = log_softmax(logits);
    let q = log_softmax(other);
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
    logits.iter().map(|l| f64::from(l - max) - sum.ln()).collect()
}
