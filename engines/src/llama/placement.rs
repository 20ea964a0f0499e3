//! Writes llama.cpp's sequence state: where each row goes, and the only way to make an [`ImportBlob`].
//!
//! llama.cpp checks nothing: it accepts positions with gaps, repeated or impossible positions, trailing bytes and NaN,
//! and one NaN spoils every sequence of the cache. So only an [`ImportBlob`] reaches it. Its headers are written here,
//! from a checked layout and consecutive positions. Every value is checked to be finite exactly once: those of a
//! [`VerifiedKv`] by the reader that made it, those of a plain [`Chunk`] in [`ImportBlob::build`]. The format is in
//! [`super::blob`].

use std::ops::Range;

use baton_schemas::kv::{Chunk, Dtype, KvLayout, Places, VerifiedKv, all_finite};

use super::blob::{BlobError, CELL_BYTES, MAGIC, TENSOR_HEADER_BYTES, has_v};

/// Positions one blob may hold: four times the largest ubatch, and few enough that headers stay small.
pub const MAX_POSITIONS: u32 = 1 << 16;

/// Where the rows of a chunk lie in a blob.
///
/// A reader of a handoff puts each tensor's rows at their [`BlobPlacement::places`], and [`BlobPlacement::seal`] makes
/// its buffer the blob: no row is copied after it was received.
#[derive(Debug, Clone)]
pub struct BlobPlacement {
    layout: KvLayout,
    positions: Range<u32>,
    starts: Vec<u32>,
    n_bytes: usize,
    /// First byte of each section.
    sections: Vec<usize>,
    rows: Vec<Range<usize>>,
    /// Everything except rows: its offset in the blob, and its part of `header_bytes`.
    headers: Vec<(usize, Range<usize>)>,
    header_bytes: Vec<u8>,
}

impl BlobPlacement {
    /// The placement for the KV of `positions`, at most [`MAX_POSITIONS`]. Section `i` holds the rows from
    /// `section_starts[i]` on. The rules are those of [`Chunk::check`].
    pub fn new(layout: &KvLayout, positions: Range<u32>, section_starts: &[u32]) -> Result<Self, BlobError> {
        layout.check()?;
        let values = has_v(layout)?;
        let wrong = |what: String| Err(BlobError::Positions(what));
        let Range { start: p0, end: p1 } = positions;
        // llama.cpp can hold the largest i32 as a position but never removes it again.
        if p0 >= p1 || p1 - p0 > MAX_POSITIONS || p1 > i32::MAX.cast_unsigned() {
            return wrong(format!("{p0}..{p1}, of at most {MAX_POSITIONS} positions"));
        }
        if section_starts.len() != layout.sections.len() {
            return wrong(format!("{} starts for {} sections", section_starts.len(), layout.sections.len()));
        }
        for (&start, section) in section_starts.iter().zip(&layout.sections) {
            if !(p0..=p1).contains(&start) || (section.window.is_none() && start != p0) {
                return wrong(format!("a section starts at {start} in {p0}..{p1}"));
            }
        }
        if section_starts.iter().all(|start| *start == p1) {
            return wrong(format!("no section holds any of {p0}..{p1}"));
        }
        let placement = BlobPlacement {
            layout: layout.clone(),
            positions,
            starts: section_starts.to_vec(),
            n_bytes: 0,
            sections: Vec::with_capacity(layout.sections.len()),
            rows: Vec::with_capacity(2 * layout.n_tensors()),
            headers: Vec::new(),
            header_bytes: Vec::new(),
        };
        placement.laid_out(values).ok_or_else(|| BlobError::Shape("a state of more bytes than memory".into()))
    }

    /// Length of the blob, bytes.
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// The byte range of each tensor's rows, in the order of [`Chunk::tensors`]; empty for a V that does not exist.
    pub fn rows(&self) -> &[Range<usize>] {
        &self.rows
    }

    /// The same ranges for a reader of handoff streams, which has none for a V that does not exist.
    pub fn places(&self) -> Places {
        let has_v = self.layout.sections.iter().flat_map(|s| &s.layers).flat_map(|l| [true, l.v.is_some()]);
        let tensors = self.rows.iter().zip(has_v).filter(|(_, is_there)| *is_there).map(|(rows, _)| rows.clone());
        Places { n_bytes: self.n_bytes, tensors: tensors.collect() }
    }

    /// The positions that the blob holds.
    pub fn positions(&self) -> Range<u32> {
        self.positions.clone()
    }

    /// Makes a blob of KV whose rows a reader put at [`BlobPlacement::places`]: writes everything between the rows. The
    /// reader has checked the values. Errors: the KV has another layout, other positions or other places.
    pub fn seal(self, kv: VerifiedKv) -> Result<ImportBlob, BlobError> {
        let span = kv.span();
        if *kv.layout() != self.layout || (span.p0..span.p1) != self.positions || span.starts != self.starts {
            return Err(BlobError::Shape(format!("KV of {span:?} for the positions {:?}", self.positions)));
        }
        if kv.tensors() != self.places().tensors || kv.buffer().len() != self.n_bytes {
            return Err(BlobError::Shape("the rows were received into other places than the blob's".into()));
        }
        Ok(self.complete(kv.into_buffer()))
    }

    /// Writes everything between the rows. The caller has checked the buffer's length and its rows.
    fn complete(self, mut blob: Vec<u8>) -> ImportBlob {
        for (at, part) in &self.headers {
            blob[*at..*at + part.len()].copy_from_slice(&self.header_bytes[part.clone()]);
        }
        ImportBlob { placement: self, bytes: blob }
    }

