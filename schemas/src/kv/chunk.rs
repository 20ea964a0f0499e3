//! The KV of a range of positions.

use std::fmt;

use bytes::Bytes;

use super::layout::{KvLayout, Rows};

/// KV of the positions `[p0, p1)`. Cheap to clone: the rows are shared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// First position.
    pub p0: u32,
    /// One past the last position.
    pub p1: u32,
    /// One for each of the layout's sections.
    pub sections: Vec<SectionRows>,
}

/// The rows of one section: those of positions `[start, p1)`. A sliding-window cache may have forgotten the earlier
/// ones, or need none of them: then `start` lies behind `p0`, up to `p1` for no rows at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SectionRows {
    /// Position of the first row, `p0 <= start <= p1`.
    pub start: u32,
    /// One for each of the section's layers.
    pub layers: Vec<LayerRows>,
}

/// Rows of one layer, one after another in the order of positions: `[n_positions][n_values]`, little-endian.
#[derive(Clone, PartialEq, Eq)]
pub struct LayerRows {
    /// Keys, after RoPE.
    pub k: Bytes,
    /// Values, not transposed; empty where the layout has none.
    pub v: Bytes,
}

impl fmt::Debug for LayerRows {
    /// Lengths alone: a chunk's values are megabytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LayerRows({} + {} bytes)", self.k.len(), self.v.len())
    }
}

/// How a chunk differs from its layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the KV chunk does not fit its layout: {0}")]
pub struct ChunkError(pub String);

impl Chunk {
    /// Checks that the rows are exactly those that `layout` asks for.
    pub fn check(&self, layout: &KvLayout) -> Result<(), ChunkError> {
        let wrong = |what: String| Err(ChunkError(what));
        if self.p0 >= self.p1 {
            return wrong(format!("positions {}..{}", self.p0, self.p1));
        }
        if self.sections.len() != layout.sections.len() {
            return wrong(format!("{} sections for {}", self.sections.len(), layout.sections.len()));
        }
        for (rows, section) in self.sections.iter().zip(&layout.sections) {
            if !(self.p0..=self.p1).contains(&rows.start) || (section.window.is_none() && rows.start != self.p0) {
                return wrong(format!("a section starts at {} in {}..{}", rows.start, self.p0, self.p1));
            }
            if rows.layers.len() != section.layers.len() {
                return wrong(format!("{} layers for {}", rows.layers.len(), section.layers.len()));
            }
            let n = (self.p1 - rows.start) as usize;
            for (layer, shape) in rows.layers.iter().zip(&section.layers) {
                let size = |rows: Option<Rows>| n * rows.map_or(0, |r| r.bytes());
                if layer.k.len() != size(Some(shape.k)) || layer.v.len() != size(shape.v) {
                    return wrong(format!("a layer has {} + {} bytes for {n} positions", layer.k.len(), layer.v.len()));
                }
            }
        }
        Ok(())
    }

    /// Number of positions.
    pub fn n_positions(&self) -> u32 {
        self.p1 - self.p0
    }

    /// Bytes of all rows.
    pub fn n_bytes(&self) -> usize {
        self.tensors().map(Bytes::len).sum()
    }

    /// Every tensor's rows in their canonical order: by section, by layer, K before V. A layer without V yields an
    /// empty V.
    pub fn tensors(&self) -> impl Iterator<Item = &Bytes> {
        self.sections.iter().flat_map(|s| &s.layers).flat_map(|l| [&l.k, &l.v])
    }
}
