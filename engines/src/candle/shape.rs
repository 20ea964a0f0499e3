//! The architecture of a model, from its file's header.

use baton_model::gguf::window::{self, SectionLayers, Window};
use baton_model::gguf::{Gguf, Value};
use baton_schemas::kv::{KvLayout, RopePairing};

use crate::serving::LoadError;

/// The families that are computed here. Each computes as llama.cpp does (`src/models/` of the pinned version).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ComputedFamily {
    Llama,
    Qwen2,
    Qwen3,
    Gemma3,
}

impl ComputedFamily {
    const ALL: [ComputedFamily; 4] =
        [ComputedFamily::Llama, ComputedFamily::Qwen2, ComputedFamily::Qwen3, ComputedFamily::Gemma3];

    /// The file's `general.architecture`.
    fn as_str(self) -> &'static str {
        match self {
            ComputedFamily::Llama => "llama",
            ComputedFamily::Qwen2 => "qwen2",
            ComputedFamily::Qwen3 => "qwen3",
            ComputedFamily::Gemma3 => "gemma3",
        }
    }
}

/// Sizes and constants of a model.
#[derive(Debug, Clone)]
pub(super) struct ModelShape {
    pub(super) family: ComputedFamily,
    pub(super) n_vocab: usize,
    pub(super) n_embd: usize,
    pub(super) n_layers: usize,
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    /// Elements of a head of Q, K and V.
    pub(super) head_size: usize,
    /// Added to the mean square in RMS norms.
    pub(super) epsilon: f32,
    /// The factor of attention's scores.
    pub(super) attention_scale: f64,
    /// The factor of embeddings: Gemma multiplies them by the square root of their size.
    pub(super) embedding_scale: f64,
    /// Logits are limited to this by tanh, if it is greater than 0.
    pub(super) logit_cap: f64,
    pub(super) window: Option<Window>,
}

/// The layers of the model whose scores are scaled by another size than the head's: Gemma 3 27B.
const GEMMA_27B_LAYERS: usize = 62;

impl ModelShape {
    pub(super) fn of(gguf: &Gguf) -> Result<Self, LoadError> {
        let unsupported = |why: String| LoadError::Unsupported(why);
        let name = gguf.architecture().unwrap_or_default();
        let Some(family) = ComputedFamily::ALL.into_iter().find(|family| family.as_str() == name) else {
            let known = ComputedFamily::ALL.map(ComputedFamily::as_str).join(", ");
            return Err(unsupported(format!("its architecture is {name:?}; these are supported: {known}")));
        };
        let key = |suffix: &str| format!("{name}.{suffix}");
        let number = |suffix: &str| {
            let n = gguf.u64(&key(suffix)).and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=MAX_SIZE).contains(n));
            n.ok_or_else(|| unsupported(format!("its file has no valid {suffix}")))
        };
        let optional = |n: Option<u64>, what: &str| {
            let n = n.and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=MAX_SIZE).contains(n));
            n.ok_or_else(|| unsupported(format!("its file has no valid {what}")))
        };
        let n_layers = number("block_count")?;
        if n_layers > MAX_LAYERS {
            return Err(unsupported(format!("it has {n_layers} layers, more than {MAX_LAYERS}")));
        }
        let n_heads = number("attention.head_count")?;
        let n_kv_heads = optional(gguf.n_head_kv(0), "number of KV heads")?;
        let head_size = optional(gguf.head_dim_k(), "head size")?;
        let same_everywhere = (0..n_layers as u64).all(|layer| gguf.n_head_kv(layer) == Some(n_kv_heads as u64));
        if !same_everywhere || gguf.head_dim_v() != Some(head_size as u64) || !n_heads.is_multiple_of(n_kv_heads) {
            return Err(unsupported("its heads differ from layer to layer, or K's from V's".into()));
        }
        let n_rotated = gguf.u64(&key("rope.dimension_count")).unwrap_or(head_size as u64);
        if n_rotated != head_size as u64 || !head_size.is_multiple_of(2) {
            return Err(unsupported(format!("{n_rotated} of {head_size} elements of a head are rotated")));
        }
        if gguf.u64(&key("expert_count")).is_some_and(|n| n > 0) {
            return Err(unsupported("it is a mixture of experts".into()));
        }
        let factors = gguf.tensors.iter().find(|tensor| tensor.name == ROPE_FACTORS);
        if factors.is_some_and(|factors| family != ComputedFamily::Llama || factors.dims[..] != [head_size as u64 / 2])
        {
            return Err(unsupported(format!("its {ROPE_FACTORS} does not belong to its architecture or head size")));
        }
        let attention_factor = gguf.get(&key("rope.scaling.attn_factor"));
        if attention_factor.is_some_and(|factor| *factor != Value::Float(1.0)) {
            return Err(unsupported("its file has a rope.scaling.attn_factor other than 1".into()));
        }
        let epsilon = gguf.f32(&key("attention.layer_norm_rms_epsilon")).filter(|e| e.is_finite() && *e > 0.0);
        let epsilon =
            epsilon.ok_or_else(|| unsupported("its file has no valid attention.layer_norm_rms_epsilon".into()))?;
        let embedding = gguf.tensors.iter().find(|tensor| tensor.name == "token_embd.weight");
        let n_vocab = optional(embedding.and_then(|tensor| tensor.dims.get(1).copied()), "embedding")?;
        let n_embd = number("embedding_length")?;
        let is_gemma = family == ComputedFamily::Gemma3;
        let window = Window::of(gguf).map_err(unsupported)?;
        let scaled_by = if is_gemma && n_layers == GEMMA_27B_LAYERS { n_embd / n_heads } else { head_size };
        let shape = ModelShape {
            family,
            n_vocab,
            n_embd,
            n_layers,
            n_heads,
            n_kv_heads,
            head_size,
            epsilon,
            attention_scale: 1.0 / (scaled_by as f64).sqrt(),
            embedding_scale: if is_gemma { f64::from((n_embd as f32).sqrt()) } else { 1.0 },
            logit_cap: gguf.f32(&key("final_logit_softcapping")).filter(|_| is_gemma).map_or(0.0, f64::from),
            window,
        };
        shape.layout().check().map_err(|error| unsupported(error.to_string()))?;
        Ok(shape)
    }

    /// Returns true if a layer attends to the last positions only.
    pub(super) fn is_windowed(&self, layer: usize) -> bool {
        self.window.is_some_and(|window| window.covers(layer))
    }

    /// The pairs of K's elements that are rotated together, in the order that GGUF files have.
    pub(super) fn pairing(&self) -> RopePairing {
        match self.family {
            // The converter has permuted the rows of these models' Q and K.
            ComputedFamily::Llama => RopePairing::Interleaved,
            ComputedFamily::Qwen2 | ComputedFamily::Qwen3 | ComputedFamily::Gemma3 => RopePairing::HalfSplit,
        }
    }

    /// The layers of each section of the KV layout.
    pub(super) fn sections(&self) -> Vec<Vec<usize>> {
        window::sections(self.n_layers, self.window)
    }

    /// The layout in which KV is handed over.
    pub(super) fn layout(&self) -> KvLayout {
        let sections = SectionLayers::alike(self.sections(), self.window, self.n_kv_heads, self.head_size);
        window::f16_layout(self.pairing(), &sections)
    }
}

/// The name of the factors of RoPE's frequencies.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Larger numbers in a header are mistakes.
pub(super) const MAX_SIZE: usize = 1 << 24;

/// llama.cpp's limit.
const MAX_LAYERS: usize = 512;
