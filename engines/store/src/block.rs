//! The unit of the store.

use baton_schemas::kv::{Chunk, ChunkError, KvLayout, SectionRows, StatePart};

/// The rows of some positions of a prompt, and the states at their end if the model has any and they were kept there. Cheap to
/// clone: clones share the values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvBlock {
    /// The rows.
    pub chunk: Chunk,
    /// All states of the position `chunk.p1`. Without them, a sequence of a model with states cannot end here.
    pub state: Option<StatePart>,
    /// The values, or some before them, went through a lossy codec: they are nearly what the model's weights compute.
    pub is_lossy: bool,
}

impl KvBlock {
    /// Checks that the values are exactly those of `layout`.
    pub fn check(&self, layout: &KvLayout) -> Result<(), ChunkError> {
        self.chunk.check(layout)?;
        let Some(state) = &self.state else { return Ok(()) };
        state.check(layout)?;
        let is_whole = state.first == 0 && state.tensors.len() == layout.states.len();
        if !is_whole || state.position != self.chunk.p1 {
            let message = format!("states of position {} in a block that ends at {}", state.position, self.chunk.p1);
            return Err(ChunkError(message));
        }
        Ok(())
    }

    /// The block's positions below `end`, which is behind its first one. The values are not copied.
    pub fn up_to(mut self, end: u32, layout: &KvLayout) -> KvBlock {
        let Chunk { p1, sections, .. } = &mut self.chunk;
        if end >= *p1 {
            return self;
        }
        for (SectionRows { start, layers }, section) in sections.iter_mut().zip(&layout.sections) {
            let n_rows = section.rows_of(*start, *p1).len();
            let n_left = section.rows_of(*start, end.max(*start)).len();
            for rows in layers.iter_mut().flat_map(|layer| [&mut layer.k, &mut layer.v]).filter(|_| n_rows > 0) {
                rows.truncate(rows.len() / n_rows * n_left);
            }
            *start = end.min(*start);
        }
        *p1 = end;
        self.state = None;
        self
    }

    /// The block's positions from `start` on, which is before its end. The values are not copied. Only where each row is that of
    /// one position.
    pub fn after(mut self, start: u32) -> KvBlock {
        let Chunk { p0, p1, sections } = &mut self.chunk;
        if start <= *p0 {
            return self;
        }
        for SectionRows { start: first, layers } in sections {
            let (n_rows, n_left) = ((*p1 - *first) as usize, (*p1 - start.max(*first)) as usize);
            for rows in layers.iter_mut().flat_map(|layer| [&mut layer.k, &mut layer.v]).filter(|_| n_rows > 0) {
                drop(rows.split_to(rows.len() / n_rows * (n_rows - n_left)));
            }
            *first = start.max(*first);
        }
        *p0 = start;
        self
    }

    /// Returns the number of bytes of all values.
    pub fn n_bytes(&self) -> usize {
        self.chunk.n_bytes() + self.state.as_ref().map_or(0, StatePart::n_bytes)
    }
}

/// The name of a block's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileName {
    pub(crate) name: String,
    /// It was written by a lossy codec.
    pub(crate) is_lossy: bool,
}

/// A block's place in its prompt.
#[derive(Debug, Default)]
pub(crate) struct PlaceInPrompt {
    /// Its first position.
    pub(crate) p0: u32,
    /// The cost of computing its tokens again (see `TreeNode::cost`).
    pub(crate) cost: f64,
    /// The files of the blocks before it, the last one first.
    pub(crate) before: Vec<UsedFile>,
}

/// A file that was used.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct UsedFile {
    /// Its block's first position.
    pub(crate) p0: u32,
    pub(crate) name: String,
    /// The cost of computing its tokens again (see `TreeNode::cost`).
    pub(crate) cost: f64,
}
