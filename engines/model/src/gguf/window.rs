//! Which layers have a sliding window, and the layout of KV that follows from it.
//!
//! For the engines that keep KV themselves. llama.cpp's own layout is read from its state.

use baton_schemas::kv::{Dtype, KvLayout, LayerShape, RopePairing, Rows, Section};
use serde::Serialize;

use super::{Gguf, Value};

/// The layers that attend to the last positions only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// The positions that they attend to, the current one included.
    pub n_positions: usize,
    /// Every `period`-th layer attends to all positions.
    pub period: usize,
}

impl Window {
    /// The window of a Gemma 3 or gpt-oss model. `None`: all layers attend to all positions, as in the other families that
    /// are computed without llama.cpp. Errors: the header describes it in a form that is not known here.
    pub fn of(gguf: &Gguf) -> Result<Option<Window>, String> {
        let (name, default_period) = match gguf.architecture() {
            Some(name @ "gemma3") => (name, GEMMA_PERIOD),
            Some(name @ "gpt-oss") => (name, GPT_OSS_PERIOD),
            _ => return Ok(None),
        };
        let number = |suffix: &str, default: u64| {
            let n = gguf.get(&format!("{name}.{suffix}")).map_or(Some(default), Value::as_u64);
            let n = n.and_then(|n| u32::try_from(n).ok());
            n.ok_or_else(|| format!("its {suffix} is not one number of 32 bits"))
        };
        let n_positions = number("attention.sliding_window", 0)?;
        let period = number("attention.sliding_window_pattern", default_period)?;
        if period == 0 {
            return Err("its attention.sliding_window_pattern is 0".into());
        }
        let window = Window { n_positions: n_positions as usize, period: period as usize };
        Ok((n_positions > 0).then_some(window))
    }

    /// Returns true if a layer attends to the last positions only.
    pub fn covers(self, layer: usize) -> bool {
        layer % self.period < self.period - 1
    }
}

/// Gemma 3's period, where a file names none.
pub const GEMMA_PERIOD: u64 = 6;

/// The period of gpt-oss, which files do not name.
pub const GPT_OSS_PERIOD: u64 = 2;

/// The layers of each section of the KV layout: those that keep every position first, as in llama.cpp.
pub fn sections(n_layers: usize, window: Option<Window>) -> Vec<Vec<usize>> {
    let is_windowed = |layer: &usize| window.is_some_and(|window| window.covers(*layer));
    let (windowed, full): (Vec<usize>, Vec<usize>) = (0..n_layers).partition(is_windowed);
    [full, windowed].into_iter().filter(|layers| !layers.is_empty()).collect()
}

/// The layers of one section of the KV layout, which keep rows of the same heads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SectionLayers {
    /// The positions that they attend to; `None`: all.
    pub window: Option<u32>,
    /// KV heads of each layer.
    pub n_kv_heads: usize,
    /// Elements of a head of K, and of V.
    pub head_size: usize,
    /// Their numbers, in rising order. There is at least one.
    pub layers: Vec<usize>,
}

impl SectionLayers {
    /// The sections of a model whose layers all have the same heads.
    pub fn alike(
        sections: Vec<Vec<usize>>,
        window: Option<Window>,
        n_kv_heads: usize,
        head_size: usize,
    ) -> Vec<SectionLayers> {
        let of_section = |layers: Vec<usize>| SectionLayers {
            window: window.filter(|window| window.covers(layers[0])).map(|window| window.n_positions as u32),
            n_kv_heads,
            head_size,
            layers,
        };
        sections.into_iter().map(of_section).collect()
    }
}

/// The layout in which KV is handed over: llama.cpp's for a cache of f16.
pub fn f16_layout(rope: RopePairing, sections: &[SectionLayers]) -> KvLayout {
    let section = |section: &SectionLayers| {
        let n_values = section.n_kv_heads.saturating_mul(section.head_size);
        // A number that is too large does not pass the layout's check.
        let rows = Rows { dtype: Dtype::F16, n_values: u32::try_from(n_values).unwrap_or(u32::MAX) };
        Section {
            window: section.window,
            n_rot: [0; 2],
            tokens_per_row: 1,
            layers: vec![LayerShape { k: rows, v: Some(rows) }; section.layers.len()],
        }
    };
    KvLayout { rope, sections: sections.iter().map(section).collect(), states: Vec::new() }
}
