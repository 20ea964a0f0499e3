//! The numbers of the layers behind a layout.

use baton_schemas::kv::{KvLayout, LayerNumbers, StateKind};

use super::{Gguf, Keeps, KeptLayers, has_compressed_rows};

impl Gguf {
    /// The numbers of the layers behind a layout of this model's KV. What the header does not describe, as with compressed rows,
    /// is left out.
    pub fn layer_numbers(&self, layout: &KvLayout) -> LayerNumbers {
        let is_described = !self.architecture().is_some_and(has_compressed_rows);
        let kept = KeptLayers::of(self).filter(|_| is_described);
        kept.and_then(|kept| kept.numbers(layout)).unwrap_or_default()
    }
}

impl KeptLayers<'_> {
    fn numbers(&self, layout: &KvLayout) -> Option<LayerNumbers> {
        let [mut full, mut windowed, mut indexed, mut recurrent] = [const { Vec::new() }; 4];
        for (layer, number) in (0..self.n_layer).zip(0u32..) {
            let keeps = self.keeps(layer)?;
            if matches!(keeps, Keeps::Rows | Keeps::Both) {
                match self.row(layer)?.window {
                    Some(_) => windowed.push(number),
                    None => full.push(number),
                }
                indexed.extend(self.indexer_row(layer).map(|_| number));
            }
            if matches!(keeps, Keeps::State | Keeps::Both) {
                recurrent.push(number);
            }
        }
        // The first cache of all positions is that of attention; an indexer's follows.
        let mut of_all_positions = [full, indexed].into_iter();
        let sections = layout.sections.iter().map(|section| {
            let numbers = match section.window {
                Some(_) => windowed.clone(),
                None => of_all_positions.next().unwrap_or_default(),
            };
            if numbers.len() == section.layers.len() { numbers } else { Vec::new() }
        });
        let sections = sections.collect();
        Some(LayerNumbers { sections, states: of_states(layout, &recurrent) })
    }
}

/// A recurrent layer has a convolution, a recurrence, or one after the other.
fn of_states(layout: &KvLayout, recurrent: &[u32]) -> Vec<u32> {
    let mut n_begun = 0;
    let mut before = None;
    let layers = layout.states.iter().map(|state| {
        let goes_on = (before, state.kind) == (Some(StateKind::Convolution), StateKind::Recurrence);
        n_begun += usize::from(!goes_on);
        before = Some(state.kind);
        recurrent.get(n_begun - 1).copied()
    });
    let layers: Option<Vec<u32>> = layers.collect();
    layers.filter(|_| n_begun == recurrent.len()).unwrap_or_default()
}
