//! The shape of a model's KV cache.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use super::dtype::Dtype;

/// The most layers in a layout. llama.cpp's limit is 512.
pub const MAX_LAYERS: usize = 4096;

/// The most sections in a layout. Known models have one, or a full cache and a sliding-window cache.
pub const MAX_SECTIONS: usize = 4;

/// The most bytes of a sequence's states. A reader may have to allocate this much.
pub const MAX_STATE_BYTES: usize = 1 << 30;

/// The most values in a row (all KV heads of one layer at one position).
pub const MAX_ROW_VALUES: u32 = 1 << 20;

/// The most values in a state. The largest known ones have 2^22; all states together are at most [`MAX_STATE_BYTES`].
pub const MAX_STATE_VALUES: u32 = 1 << 28;

/// The most tokens that one row stands for. DeepSeek V4's are 4 and 128.
pub const MAX_TOKENS_PER_ROW: u32 = 4096;

/// The largest Hadamard rotation of K or V. llama.cpp's is at most 256.
pub const MAX_HADAMARD: u32 = 4096;

/// Which elements of a K head RoPE rotates together. Engines that pair them differently store the same K in a different
/// order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopePairing {
    /// The model has no rotary embedding.
    None,
    /// Elements `2i` and `2i + 1` (llama.cpp's `NORM`, used by its llama architecture).
    Interleaved,
    /// Elements `i` and `i + d/2` (llama.cpp's `NEOX`, Hugging Face's order).
    HalfSplit,
    /// Several position axes (M-RoPE, vision models). Of text, all axes are equal.
    MultiAxis,
}

/// The shape of a tensor's rows. A row is the tensor's values at one position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Rows {
    /// The type of the values.
    pub dtype: Dtype,
    /// Values per position: KV heads × head size.
    pub n_values: u32,
}

impl Rows {
    /// Returns the number of bytes of one row. Exact if a row consists of whole blocks, as in a checked layout.
    pub fn bytes(&self) -> usize {
        self.n_values as usize / self.dtype.block_values() * self.dtype.block_bytes()
    }

    /// Checks the number of values.
    fn check(&self, most: u32) -> Result<(), LayoutError> {
        if self.n_values == 0 || self.n_values > most {
            return Err(LayoutError(format!("rows of {} values; 1 to {most} are possible", self.n_values)));
        }
        if !(self.n_values as usize).is_multiple_of(self.dtype.block_values()) {
            return Err(LayoutError(format!(
                "rows of {} values are no whole blocks of {:?}",
                self.n_values, self.dtype
            )));
        }
        Ok(())
    }
}

/// The shape of K and V in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayerShape {
    /// Keys.
    pub k: Rows,
    /// Values. `None` with multi-head latent attention, which derives them from K.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub v: Option<Rows>,
}

impl LayerShape {
    /// Iterates over K, and V if there is one.
    pub fn tensors(&self) -> impl Iterator<Item = Rows> + use<> {
        [Some(self.k), self.v].into_iter().flatten()
    }

    /// Returns the number of bytes of one position.
    pub fn bytes(&self) -> usize {
        self.k.bytes() + self.v.map_or(0, |v| v.bytes())
    }

    /// Returns the types of its values.
    pub fn types(&self) -> RowTypes {
        RowTypes { k: self.k.dtype, v: self.v.map(|v| v.dtype) }
    }
}

/// The types in which a cache keeps its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RowTypes {
    /// Keys.
    pub k: Dtype,
    /// Values. `None` with multi-head latent attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub v: Option<Dtype>,
}

impl fmt::Display for RowTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.v.filter(|v| *v != self.k) {
            None => f.write_str(self.k.as_str()),
            Some(v) => write!(f, "{} (K) and {} (V)", self.k.as_str(), v.as_str()),
        }
    }
}

/// The layers that share one cache.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Section {
    /// The number of positions that these layers attend to, including the current one. `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u32>,
    /// The sizes of the Hadamard rotations of K and of V, which llama.cpp applies to quantized caches and to some indexers:
    /// so many neighbouring values are rotated together. 0: none.
    #[serde(default, skip_serializing_if = "is_unrotated")]
    pub n_rot: [u32; 2],
    /// The number of tokens that one row stands for: 1 without compression. Row `i` is that of the tokens
    /// `[i · tokens_per_row, (i + 1) · tokens_per_row)`, and exists once the last of them is computed. More than 1 only without
    /// a window.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub tokens_per_row: u32,
    /// The layers in the engine's order, lower layers first.
    pub layers: Vec<LayerShape>,
}

fn one() -> u32 {
    1
}

fn is_one(n: &u32) -> bool {
    *n == 1
}

fn is_unrotated(n_rot: &[u32; 2]) -> bool {
    *n_rot == [0; 2]
}

impl Section {
    /// Returns the indexes of the rows that the tokens of `[start, end)` complete. Without compression they are the positions.
    /// `start` is not after `end`.
    pub fn rows_of(&self, start: u32, end: u32) -> Range<u32> {
        let per_row = self.tokens_per_row.max(1);
        start / per_row..end / per_row
    }

