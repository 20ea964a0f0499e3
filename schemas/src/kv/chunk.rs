//! The KV of a range of positions.

use std::fmt;

use bytes::Bytes;

use super::layout::{KvLayout, Rows};

/// The KV of the positions `[p0, p1)`. Cheap to clone: clones share the rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// The first position.
    pub p0: u32,
    /// One past the last position.
    pub p1: u32,
    /// The rows of each of the layout's sections.
    pub sections: Vec<SectionRows>,
}

/// The rows of one section, for the positions `[start, p1)`. A sliding-window cache may have dropped the earlier rows,
/// or may not need them: `start` is then greater than `p0`. If it equals `p1`, there are no rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SectionRows {
    /// The position of the first row, `p0 <= start <= p1`.
    pub start: u32,
    /// The rows of each of the section's layers.
    pub layers: Vec<LayerRows>,
}

/// The rows of one layer, ordered by position: `[n_rows][n_values]`, little-endian. Without compression there is a row for each
/// position; else those that the positions complete ([`Section::rows_of`](super::layout::Section::rows_of)).
#[derive(Clone, PartialEq, Eq)]
pub struct LayerRows {
    /// Keys, after RoPE.
    pub k: Bytes,
    /// Values, not transposed; empty if the layout has none.
    pub v: Bytes,
}

impl fmt::Debug for LayerRows {
    /// Shows only lengths: a chunk's values take megabytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LayerRows({} + {} bytes)", self.k.len(), self.v.len())
    }
}

/// How a chunk differs from its layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the KV chunk does not fit its layout: {0}")]
pub struct ChunkError(pub String);

impl Chunk {
    /// Checks that the rows are exactly those of `layout`.
    pub fn check(&self, layout: &KvLayout) -> Result<(), ChunkError> {
        let wrong = |what: String| Err(ChunkError(what));
        if self.p0 >= self.p1 {
            return wrong(format!("positions {}..{}", self.p0, self.p1));
        }
        if self.sections.len() != layout.sections.len() {
            return wrong(format!("{} sections instead of {}", self.sections.len(), layout.sections.len()));
        }
        for (rows, section) in self.sections.iter().zip(&layout.sections) {
            if !(self.p0..=self.p1).contains(&rows.start) || (section.window.is_none() && rows.start != self.p0) {
                return wrong(format!("a section starts at {} in {}..{}", rows.start, self.p0, self.p1));
            }
            if rows.layers.len() != section.layers.len() {
                return wrong(format!("{} layers instead of {}", rows.layers.len(), section.layers.len()));
            }
            let n = section.rows_of(rows.start, self.p1).len();
            for (layer, shape) in rows.layers.iter().zip(&section.layers) {
                let size = |rows: Option<Rows>| n * rows.map_or(0, |r| r.bytes());
                if layer.k.len() != size(Some(shape.k)) || layer.v.len() != size(shape.v) {
                    return wrong(format!("a layer has {} + {} bytes for {n} rows", layer.k.len(), layer.v.len()));
                }
            }
        }
        Ok(())
    }

    /// Returns the number of positions.
    pub fn n_positions(&self) -> u32 {
        self.p1 - self.p0
    }

    /// Returns the number of bytes of all rows.
    pub fn n_bytes(&self) -> usize {
        self.tensors().map(Bytes::len).sum()
    }

    /// Iterates over the rows of every tensor in canonical order: by section, by layer, K before V. A layer without V
    /// yields an empty V.
    pub fn tensors(&self) -> impl Iterator<Item = &Bytes> {
        self.sections.iter().flat_map(|s| &s.layers).flat_map(|l| [&l.k, &l.v])
    }
}
