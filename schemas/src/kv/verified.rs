//! KV that may reach an engine.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::chunk::{Chunk, LayerRows, SectionRows};
use super::frame::Span;
use super::layout::KvLayout;
use super::placement::Places;

/// A frame that passed every check. Only a [`HandoffReader`](super::reader::HandoffReader) creates one, so its users
/// need not check it again. The MAC is right, it continues the frames before it, and it belongs to the reader's own
/// tokens. Its rows are exactly the layout's, and every value is finite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedKv {
    layout: Arc<KvLayout>,
    span: Span,
    tensors: Vec<Range<usize>>,
    buffer: Vec<u8>,
    is_lossy: bool,
}

impl VerifiedKv {
    pub(super) fn new(layout: Arc<KvLayout>, span: Span, places: Places, buffer: Vec<u8>, is_lossy: bool) -> Self {
        VerifiedKv { layout, span, tensors: places.tensors, buffer, is_lossy }
    }

    /// Returns true if a codec of the stream is lossy, that of its rows or that of its states: the values are not those that were
    /// computed.
    pub fn is_lossy(&self) -> bool {
        self.is_lossy
    }

    /// Returns the rows that the frame has.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Returns the shape of the model's KV.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Returns each tensor's range in the buffer, in the order of [`Span::tensors`].
    pub fn tensors(&self) -> &[Range<usize>] {
        &self.tensors
    }

    /// Returns the buffer, as the reader's [`Placement`](super::placement::Placement) laid it out.
    pub fn buffer(&self) -> &[u8] {
        &self.buffer
    }

    /// Returns the buffer, so that an importer can add what its engine needs between the rows.
    pub fn into_buffer(self) -> Vec<u8> {
        self.buffer
    }

    /// Converts the frame to a chunk. The rows share the buffer and are not copied.
    pub fn into_chunk(self) -> Chunk {
        let buffer = Bytes::from(self.buffer);
        let mut ranges = self.tensors.into_iter();
        let mut next = || ranges.next().map_or_else(Bytes::new, |range| buffer.slice(range));
        let sections = self.layout.sections.iter().zip(&self.span.starts).map(|(section, &start)| {
            let layers = section.layers.iter().map(|layer| {
                let k = next();
                LayerRows { k, v: layer.v.map_or_else(Bytes::new, |_| next()) }
            });
            SectionRows { start, layers: layers.collect() }
        });
        let sections = sections.collect();
        Chunk { p0: self.span.p0, p1: self.span.p1, sections }
    }
}
