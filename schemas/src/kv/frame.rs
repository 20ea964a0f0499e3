//! The header of a frame.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | `p0`, first position |
//! | 4 | 4 | `p1`, one past the last position |
//! | 8 | 32 | [`PrefixHasher`](super::prefix::PrefixHasher) hash of the tokens of `[0, p1)` |
//! | 40 | 1 | [`Codec`] |
//! | 41 | 3 | zero |
//! | 44 | 4 | number of sections |
//! | 48 | 4 each | first position of each section's rows |
//!
//! The body follows. Without a codec, it is the rows of every tensor, in the order of
//! [`Chunk::tensors`](super::chunk::Chunk::tensors). With a codec, it is the number of tensors (u32), the encoded
//! length of each (u32), and the encoded tensors. A tensor without rows has length 0.

use super::codec::Codec;
use super::error::FrameError;
use super::handoff::{MAX_FRAME_BYTES, MAX_FRAME_POSITIONS};
use super::layout::{KvLayout, LayerShape, Rows, Section};

/// The number of bytes of a frame header without the sections' positions.
const FIXED_BYTES: usize = 48;

/// Returns the most positions that a frame of this layout can have, at least 1.
pub fn max_frame_positions(layout: &KvLayout) -> u32 {
    // Positions may complete one compressed row more than their share.
    let compressed = layout.sections.iter().filter(|section| section.tokens_per_row > 1);
    let more: usize = compressed.map(Section::bytes).sum();
    let fitting = MAX_FRAME_BYTES.saturating_sub(more as u64) / (layout.bytes_per_position() as u64).max(1);
    u32::try_from(fitting).unwrap_or(u32::MAX).clamp(1, MAX_FRAME_POSITIONS)
}

/// The rows that a frame has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The first position.
    pub p0: u32,
    /// One past the last position.
    pub p1: u32,
    /// The first position of each section's rows, `p0 <= start <= p1`.
    pub starts: Vec<u32>,
}

impl Span {
    /// Iterates over the shape of every tensor's rows and their length in bytes, in canonical order, without missing
    /// Vs.
    pub fn tensors<'a>(&'a self, layout: &'a KvLayout) -> impl Iterator<Item = (Rows, usize)> + 'a {
        layout.sections.iter().zip(&self.starts).flat_map(|(section, start)| {
            let n_rows = section.rows_of(*start, self.p1).len();
            section.layers.iter().flat_map(LayerShape::tensors).map(move |rows| (rows, n_rows * rows.bytes()))
        })
    }

    /// Iterates over the index of the first row of every tensor, in the order of [`Span::tensors`]. Without compression it is the
    /// row's position.
    pub(super) fn tensor_starts<'a>(&'a self, layout: &'a KvLayout) -> impl Iterator<Item = u32> + 'a {
        let sections = layout.sections.iter().zip(&self.starts);
        sections.flat_map(|(section, start)| {
            std::iter::repeat_n(section.rows_of(*start, self.p1).start, section.n_tensors())
        })
    }

    /// Returns the number of bytes of all rows.
    pub fn n_bytes(&self, layout: &KvLayout) -> u64 {
        let sections = layout.sections.iter().zip(&self.starts);
        sections.map(|(section, start)| section.rows_of(*start, self.p1).len() as u64 * section.bytes() as u64).sum()
    }

    /// Checks a peer's span: it starts at `next`, ends at or before `end`, and has every row that decoding at `end`
    /// needs.
    pub fn check(&self, layout: &KvLayout, next: u32, end: u32) -> Result<(), FrameError> {
        let Span { p0, p1, .. } = *self;
        if p0 != next || p1 <= p0 || p1 > end {
            return Err(FrameError::Positions { p0, p1, next, end });
        }
        if p1 - p0 > MAX_FRAME_POSITIONS {
            return Err(FrameError::TooManyPositions { p0, p1, limit: MAX_FRAME_POSITIONS });
        }
        for (section, (&start, shape)) in self.starts.iter().zip(&layout.sections).enumerate() {
            let latest = latest_start(shape.window, p0, p1, end);
            if !(p0..=latest).contains(&start) {
                return Err(FrameError::SectionStart { section, start, earliest: p0, latest, p0, p1 });
            }
        }
        let n_bytes = self.n_bytes(layout);
        if n_bytes > MAX_FRAME_BYTES {
            return Err(FrameError::TooManyBytes { p0, p1, n_bytes, limit: MAX_FRAME_BYTES });
        }
        Ok(())
    }
}

