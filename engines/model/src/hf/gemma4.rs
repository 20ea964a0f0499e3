//! The layers of Gemma 4: `config.json` lists which have a window. Those without one have heads of another size and perhaps
//! another number of KV heads, and the last layers use the KV of layers before them.

use std::path::Path;

use serde::Deserialize;

use super::checks::{Bidirectional, FULL, MAX_SIZE, within};
use super::error::FolderError;
use crate::gguf::window::SectionLayers;
use crate::gguf::{Array, Value};

/// The keys of `config.json` that describe them.
#[derive(Deserialize)]
pub(super) struct Gemma4Keys {
    layer_types: Option<Vec<String>>,
    sliding_window: Option<u64>,
    global_head_dim: Option<u64>,
    num_global_key_value_heads: Option<u64>,
    attention_k_eq_v: Option<bool>,
    num_kv_shared_layers: Option<u64>,
    final_logit_softcapping: Option<f64>,
    use_bidirectional_attention: Option<Bidirectional>,
    rope_parameters: Option<RopeOfKinds>,
}

/// RoPE's settings of each kind of layers.
#[derive(Deserialize)]
struct RopeOfKinds {
    full_attention: Option<RopeOfKind>,
    sliding_attention: Option<RopeOfKind>,
}

#[derive(Deserialize)]
struct RopeOfKind {
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
}

/// The layers, and what differs between those with a window and those without. The KV heads and the size of a head in the
/// layers with one are the model's.
#[derive(Debug)]
pub(super) struct ListedLayers {
    /// True for each layer that has a window.
    windowed: Vec<bool>,
    /// The positions that these layers attend to, the current one included.
    n_positions: usize,
    /// Elements of a head in the other layers.
    global_head_size: usize,
    /// KV heads of the other layers.
    n_global_kv_heads: usize,
    /// The last layers, which have no KV of their own.
    n_shared: usize,
    /// Logits are limited to this.
    logit_cap: f64,
}

/// The kind of layers that have a window.
const WINDOWED: &str = "sliding_attention";

impl ListedLayers {
    /// Of a model with these numbers of layers, heads, and KV heads in layers with a window. Errors: a number is missing, out of
    /// range, or contradicts another one; or llama.cpp or mlx-lm does not compute such a model.
    pub(super) fn of(
        keys: Gemma4Keys,
        n_layers: usize,
        n_heads: usize,
        n_kv_heads: usize,
        path: &Path,
    ) -> Result<ListedLayers, FolderError> {
        if keys.use_bidirectional_attention.as_ref().is_some_and(Bidirectional::is_of_text) {
            let why = "its tokens attend to later ones (use_bidirectional_attention)";
            return Err(FolderError::unsupported(path, why));
        }
        // mlx-lm and Transformers differ in what they take for a key that is missing.
        let missing = |name: &str| FolderError::malformed(path, format!("it names no {name}"));
        let number = |name: &str, n: Option<u64>| within(path, name, n.ok_or_else(|| missing(name))?, MAX_SIZE);
        let windowed = windowed(&keys.layer_types.ok_or_else(|| missing("layer_types"))?, n_layers, path)?;
        let n_positions = number("sliding_window", keys.sliding_window)?;
        let global_head_size = number("global_head_dim", keys.global_head_dim)?;
        // Only layers whose V is their K may have another number.
        let other_heads = keys.num_global_key_value_heads.filter(|_| keys.attention_k_eq_v == Some(true));
        let n_global_kv_heads = number("num_global_key_value_heads", other_heads.or(Some(n_kv_heads as u64)))?;
        if !n_heads.is_multiple_of(n_global_kv_heads) || !global_head_size.is_multiple_of(2) {
            let what = format!(
                "{n_heads} heads, {n_global_kv_heads} global KV heads, {global_head_size} elements of a global head"
            );
            return Err(FolderError::malformed(path, what));
        }
        let n_shared = keys.num_kv_shared_layers.ok_or_else(|| missing("num_kv_shared_layers"))?;
        let n_own = usize::try_from(n_shared).ok().and_then(|n| n_layers.checked_sub(n)).unwrap_or(0);
        let (own, shared) = windowed.split_at(n_own);
        if own.is_empty() || shared.iter().any(|is_windowed| !own.contains(is_windowed)) {
            let what = format!(
                "the last {n_shared} of {n_layers} layers use the KV of layers before them (num_kv_shared_layers), \
                 and some find none of their kind"
            );
            return Err(FolderError::malformed(path, what));
        }
        let cap = keys.final_logit_softcapping.ok_or_else(|| missing("final_logit_softcapping"))?;
        if !(cap.is_finite() && cap > 0.0) {
            return Err(FolderError::malformed(path, format!("final_logit_softcapping is {cap}")));
        }
        check_rope(keys.rope_parameters, path)?;
        Ok(ListedLayers {
            n_shared: shared.len(),
            windowed,
            n_positions,
            global_head_size,
            n_global_kv_heads,
            logit_cap: cap,
        })
    }

