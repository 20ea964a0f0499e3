//! The form of a model's sequence states: all that llama.cpp writes except for positions and values. The parser and the
//! writer share it.

use std::sync::Arc;

use baton_schemas::kv::{KvLayout, LayoutError, RopePairing, Section, StateShape};

/// The first four bytes of a blob.
pub(in crate::llama) const MAGIC: u32 = 0xaf14_3cd8;
/// llama.cpp ignores the sequence number in a blob: the destination is an argument.
pub(in crate::llama) const SEQUENCE: u32 = 0;
/// Bytes before the first section: magic and sequence.
pub(in crate::llama) const HEADER_BYTES: usize = 8;
/// Bytes before a tensor's rows.
pub(in crate::llama) const TENSOR_HEADER_BYTES: usize = 12;
/// Bytes of the entry of a sequence's states.
const CELL_BYTES: usize = 8;

/// The sections of a blob, in llama.cpp's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlobForm {
    sections: Vec<SectionForm>,
    layout: Arc<KvLayout>,
}

/// One section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SectionForm {
    /// Rows of layers that share a cache. There may be no layers: the section then has positions alone, as the full cache
    /// of a model whose layers all have a window.
    Rows(Section),
    States(StatesForm),
}

/// The states of the recurrent layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatesForm {
    /// All layers of the model, not only the recurrent ones.
    pub n_layers: u32,
    /// Every convolution, then every recurrence. Some architectures have one of them with no values.
    pub shapes: Vec<StateShape>,
}

/// The kind of a section. A blob does not name it, so a parser must know it beforehand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SectionKind {
    Rows {
        /// V tensors follow the K tensors.
        has_v: bool,
    },
    States {
        /// Recurrent layers.
        n_recurrent: usize,
    },
}

/// A cell's entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CellForm {
    /// A position on one axis.
    Plain,
    /// A position on several axes (M-RoPE).
    MultiAxis,
}

impl CellForm {
    /// The cells of a model with this kind of positions.
    pub fn of(rope: RopePairing) -> CellForm {
        match rope {
            RopePairing::MultiAxis => CellForm::MultiAxis,
            RopePairing::None | RopePairing::Interleaved | RopePairing::HalfSplit => CellForm::Plain,
        }
    }

    /// Bytes of an entry.
    pub fn bytes(self) -> usize {
        match self {
            CellForm::Plain => 12,
            CellForm::MultiAxis => 24,
        }
    }
}

impl SectionForm {
    pub fn kind(&self) -> SectionKind {
        match self {
            SectionForm::Rows(section) => SectionKind::Rows { has_v: section.layers.iter().any(|l| l.v.is_some()) },
            SectionForm::States(states) => SectionKind::States { n_recurrent: states.shapes.len() / 2 },
        }
    }

    /// Returns true if llama.cpp writes this section when it is asked for what a sequence has beside the rows of all
    /// positions (`PARTIAL_ONLY`).
    fn is_partial(&self) -> bool {
        match self {
            SectionForm::Rows(section) => section.window.is_some(),
            SectionForm::States(_) => true,
        }
    }
}

impl BlobForm {
    /// The form of a model with these sections. Errors: the layout that follows from them is not usable.
    pub fn new(rope: RopePairing, sections: Vec<SectionForm>) -> Result<BlobForm, LayoutError> {
        let mut layout = KvLayout { rope, sections: Vec::new(), states: Vec::new() };
        for section in &sections {
            match section {
                SectionForm::Rows(section) if section.layers.is_empty() => {}
                SectionForm::Rows(section) => layout.sections.push(section.clone()),
                SectionForm::States(states) => layout.states.extend(states.of_layout().map(|i| states.shapes[i])),
            }
        }
        layout.check()?;
        // In llama.cpp either all layers of a section have V or none.
        let layers = |section: &Section| section.layers.iter().filter(|l| l.v.is_some()).count();
        match layout.sections.iter().all(|section| [0, section.layers.len()].contains(&layers(section))) {
            true => Ok(BlobForm { sections, layout: Arc::new(layout) }),
            false => Err(LayoutError("some layers of a section have V and some have none".into())),
        }
    }

    pub fn sections(&self) -> &[SectionForm] {
        &self.sections
    }

    /// The layout of the model's KV: the sections that have layers, and the states that have values.
    pub fn layout(&self) -> &Arc<KvLayout> {
        &self.layout
    }

    pub(in crate::llama) fn cell(&self) -> CellForm {
        CellForm::of(self.layout.rope)
    }

    /// The sections of what a sequence has beside the rows of all positions.
    pub(super) fn partial(&self) -> impl Iterator<Item = &SectionForm> {
        self.sections.iter().filter(|section| section.is_partial())
    }

    /// The states, if the model has any.
    pub fn states(&self) -> Option<&StatesForm> {
        self.sections.iter().find_map(|section| match section {
            SectionForm::States(states) => Some(states),
            SectionForm::Rows(_) => None,
        })
    }
}

impl StatesForm {
    /// The index of each state of the layout. A layout has those of a layer together, in the order in which they are computed,
    /// and without those that have no values.
    pub(in crate::llama) fn of_layout(&self) -> impl Iterator<Item = usize> {
        let n_recurrent = self.shapes.len() / 2;
        let by_layer = (0..n_recurrent).flat_map(move |layer| [layer, n_recurrent + layer]);
        by_layer.filter(|i| self.shapes[*i].values.n_values > 0)
    }

    /// Writes the section for a sequence without states.
    pub(in crate::llama) fn write_none(&self, to: &mut Vec<u8>) {
        to.extend(0u32.to_le_bytes());
        self.write_tensors(to, &vec![&[][..]; self.shapes.len()]);
    }

    /// Writes the section for a sequence whose last position is `last`. `values` are those of [`KvLayout::states`].
    pub(in crate::llama) fn write<'v>(&self, to: &mut Vec<u8>, last: u32, values: impl IntoIterator<Item = &'v [u8]>) {
        let mut rows = vec![&[][..]; self.shapes.len()];
        for (index, values) in self.of_layout().zip(values) {
            rows[index] = values;
        }
        for number in [1, last, 0] {
            to.extend(number.to_le_bytes());
        }
        self.write_tensors(to, &rows);
    }

    /// Length of the section, bytes.
    pub(in crate::llama) fn n_bytes(&self, has_states: bool) -> usize {
        let mut bytes = Vec::new();
        self.write_none(&mut bytes);
        let values: usize = self.shapes.iter().map(|shape| shape.values.bytes()).sum();
        bytes.len() + if has_states { CELL_BYTES + values } else { 0 }
    }

    fn write_tensors(&self, to: &mut Vec<u8>, rows: &[&[u8]]) {
        to.extend(0u32.to_le_bytes());
        to.extend(self.n_layers.to_le_bytes());
        for (shape, row) in self.shapes.iter().zip(rows) {
            to.extend((shape.values.dtype as i32).to_le_bytes());
            to.extend((shape.values.bytes() as u64).to_le_bytes());
            to.extend(*row);
        }
    }
}