/// Returns the latest position at which a section's rows may start. The token at `end` attends to `window` positions,
/// including its own; earlier rows may be left out.
fn latest_start(window: Option<u32>, p0: u32, p1: u32, end: u32) -> u32 {
    match window {
        None => p0,
        Some(window) => (end + 1).saturating_sub(window).clamp(p0, p1),
    }
}

/// The header of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrameHeader {
    /// The rows of the frame.
    pub span: Span,
    /// The hash of the tokens of `[0, p1)`.
    pub prefix: [u8; 32],
    /// The encoding of the rows.
    pub codec: Codec,
}

impl FrameHeader {
    /// Returns the length of a header for a layout with `n_sections` sections, in bytes.
    pub fn n_bytes(n_sections: usize) -> usize {
        FIXED_BYTES + 4 * n_sections
    }

    /// Writes the header in the wire format.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::n_bytes(self.span.starts.len()));
        bytes.extend(self.span.p0.to_le_bytes());
        bytes.extend(self.span.p1.to_le_bytes());
        bytes.extend(self.prefix);
        bytes.extend([self.codec as u8, 0, 0, 0]);
        bytes.extend((self.span.starts.len() as u32).to_le_bytes());
        bytes.extend(self.span.starts.iter().flat_map(|start| start.to_le_bytes()));
        bytes
    }

    /// Parses the header at the beginning of `bytes`, for a layout with `n_sections` sections. Also returns the bytes
    /// after it. Does not check the span.
    pub fn parse(bytes: &[u8], n_sections: usize) -> Result<(FrameHeader, &[u8]), FrameError> {
        let short = || FrameError::FrameTooShort { n_bytes: bytes.len() };
        let (fixed, rest) = bytes.split_first_chunk::<FIXED_BYTES>().ok_or_else(short)?;
        let [a0, a1, a2, a3, b0, b1, b2, b3, prefix @ .., codec, z0, z1, z2, n0, n1, n2, n3] = *fixed;
        let p0 = u32::from_le_bytes([a0, a1, a2, a3]);
        let p1 = u32::from_le_bytes([b0, b1, b2, b3]);
        let codec = Codec::from_number(codec).ok_or(FrameError::UnknownCodec { p0, p1, codec })?;
        if [z0, z1, z2] != [0; 3] {
            return Err(FrameError::FrameReserved { p0, p1 });
        }
        let found = u32::from_le_bytes([n0, n1, n2, n3]);
        if found as usize != n_sections {
            return Err(FrameError::SectionCount { p0, p1, expected: n_sections, found });
        }
        let (starts, rest) = rest.split_at_checked(4 * n_sections).ok_or_else(short)?;
        let starts = starts.as_chunks::<4>().0.iter().map(|start| u32::from_le_bytes(*start)).collect();
        Ok((FrameHeader { span: Span { p0, p1, starts }, prefix, codec }, rest))
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::{Dtype, RopePairing};
    use super::*;

    #[test]
    fn the_largest_frame_passes_its_checks_and_one_position_more_does_not() {
        for (n_layers, n_values) in [(1, 64), (80, 8_192), (80, 1 << 18)] {
            let rows = Rows { dtype: Dtype::F16, n_values };
            let layers = vec![LayerShape { k: rows, v: Some(rows) }; n_layers];
            let layout = KvLayout {
                rope: RopePairing::None,
                sections: vec![Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers }],
                states: Vec::new(),
            };
            let p1 = max_frame_positions(&layout);
            let check = |p1| Span { p0: 0, p1, starts: vec![0] }.check(&layout, 0, 100_000);
            assert!(check(p1).is_ok() && check(p1 + 1).is_err(), "{n_layers} layers of {n_values}: {p1}");
        }
    }
}