    /// The layers that keep KV, by their section of the KV layout.
    pub(super) fn sections(&self, n_kv_heads: usize, head_size: usize) -> Vec<SectionLayers> {
        let own = &self.windowed[..self.windowed.len() - self.n_shared];
        let layers =
            |windowed: bool| (0..).zip(own).filter(|(_, is)| **is == windowed).map(|(layer, _)| layer).collect();
        let full = SectionLayers {
            window: None,
            n_kv_heads: self.n_global_kv_heads,
            head_size: self.global_head_size,
            layers: layers(false),
        };
        let window = u32::try_from(self.n_positions).ok();
        let windowed = SectionLayers { window, n_kv_heads, head_size, layers: layers(true) };
        [full, windowed].into_iter().filter(|section| !section.layers.is_empty()).collect()
    }

    /// The values of a GGUF file's header, by their keys without the architecture.
    pub(super) fn header(&self, n_kv_heads: usize, head_size: usize) -> [(&'static str, Value); 11] {
        /// GGUF's numbers of types.
        const UINT32: u32 = 4;
        const BOOL: u32 = 7;
        let number = |n: usize| Value::Unsigned(n as u64);
        let list = |element_type: u32, value: &dyn Fn(bool) -> Value| {
            let elements: Vec<Value> = self.windowed.iter().map(|windowed| value(*windowed)).collect();
            Value::Array(Array { element_type, len: elements.len() as u64, elements: Some(elements) })
        };
        let of_layer = |windowed: bool| number(if windowed { n_kv_heads } else { self.n_global_kv_heads });
        [
            ("attention.head_count_kv", list(UINT32, &of_layer)),
            ("attention.key_length", number(self.global_head_size)),
            ("attention.value_length", number(self.global_head_size)),
            ("attention.key_length_swa", number(head_size)),
            ("attention.value_length_swa", number(head_size)),
            ("attention.sliding_window", number(self.n_positions)),
            ("attention.sliding_window_pattern", list(BOOL, &Value::Bool)),
            ("attention.shared_kv_layers", number(self.n_shared)),
            ("rope.dimension_count", number(self.global_head_size)),
            ("rope.dimension_count_swa", number(head_size)),
            ("final_logit_softcapping", Value::Float(self.logit_cap)),
        ]
    }
}

/// For each layer, whether it has a window.
fn windowed(types: &[String], n_layers: usize, path: &Path) -> Result<Vec<bool>, FolderError> {
    if types.len() != n_layers {
        let what = format!("layer_types lists {} of {n_layers} layers", types.len());
        return Err(FolderError::malformed(path, what));
    }
    let of_type = |name: &String| match name.as_str() {
        WINDOWED => Ok(true),
        FULL => Ok(false),
        other => {
            Err(FolderError::unsupported(path, format!("some of its layers are of the type {other:?} (layer_types)")))
        }
    };
    types.iter().map(of_type).collect()
}

/// Checks that RoPE is what llama.cpp's files of the family have: whole heads in layers with a window, and the first pairs of a
/// head in the others.
fn check_rope(rope: Option<RopeOfKinds>, path: &Path) -> Result<(), FolderError> {
    let unsupported = |why: &str| Err(FolderError::unsupported(path, why));
    let Some(RopeOfKinds { full_attention: Some(full), sliding_attention: Some(windowed) }) = rope else {
        return unsupported("its rope_parameters are not those of full_attention and sliding_attention");
    };
    if full.rope_theta.is_none() || windowed.rope_theta.is_none() {
        return Err(FolderError::malformed(path, "its rope_parameters name no rope_theta"));
    }
    let is_one = |factor: Option<f64>| factor.is_none_or(|factor| factor == 1.0);
    if full.rope_type.as_deref() != Some("proportional") || !is_one(full.factor) {
        return unsupported("RoPE in its layers without a window is not proportional, or has a factor");
    }
    if !full.partial_rotary_factor.is_some_and(|part| part > 0.0 && part <= 1.0) {
        let what = format!("partial_rotary_factor is {:?}", full.partial_rotary_factor);
        return Err(FolderError::malformed(path, what));
    }
    if !is_one(windowed.partial_rotary_factor) {
        return unsupported("RoPE turns a part of the heads in layers with a window");
    }
    Ok(())
}
