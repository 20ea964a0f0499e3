//! How RoPE rotates the model's K, from its file: a codec undoes it, and the candle engine computes with it.
//!
//! A mistake here costs the codec compression only, since the decoder repeats whatever rotation the encoder undoes. It costs
//! the candle engine correctness: its K would be wrong.

use std::io;

use baton_schemas::kv::{KeyRotation, KvLayout, RopePairing, RotationError, SectionRotation};

use super::{Gguf, Value};
use crate::options::RopeOptions;

/// The frequencies' base, where a file names none.
const DEFAULT_BASE: f32 = 10_000.0;

/// Factors of each pair's frequency, in files of Llama 3.1 and later.
const FACTORS: &str = "rope_freqs.weight";

/// ggml's number of f32.
const GGML_F32: u32 = 0;

/// The most pairs that factors are read for.
const MAX_PAIRS: u64 = 512;

/// Why K's rotation is not undone.
#[derive(Debug, thiserror::Error)]
pub enum NoRotation {
    /// No RoPE, or one over several axes.
    #[error("the model has no rotary embedding in pairs")]
    NoPairs,
    /// MLA, and compressed rows.
    #[error("latent attention keeps several kinds of values in one row")]
    Latent,
    /// The file lacks a size.
    #[error("the file does not say how large its heads are")]
    Heads,
    /// YaRN, LongRoPE and the like.
    #[error("the rotation is scaled in a way that depends on more than the position")]
    Scaling,
    /// The file cannot be read.
    #[error("the frequencies' factors cannot be read: {0}")]
    Factors(io::Error),
    /// The heads do not fit the rows.
    #[error(transparent)]
    Layout(#[from] RotationError),
}

impl Gguf {
    /// The rotation of K in every section of the layout. Reads the factors from the file, if it has some.
    pub fn key_rotation(&self, options: RopeOptions, layout: &KvLayout) -> Result<KeyRotation, NoRotation> {
        if !matches!(layout.rope, RopePairing::Interleaved | RopePairing::HalfSplit) {
            return Err(NoRotation::NoPairs);
        }
        if self.arch("attention.key_length_mla").is_some() || layout.is_compressed() {
            return Err(NoRotation::Latent);
        }
        let head_size = self.head_dim_k().and_then(|n| u32::try_from(n).ok()).ok_or(NoRotation::Heads)?;
        let n_rotated = self.arch("rope.dimension_count").and_then(Value::as_u64).unwrap_or(head_size.into());
        let n_pairs = usize::try_from(n_rotated.min(head_size.into()) / 2).unwrap_or(0);
        let scale = scale(self, options)?;
        let factors = factors(self).map_err(NoRotation::Factors)?.unwrap_or_default();
        let base = options.freq_base.or_else(|| arch_f32(self, "rope.freq_base")).unwrap_or(DEFAULT_BASE);
        let of_section = |base: f32, scale: f64| {
            let frequency = |pair: usize| {
                let factor = factors.get(pair).map_or(1.0, |factor| f64::from(*factor));
                f64::from(base).powf(-2.0 * pair as f64 / n_rotated as f64) * scale / factor
            };
            Some(SectionRotation { head_size, frequencies: (0..n_pairs).map(frequency).collect() })
        };
        let sections = layout.sections.iter().map(|section| match section.window {
            None => of_section(base, scale),
            // llama.cpp scales only the layers that attend to all positions.
            Some(_) => of_section(windowed_base(self).unwrap_or(base), 1.0),
        });
        let rotation = KeyRotation { sections: sections.collect() };
        rotation.check(layout)?;
        Ok(rotation)
    }

    /// A value of the architecture's own keys.
    fn arch(&self, suffix: &str) -> Option<&Value> {
        self.get(&self.arch_key(suffix)?)
    }
}

fn arch_f32(gguf: &Gguf, suffix: &str) -> Option<f32> {
    gguf.f32(&gguf.arch_key(suffix)?)
}

/// The factor of all frequencies.
fn scale(gguf: &Gguf, options: RopeOptions) -> Result<f64, NoRotation> {
    let RopeOptions { scaling, freq_base: _, freq_scale, yarn_orig_ctx: _, .. } = options;
    let of_file = gguf.arch_key("rope.scaling.type").and_then(|key| gguf.str(&key));
    // As in llama.cpp, a file without the type has linear scaling.
    let scaling = scaling.map_or(of_file.unwrap_or("linear"), |scaling| scaling.as_str());
    if !matches!(scaling, "none" | "linear")
        || gguf.tensors.iter().any(|tensor| tensor.name.starts_with("rope_factors_"))
    {
        return Err(NoRotation::Scaling);
    }
    if scaling == "none" {
        return Ok(1.0);
    }
    // The second key is an older name of the first.
    let factor = arch_f32(gguf, "rope.scaling.factor").or_else(|| arch_f32(gguf, "rope.scale_linear"));
    let factor = factor.filter(|factor| *factor != 0.0);
    Ok(freq_scale.map_or_else(|| factor.map_or(1.0, |factor| 1.0 / f64::from(factor)), f64::from))
}

/// The base in layers with a window.
fn windowed_base(gguf: &Gguf) -> Option<f32> {
    // Files of Gemma 3 do not name it.
    let is_gemma = gguf.architecture().is_some_and(|name| name.starts_with("gemma3"));
    arch_f32(gguf, "rope.freq_base_swa").or(is_gemma.then_some(DEFAULT_BASE))
}

/// Reads the factors. `None`: the file has none.
fn factors(gguf: &Gguf) -> io::Result<Option<Vec<f32>>> {
    let Some(tensor) = gguf.tensors.iter().find(|tensor| tensor.name == FACTORS) else { return Ok(None) };
    let n = tensor.size_bytes.unwrap_or(0) / 4;
    if tensor.ggml_type != GGML_F32 || n > MAX_PAIRS {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "they have an unexpected type or number"));
    }
    let mut bytes = vec![0; 4 * n as usize];
    gguf.files.reader().read(tensor.file_idx, tensor.start, &mut bytes).map_err(|fault| fault.source)?;
    Ok(Some(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()))
}