    /// Returns the number of bytes of one row of all layers.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(LayerShape::bytes).sum()
    }

    /// Returns the number of tensors. K and V count separately.
    pub fn n_tensors(&self) -> usize {
        self.layers.iter().map(|l| 1 + usize::from(l.v.is_some())).sum()
    }
}

/// The purpose of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateKind {
    /// The last inputs of a short convolution (llama.cpp's `r`).
    Convolution,
    /// The memory of a linear attention or of a state-space model (llama.cpp's `s`).
    Recurrence,
    /// K of the last tokens, of which no whole compressed row has been made yet, or which the next one overlaps.
    Compressor,
    /// The scores by which a compressor weights these tokens.
    CompressorScore,
}

/// A tensor of fixed size that a recurrent layer keeps for a sequence: the result of all its positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StateShape {
    /// Its purpose.
    pub kind: StateKind,
    /// All its values, as one row.
    #[serde(flatten)]
    pub values: Rows,
}

/// The shape of a model's whole KV cache.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvLayout {
    /// The order of K's elements.
    pub rope: RopePairing,
    /// The caches of rows: the full one first, then the sliding-window one or an indexer's if there is one. With compressed rows,
    /// the window comes first. None in a model that only has states.
    pub sections: Vec<Section>,
    /// The states of the recurrent layers, in the order in which they are computed: lower layers first, and of a layer its
    /// convolution before its recurrence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub states: Vec<StateShape>,
}

/// Why a layout cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the KV layout is not usable: {0}")]
pub struct LayoutError(pub String);

impl KvLayout {
    /// Checks a peer's layout. Call it before any arithmetic with the layout.
    pub fn check(&self) -> Result<(), LayoutError> {
        let wrong = |what: String| Err(LayoutError(what));
        if (self.sections.is_empty() && self.states.is_empty()) || self.sections.len() > MAX_SECTIONS {
            return wrong(format!("{} sections; 1 to {MAX_SECTIONS} are possible", self.sections.len()));
        }
        let n_layers: usize = self.sections.iter().map(|s| s.layers.len()).sum();
        if n_layers > MAX_LAYERS || self.sections.iter().any(|s| s.layers.is_empty()) {
            return wrong(format!("{n_layers} layers; 1 to {MAX_LAYERS} are possible, and no section may be empty"));
        }
        if self.sections.iter().any(|s| s.window == Some(0)) {
            return wrong("a window of 0 positions".into());
        }
        let is_possible = |section: &&Section| match section.tokens_per_row {
            0 => false,
            1 => true,
            n => n <= MAX_TOKENS_PER_ROW && section.window.is_none(),
        };
        if let Some(section) = self.sections.iter().find(|section| !is_possible(section)) {
            let window = section.window;
            return wrong(format!("rows of {} tokens each, with the window {window:?}", section.tokens_per_row));
        }
        let is_possible = |n: &u32| *n == 0 || (n.is_power_of_two() && *n <= MAX_HADAMARD);
        if let Some(section) = self.sections.iter().find(|section| !section.n_rot.iter().all(is_possible)) {
            return wrong(format!("Hadamard rotations of {:?} values", section.n_rot));
        }
        if self.states.len() > 2 * MAX_LAYERS {
            return wrong(format!("{} states; at most {} are possible", self.states.len(), 2 * MAX_LAYERS));
        }
        if let Some(state) = self.states.iter().find(|state| state.values.dtype.is_quantized()) {
            return wrong(format!("a state of {:?}", state.values.dtype));
        }
        self.tensors().try_for_each(|rows| rows.check(MAX_ROW_VALUES))?;
        self.states.iter().try_for_each(|state| state.values.check(MAX_STATE_VALUES))?;
        if self.state_bytes() > MAX_STATE_BYTES {
            return wrong(format!("states of {} bytes; at most {MAX_STATE_BYTES} are possible", self.state_bytes()));
        }
        Ok(())
    }

    /// Returns true if values of rows share scales, so that codecs of single values do not apply.
    pub fn is_quantized(&self) -> bool {
        self.tensors().any(|rows| rows.dtype.is_quantized())
    }

    /// Returns the number of bytes of a sequence's states.
    pub fn state_bytes(&self) -> usize {
        self.states.iter().map(|state| state.values.bytes()).fold(0, usize::saturating_add)
    }

    /// Returns the number of bytes of one position in all sections, rounded up where a row stands for several tokens.
    pub fn bytes_per_position(&self) -> usize {
        self.sections.iter().map(|section| section.bytes().div_ceil(section.tokens_per_row.max(1) as usize)).sum()
    }

    /// Returns true if rows of some sections stand for several tokens.
    pub fn is_compressed(&self) -> bool {
        self.sections.iter().any(|section| section.tokens_per_row != 1)
    }

