//! Finds the layout of a loaded model's KV cache by computing one token.
//!
//! The file's header does not determine what llama.cpp stores, which also depends on layers that share a cache, latent
//! attention and value types. So one position is computed and its state is parsed. Models whose state is not one row
//! for each position are served without handoffs, and the reason is logged.

use baton_model::gguf::Gguf;
use baton_schemas::kv::{Dtype, KvLayout, LayerShape, LayoutError, RopePairing, Rows, Section};
use bytes::Bytes;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::{LlamaModel, RopeType};
use llama_cpp_2::token::LlamaToken;

use super::blob::{self, BlobError, ParsedBlob, ParsedTensor};
use super::export_buffer::ExportBuffer;
use super::state::{self, StateError};
use super::transfer::{self, KvTransfer};

/// Why a model's KV cannot be handed over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoHandoff {
    /// Recurrent models such as Mamba and RWKV keep only the state of the last position.
    #[error("recurrent state cannot be sliced")]
    Recurrent,
    /// Some layers are recurrent.
    #[error("some layers are recurrent: their state cannot be sliced")]
    Hybrid,
    /// Positions of vision models have several parts, which a chunk does not carry.
    #[error("positions have several axes (M-RoPE)")]
    MultiAxis,
    /// The probe's token was not computed.
    #[error("the probe's token cannot be computed: {0}")]
    Decode(String),
    /// The state cannot be read.
    #[error(transparent)]
    State(#[from] StateError),
    /// The state has an unknown format, such as an indexer cache or a compressed cache.
    #[error("the KV state is of an unknown kind: {0}")]
    UnknownState(BlobError),
    /// The cache is quantized, or of a type that cannot be handed over.
    #[error("the KV cache is of ggml type {0}; only f32, f16 and bf16 can be handed over")]
    ValueType(i32),
    /// There are several caches, and the file does not give the window of the second one.
    #[error("{n_sections} caches, and the model's file names no sliding window")]
    UnknownWindow {
        /// The number of caches.
        n_sections: usize,
    },
    /// The cache's shape exceeds the limits of a layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// Finds the layout of the context's KV and returns what transfers it. The context must be empty, with sequences for
/// `n_slots` slots and one for scratch; it is empty again afterwards. `gpu` is ggml's index of the device that holds the
/// cache.
pub fn probe(
    ctx: &mut LlamaContext<'_>,
    model: &LlamaModel,
    gguf: &Gguf,
    n_slots: u32,
    gpu: Option<usize>,
) -> Result<KvTransfer, NoHandoff> {
    // First, because llama.cpp writes the states of these models in other formats.
    if model.is_hybrid() {
        return Err(NoHandoff::Hybrid);
    }
    if model.is_recurrent() {
        return Err(NoHandoff::Recurrent);
    }
    let rope = match model.rope_type() {
        None => RopePairing::None,
        Some(RopeType::Norm) => RopePairing::Interleaved,
        Some(RopeType::NeoX) => RopePairing::HalfSplit,
        Some(RopeType::MRope | RopeType::IMRope | RopeType::Vision) => return Err(NoHandoff::MultiAxis),
    };
    let scratch = n_slots;
    let decoded = decode_one(ctx, model, scratch);
    let exported = state::export(ctx, scratch, ExportBuffer::new(None));
    transfer::clear(ctx, scratch);
    decoded?;
    let layout = layout(&Bytes::from_owner(exported?), rope, gguf.sliding_window())?;
    Ok(KvTransfer::new(layout, n_slots, gpu))
}

fn decode_one(ctx: &mut LlamaContext<'_>, model: &LlamaModel, seq: u32) -> Result<(), NoHandoff> {
    // Any token will do; some tokenizers have no BOS.
    let bos = Some(model.vocab().bos()).filter(|t| (0..model.n_vocab()).contains(&t.0));
    let mut batch = LlamaBatch::new(1, 1);
    let added = batch.add(bos.unwrap_or(LlamaToken(0)), 0, &[seq.cast_signed()], false);
    added.map_err(|e| NoHandoff::Decode(e.to_string()))?;
    ctx.decode(&mut batch).map_err(|e| NoHandoff::Decode(e.to_string()))?;
    ctx.synchronize();
    Ok(())
}

/// Derives the layout from a state that holds one position.
fn layout(blob: &Bytes, rope: RopePairing, window: Option<u64>) -> Result<KvLayout, NoHandoff> {
    // The blob does not say whether it has V tensors; only one of the two interpretations parses.
    let parsed = blob::parse(blob, true).or_else(|fault| blob::parse(blob, false).map_err(|_| fault));
    let ParsedBlob { sections } = parsed.map_err(NoHandoff::UnknownState)?;
    let window = window.and_then(|w| u32::try_from(w).ok());
    let windows = match sections.len() {
        1 => vec![None],
        // A full cache and a windowed one. Without a window the second is an indexer's cache, which is not supported.
        2 if window.is_some() => vec![None, window],
        n_sections => return Err(NoHandoff::UnknownWindow { n_sections }),
    };
    let sections = sections.into_iter().zip(windows).map(|(section, window)| {
        let layers = section.layers.into_iter().map(|layer| {
            let v = layer.v.as_ref().map(rows).transpose()?;
            Ok(LayerShape { k: rows(&layer.k)?, v })
        });
        Ok(Section { window, n_rot: [0; 2], layers: layers.collect::<Result<_, NoHandoff>>()? })
    });
    let layout = KvLayout { rope, sections: sections.collect::<Result<_, NoHandoff>>()?, states: Vec::new() };
    layout.check()?;
    Ok(layout)
}

fn rows(tensor: &ParsedTensor) -> Result<Rows, NoHandoff> {
    let dtype = u32::try_from(tensor.ggml_type).ok().and_then(Dtype::from_number);
    let dtype = dtype.ok_or(NoHandoff::ValueType(tensor.ggml_type))?;
    // The parser has limited the row's bytes.
    Ok(Rows { dtype, n_values: (tensor.row_bytes / dtype.block_bytes() * dtype.block_values()) as u32 })
}
