//! The rows of a sequence in pieces: those of the cache, then those that arrived.

use baton_schemas::kv::{Chunk, KvLayout, LayerRows, SectionRows};
use bytes::Bytes;

/// The rows of each layer's K from the section's start on, in pieces.
pub(super) struct RowPieces {
    /// The position of the first windowed row.
    pub(super) window_start: u32,
    /// `[section][layer][piece]`.
    pub(super) sections: Vec<Vec<Vec<Bytes>>>,
}

/// The rows of consecutive chunks that begin at position 0, up to `end`. The window's are those after the last gap.
pub(super) fn of(chunks: &[Chunk], layout: &KvLayout, end: u32) -> RowPieces {
    let chunks: Vec<Chunk> = chunks
        .iter()
        .filter(|chunk| chunk.p0 < end)
        .map(|chunk| part(chunk, layout, chunk.p0, end.min(chunk.p1)))
        .collect();
    let mut window_start = 0;
    let sections = layout.sections.iter().enumerate().map(|(s, section)| {
        let from = chunks.iter().rposition(|chunk| chunk.sections[s].start > chunk.p0).unwrap_or(0);
        if section.window.is_some() {
            window_start = chunks.get(from).map_or(0, |chunk| chunk.sections[s].start);
        }
        let of_layer = |l: usize| chunks[from..].iter().map(|chunk| chunk.sections[s].layers[l].k.clone()).collect();
        (0..section.layers.len()).map(of_layer).collect()
    });
    let sections = sections.collect();
    RowPieces { window_start, sections }
}

/// The part of a chunk at positions `p0..p1`, which it has. The rows are slices.
pub(super) fn part(chunk: &Chunk, layout: &KvLayout, p0: u32, p1: u32) -> Chunk {
    let sections = chunk.sections.iter().zip(&layout.sections).map(|(rows, section)| {
        let start = rows.start.clamp(p0, p1);
        let first = section.rows_of(rows.start, rows.start).start;
        let wanted = section.rows_of(start, p1);
        let layers = rows.layers.iter().zip(&section.layers).map(|(layer, shape)| {
            let at = |row: u32| (row - first) as usize * shape.k.bytes();
            let k = if wanted.is_empty() { Bytes::new() } else { layer.k.slice(at(wanted.start)..at(wanted.end)) };
            LayerRows { k, v: Bytes::new() }
        });
        SectionRows { start, layers: layers.collect() }
    });
    Chunk { p0, p1, sections: sections.collect() }
}

/// Leaves out windowed rows that the position after the chunk does not attend to.
pub(super) fn trim_window(chunk: &mut Chunk, layout: &KvLayout) {
    let Chunk { p0, p1, .. } = *chunk;
    for (rows, section) in chunk.sections.iter_mut().zip(&layout.sections) {
        let Some(window) = section.window else { continue };
        let start = (p1 + 1).saturating_sub(window).clamp(p0, p1).max(rows.start);
        let n_left_out = (start - rows.start) as usize;
        for (layer, shape) in rows.layers.iter_mut().zip(&section.layers) {
            layer.k = layer.k.slice(n_left_out * shape.k.bytes()..);
        }
        rows.start = start;
    }
}

/// The same chunk with rows of its own, so that it keeps no larger buffer.
pub(super) fn copied(chunk: Chunk) -> Chunk {
    let copy = |section: SectionRows| {
        let layers = section.layers.into_iter().map(|layer| LayerRows { k: Bytes::copy_from_slice(&layer.k), ..layer });
        SectionRows { layers: layers.collect(), ..section }
    };
    Chunk { sections: chunk.sections.into_iter().map(copy).collect(), ..chunk }
}