    /// The value type of each tensor, in the canonical order; a V that does not exist counts as its K.
    fn dtypes(&self) -> impl Iterator<Item = Dtype> {
        let layers = self.layout.sections.iter().flat_map(|s| &s.layers);
        layers.flat_map(|l| [l.k.dtype, l.v.unwrap_or(l.k).dtype])
    }

    /// Lays out the blob from its first byte to its last. `None` if it has more bytes than a `usize` counts.
    fn laid_out(mut self, values: bool) -> Option<Self> {
        self.header(&MAGIC.to_le_bytes())?;
        self.header(&SEQUENCE.to_le_bytes())?;
        for (section, start) in self.layout.sections.clone().into_iter().zip(self.starts.clone()) {
            let n_cells = self.positions.end - start;
            self.sections.push(self.n_bytes);
            self.header(&1u32.to_le_bytes())?;
            self.header(&n_cells.to_le_bytes())?;
            if n_cells == 0 {
                self.rows.extend(std::iter::repeat_n(self.n_bytes..self.n_bytes, 2 * section.layers.len()));
                continue;
            }
            for position in start..self.positions.end {
                self.header(&cell(position))?;
            }
            for number in [0, u32::try_from(section.layers.len()).ok()?, 0, 0] {
                self.header(&number.to_le_bytes())?;
            }
            let keys = section.layers.iter().map(|l| self.tensor(l.k, n_cells)).collect::<Option<Vec<_>>>()?;
            let absent = vec![self.n_bytes..self.n_bytes; keys.len()];
            let values = match values {
                true => section.layers.iter().map(|l| self.tensor(l.v?, n_cells)).collect::<Option<Vec<_>>>()?,
                false => absent,
            };
            self.rows.extend(keys.into_iter().zip(values).flat_map(|(k, v)| [k, v]));
        }
        Some(self)
    }

    fn tensor(&mut self, rows: baton_schemas::kv::Rows, n_cells: u32) -> Option<Range<usize>> {
        let mut header = [0; TENSOR_HEADER_BYTES];
        header[..4].copy_from_slice(&(rows.dtype as i32).to_le_bytes());
        header[4..].copy_from_slice(&(rows.bytes() as u64).to_le_bytes());
        self.header(&header)?;
        let start = self.n_bytes;
        self.n_bytes = start.checked_add(rows.bytes().checked_mul(n_cells as usize)?)?;
        Some(start..self.n_bytes)
    }

    fn header(&mut self, bytes: &[u8]) -> Option<()> {
        let part = self.header_bytes.len()..self.header_bytes.len() + bytes.len();
        self.header_bytes.extend_from_slice(bytes);
        match self.headers.last_mut() {
            Some((at, last)) if *at + last.len() == self.n_bytes => last.end = part.end,
            _ => self.headers.push((self.n_bytes, part)),
        }
        self.n_bytes = self.n_bytes.checked_add(bytes.len())?;
        Some(())
    }
}

/// Bytes before the first section: magic and sequence.
const HEADER_BYTES: usize = 8;

/// llama.cpp ignores the sequence number in a blob: the destination is an argument.
const SEQUENCE: u32 = 0;

fn cell(position: u32) -> [u8; CELL_BYTES] {
    let mut cell = [0; CELL_BYTES];
    cell[..4].copy_from_slice(&position.to_le_bytes());
    cell[4..8].copy_from_slice(&1u32.to_le_bytes());
    cell[8..].copy_from_slice(&SEQUENCE.to_le_bytes());
    cell
}

/// A sequence state that is safe to import: consecutive positions, rows of a checked layout, finite values.
pub struct ImportBlob {
    placement: BlobPlacement,
    bytes: Vec<u8>,
}

impl ImportBlob {
    /// Copies the rows of a chunk that no reader has verified. Errors: the chunk does not fit the layout; a value is
    /// not finite.
    pub fn build(chunk: &Chunk, layout: &KvLayout) -> Result<ImportBlob, BlobError> {
        chunk.check(layout)?;
        let starts: Vec<u32> = chunk.sections.iter().map(|s| s.start).collect();
        let placement = BlobPlacement::new(layout, chunk.p0..chunk.p1, &starts)?;
        let mut blob = vec![0; placement.n_bytes()];
        for (tensor, ((rows, dtype), range)) in chunk.tensors().zip(placement.dtypes()).zip(&placement.rows).enumerate()
        {
            if !all_finite(dtype, rows) {
                return Err(BlobError::NotFinite { tensor });
            }
            blob[range.clone()].copy_from_slice(rows);
        }
        Ok(placement.complete(blob))
    }

    /// The whole blob, as llama.cpp reads it.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The buffer, for reuse.
    pub fn into_buffer(self) -> Vec<u8> {
        self.bytes
    }

    /// The layout of its rows.
    pub fn layout(&self) -> &KvLayout {
        &self.placement.layout
    }

    /// The positions that it holds.
    pub fn positions(&self) -> Range<u32> {
        self.placement.positions()
    }

    /// First position of the windowed section. `None` if there is no such section or it is empty.
    pub(super) fn window_start(&self) -> Option<u32> {
        let windowed = self.placement.layout.sections.iter().zip(&self.placement.starts);
        let start = windowed.filter(|(section, _)| section.window.is_some()).map(|(_, start)| *start).next();
        start.filter(|start| *start < self.placement.positions.end)
    }

    /// A blob of the last section alone, for llama.cpp's `PARTIAL_ONLY` flag.
    pub(super) fn last_section(&self) -> Vec<u8> {
        let start = self.placement.sections.last().copied().unwrap_or_default();
        [&self.bytes[..HEADER_BYTES], &self.bytes[start..]].concat()
    }
}
