//! The layers of a hybrid model that keep a state of fixed size instead of KV: a gated delta net behind a short convolution.

use std::path::Path;

use baton_schemas::kv::{Dtype, Rows, StateKind, StateShape};
use serde::{Deserialize, Serialize};

use super::checks::{FULL, MAX_SIZE, within};
use super::error::FolderError;
use super::family::Family;

/// The keys of `config.json` that describe them.
#[derive(Deserialize)]
pub(super) struct LinearKeys {
    linear_num_key_heads: Option<u64>,
    linear_num_value_heads: Option<u64>,
    linear_key_head_dim: Option<u64>,
    linear_value_head_dim: Option<u64>,
    linear_conv_kernel_dim: Option<u64>,
    full_attention_interval: Option<u64>,
    layer_types: Option<Vec<String>>,
}

/// The layers that keep a state, and the sizes of one of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LinearLayers {
    pub layers: Vec<usize>,
    /// Heads of K, of which each serves `n_v_heads / n_k_heads` heads of V.
    pub n_k_heads: usize,
    pub n_v_heads: usize,
    /// Elements of a head of K, and of V.
    pub head_size: usize,
    /// The inputs that the convolution keeps of each channel.
    pub n_inputs: usize,
    /// Every so many layers one has attention.
    #[serde(skip)]
    interval: usize,
}

/// The kind of layers that keep a state.
const LINEAR: &str = "linear_attention";

impl LinearLayers {
    /// `None`: all layers of the family have attention. Errors: a number is missing or out of range, or llama.cpp, whose form of
    /// the states is handed over, has no such layers.
    pub(super) fn of(
        keys: &LinearKeys,
        family: Family,
        n_layers: usize,
        path: &Path,
    ) -> Result<Option<LinearLayers>, FolderError> {
        let Some(interval) = family.attention_interval() else { return Ok(None) };
        let within = |name: &str, n: Option<u64>| {
            let n = n.ok_or_else(|| FolderError::malformed(path, format!("it names no {name}")))?;
            within(path, name, n, MAX_SIZE)
        };
        let interval = within("full_attention_interval", keys.full_attention_interval.or(Some(interval)))?;
        let keeps_state = |layer: &usize| !(layer + 1).is_multiple_of(interval);
        let name = |layer| if keeps_state(&layer) { LINEAR } else { FULL };
        let named = keys.layer_types.as_deref();
        if named.is_some_and(|types| !types.iter().map(String::as_str).eq((0..n_layers).map(name))) {
            let why = "its layers are not some linear ones and then one with attention, again and again (layer_types)";
            return Err(FolderError::unsupported(path, why));
        }
        let n_k_heads = within("linear_num_key_heads", keys.linear_num_key_heads)?;
        let n_v_heads = within("linear_num_value_heads", keys.linear_num_value_heads)?;
        let head_size = within("linear_key_head_dim", keys.linear_key_head_dim)?;
        let kernel = within("linear_conv_kernel_dim", keys.linear_conv_kernel_dim)?;
        if within("linear_value_head_dim", keys.linear_value_head_dim)? != head_size {
            return Err(FolderError::unsupported(path, "its heads of K and V in linear layers have different sizes"));
        }
        if !n_v_heads.is_multiple_of(n_k_heads) || kernel < 2 || interval > n_layers {
            let what = format!(
                "{n_v_heads} heads of V, {n_k_heads} of K, a kernel of {kernel}, attention each {interval} layers"
            );
            return Err(FolderError::malformed(path, what));
        }
        let layers = (0..n_layers).filter(keeps_state).collect();
        Ok(Some(LinearLayers { layers, n_k_heads, n_v_heads, head_size, n_inputs: kernel - 1, interval }))
    }

    /// The states in llama.cpp's form and order. A number that is too large does not pass the layout's check.
    pub fn shapes(&self) -> Vec<StateShape> {
        let LinearLayers { layers, n_k_heads, n_v_heads, head_size, n_inputs, .. } = self;
        let state = |kind, factors: &[usize]| {
            let n_values = factors.iter().fold(1, |product: usize, factor| product.saturating_mul(*factor));
            StateShape {
                kind,
                values: Rows { dtype: Dtype::F32, n_values: u32::try_from(n_values).unwrap_or(u32::MAX) },
            }
        };
        let n_heads = n_v_heads.saturating_add(n_k_heads.saturating_mul(2));
        let of_layer = [
            state(StateKind::Convolution, &[*n_inputs, n_heads, *head_size]),
            state(StateKind::Recurrence, &[*n_v_heads, *head_size, *head_size]),
        ];
        layers.iter().flat_map(|_| of_layer).collect()
    }

    /// The numbers of a GGUF file's header, by their keys without the architecture.
    pub(super) fn header(&self) -> [(&'static str, usize); 6] {
        [
            ("ssm.conv_kernel", self.n_inputs + 1),
            ("ssm.inner_size", self.n_v_heads.saturating_mul(self.head_size)),
            ("ssm.state_size", self.head_size),
            ("ssm.time_step_rank", self.n_v_heads),
            ("ssm.group_count", self.n_k_heads),
            ("full_attention_interval", self.interval),
        ]
    }
}
