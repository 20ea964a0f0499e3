//! Which of a model's layers the tensors of a layout belong to.

/// The numbers of the layers behind a [`KvLayout`](super::KvLayout), for people. A layout lists only the layers that keep something
/// of a kind, so that its first layer may be the model's third. It never crosses the wire.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayerNumbers {
    /// For each section the numbers of its layers, from 0. Those of a section are empty if they are not known.
    pub sections: Vec<Vec<u32>>,
    /// For each state the number of its layer. Empty if they are not known.
    pub states: Vec<u32>,
}

impl LayerNumbers {
    /// The number of a section's layer, by its place there.
    pub fn of_rows(&self, section: usize, layer: usize) -> Option<u32> {
        self.sections.get(section)?.get(layer).copied()
    }

    /// The number of the layer of a state.
    pub fn of_state(&self, state: usize) -> Option<u32> {
        self.states.get(state).copied()
    }
}