    /// Iterates over the shapes of all tensors in canonical order: by section, by layer, K before V, without missing
    /// Vs.
    pub fn tensors(&self) -> impl Iterator<Item = Rows> + '_ {
        self.sections.iter().flat_map(|section| &section.layers).flat_map(LayerShape::tensors)
    }

    /// Returns the number of tensors in all sections.
    pub fn n_tensors(&self) -> usize {
        self.sections.iter().map(Section::n_tensors).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(n_values: u32) -> KvLayout {
        let rows = Rows { dtype: Dtype::F16, n_values };
        let layer = LayerShape { k: rows, v: Some(rows) };
        KvLayout {
            rope: RopePairing::Interleaved,
            sections: vec![Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers: vec![layer; 30] }],
            states: Vec::new(),
        }
    }

    #[test]
    fn sizes_follow_from_the_shape() {
        // SmolLM2-135M: 30 layers, 3 KV heads of 64.
        assert_eq!(layout(192).bytes_per_position(), 23_040);
        assert_eq!(layout(192).n_tensors(), 60);
    }

    #[test]
    fn impossible_layouts_are_refused() {
        assert!(layout(192).check().is_ok());
        assert!(layout(0).check().is_err());
        assert!(layout(u32::MAX).check().is_err());
        let empty = KvLayout { rope: RopePairing::None, sections: vec![], states: Vec::new() };
        assert!(empty.check().is_err());
        let mut windowed = layout(1);
        windowed.sections[0].window = Some(0);
        assert!(windowed.check().is_err());
        let mut deep = layout(1);
        deep.sections[0].layers = vec![deep.sections[0].layers[0]; MAX_LAYERS + 1];
        assert!(deep.check().is_err());
    }

    #[test]
    fn rows_of_quantized_values_are_whole_blocks() {
        let sizes = [(Dtype::Q4_0, 36), (Dtype::Q4_1, 40), (Dtype::Q5_0, 44), (Dtype::Q5_1, 48), (Dtype::Q8_0, 68)];
        for (dtype, n_bytes) in sizes {
            assert_eq!(Rows { dtype, n_values: 64 }.bytes(), n_bytes);
            let mut mixed = layout(64);
            mixed.sections[0].layers[3].k = Rows { dtype, n_values: 64 };
            assert_eq!(mixed.check(), Ok(()));
            assert!(mixed.is_quantized());
            for odd in [1, 31, 48, 65] {
                mixed.sections[0].layers[3].k.n_values = odd;
                assert!(mixed.check().is_err(), "{dtype:?}, {odd} values");
            }
        }
        assert!(!layout(64).is_quantized());
    }

    #[test]
    fn hadamard_rotations_are_powers_of_two_and_named_only_if_there_are_any() {
        let mut rotated = layout(64);
        assert!(!serde_json::to_string(&rotated).unwrap().contains("n_rot"));
        for (n_rot, is_possible) in
            [([128, 0], true), ([64, 4096], true), ([0, 48], false), ([8192, 0], false), ([u32::MAX, 1], false)]
        {
            rotated.sections[0].n_rot = n_rot;
            assert_eq!(rotated.check().is_ok(), is_possible, "{n_rot:?}");
            let again: KvLayout = serde_json::from_str(&serde_json::to_string(&rotated).unwrap()).unwrap();
            assert_eq!(again, rotated);
            assert_ne!(again, layout(64), "another rotation is another layout");
        }
    }

    #[test]
    fn rows_of_several_tokens_have_no_window_and_exist_when_their_last_token_does() {
        let mut compressed = layout(64);
        assert!(!serde_json::to_string(&compressed).unwrap().contains("tokens_per_row"));
        for (tokens_per_row, is_possible) in [(0, false), (1, true), (128, true), (4096, true), (4097, false)] {
            compressed.sections[0].tokens_per_row = tokens_per_row;
            assert_eq!(compressed.check().is_ok(), is_possible, "{tokens_per_row}");
            let again: KvLayout = serde_json::from_str(&serde_json::to_string(&compressed).unwrap()).unwrap();
            assert_eq!(again, compressed);
        }
        compressed.sections[0].tokens_per_row = 4;
        let section = &compressed.sections[0];
        assert_eq!(
            [(0, 3), (0, 4), (3, 4), (4, 11), (9, 9)].map(|(a, b)| section.rows_of(a, b).len()),
            [0, 1, 1, 1, 0]
        );
        assert_eq!(compressed.bytes_per_position(), layout(64).bytes_per_position() / 4);
        assert!(compressed.is_compressed() && !layout(64).is_compressed());
        compressed.sections[0].window = Some(8);
        assert!(compressed.check().is_err());
    }

    #[test]
    fn states_have_floats_of_a_bounded_size() {
        let with = |dtype, n_values| {
            let values = Rows { dtype, n_values };
            let states = vec![StateShape { kind: StateKind::Recurrence, values }; 2];
            KvLayout { sections: Vec::new(), states, ..layout(1) }
        };
        assert_eq!(with(Dtype::F32, 1 << 27).check(), Ok(()));
        assert_eq!(with(Dtype::F32, 1 << 20).state_bytes(), 8 << 20);
        for (dtype, n_values) in
            [(Dtype::F32, 0), (Dtype::F32, (1 << 27) + 1), (Dtype::F16, 1 << 29), (Dtype::Q8_0, 32)]
        {
            assert!(with(dtype, n_values).check().is_err(), "{dtype:?} {n_values}");
        }
    }
}
