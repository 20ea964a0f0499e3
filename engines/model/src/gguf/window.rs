//! Which layers have a sliding window, and the layout of KV that follows from it.
//!
//! For the engines that keep KV themselves. llama.cpp's own layout is read from its state.

use baton_schemas::kv::{Dtype, KvLayout, LayerShape, RopePairing, Rows, Section};

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
    /// The window of a Gemma 3 model. `None`: all layers attend to all positions, as in the other families that are
    /// computed without llama.cpp. Errors: the header describes it in a form that is not known here.
    pub fn of(gguf: &Gguf) -> Result<Option<Window>, String> {
        const GEMMA: &str = "gemma3";
        if gguf.architecture() != Some(GEMMA) {
            return Ok(None);
        }
        let number = |suffix: &str, default: u64| {
            let n = gguf.get(&format!("{GEMMA}.{suffix}")).map_or(Some(default), Value::as_u64);
            let n = n.and_then(|n| u32::try_from(n).ok());
            n.ok_or_else(|| format!("its {suffix} is not one number of 32 bits"))
        };
        let n_positions = number("attention.sliding_window", 0)?;
        let period = number("attention.sliding_window_pattern", GEMMA_PERIOD)?;
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

/// The layers of each section of the KV layout: those that keep every position first, as in llama.cpp.
pub fn sections(n_layers: usize, window: Option<Window>) -> Vec<Vec<usize>> {
    let is_windowed = |layer: &usize| window.is_some_and(|window| window.covers(*layer));
    let (windowed, full): (Vec<usize>, Vec<usize>) = (0..n_layers).partition(is_windowed);
    [full, windowed].into_iter().filter(|layers| !layers.is_empty()).collect()
}

/// The layout in which KV is handed over: llama.cpp's for a cache of f16, with `n_values` in each row of K and of V.
pub fn f16_layout(rope: RopePairing, n_values: usize, sections: &[Vec<usize>], window: Option<Window>) -> KvLayout {
    // A number that is too large does not pass the layout's check.
    let rows = Rows { dtype: Dtype::F16, n_values: u32::try_from(n_values).unwrap_or(u32::MAX) };
    let section = |layers: &Vec<usize>| Section {
        window: window.filter(|window| window.covers(layers[0])).map(|window| window.n_positions as u32),
        n_rot: [0; 2],
        tokens_per_row: 1,
        layers: vec![LayerShape { k: rows, v: Some(rows) }; layers.len()],
    };
    KvLayout { rope, sections: sections.iter().map(section).collect(), states: Vec::new() }
}
