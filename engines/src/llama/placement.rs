//! llama.cpp's sequence state, put together: where each row goes, and the only way to make an [`ImportBlob`].
//!
//! llama.cpp believes what it is given: gapped, repeated or impossible positions, trailing bytes and NaN are all taken
//! without a word, and the last of these spoils every sequence of the cache. So nothing else than an [`ImportBlob`]
//! reaches it, and its headers are written here, from a checked layout and consecutive positions; rows are looked
//! through for values that are no numbers. The format is in [`super::blob`].

use std::ops::Range;

use baton_schemas::kv::{Chunk, Dtype, KvLayout, Places, all_finite};

use super::blob::{BlobError, CELL_BYTES, MAGIC, TENSOR_HEADER_BYTES, has_v};

/// Positions one blob may hold: four times the largest ubatch, and few enough that headers stay small.
pub const MAX_POSITIONS: u32 = 1 << 16;

/// Where the rows of a chunk lie in a blob.
///
/// A reader from the network allocates `n_bytes`, reads each tensor's rows straight into its range, and calls
/// [`BlobPlacement::seal`]; no row is copied on the way.
#[derive(Debug, Clone)]
pub struct BlobPlacement {
    layout: KvLayout,
    positions: Range<u32>,
    starts: Vec<u32>,
    n_bytes: usize,
    /// Where each section begins.
    sections: Vec<usize>,
    rows: Vec<Range<usize>>,
    /// Everything that is no row: where it lies in the blob, and its part of `header_bytes`.
    headers: Vec<(usize, Range<usize>)>,
    header_bytes: Vec<u8>,
}

impl BlobPlacement {
    /// For the KV of `positions`, of which section `i` holds the rows from `section_starts[i]` on. The rules are those
    /// of [`Chunk::check`]; at most [`MAX_POSITIONS`].
    pub fn new(layout: &KvLayout, positions: Range<u32>, section_starts: &[u32]) -> Result<Self, BlobError> {
        layout.check()?;
        let values = has_v(layout)?;
        let wrong = |what: String| Err(BlobError::Positions(what));
        let Range { start: p0, end: p1 } = positions;
        // The last position llama.cpp can hold is one below its own largest number, which it never removes again.
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

    /// Length of the blob.
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Where each tensor's rows lie, in the order of [`Chunk::tensors`]; an empty range for a V that is not there.
    pub fn rows(&self) -> &[Range<usize>] {
        &self.rows
    }

    /// The same for a reader of handoff streams: there a V that is not there has no range.
    pub fn places(&self) -> Places {
        let has_v = self.layout.sections.iter().flat_map(|s| &s.layers).flat_map(|l| [true, l.v.is_some()]);
        let tensors = self.rows.iter().zip(has_v).filter(|(_, is_there)| *is_there).map(|(rows, _)| rows.clone());
        Places { n_bytes: self.n_bytes, tensors: tensors.collect() }
    }

    /// Positions the blob holds.
    pub fn positions(&self) -> Range<u32> {
        self.positions.clone()
    }

    /// Makes a blob of a buffer whose [`BlobPlacement::rows`] have been filled: writes everything else into it and
    /// looks through the rows. Errors: another length than [`BlobPlacement::n_bytes`]; a value that is not finite.
    pub fn seal(self, mut blob: Vec<u8>) -> Result<ImportBlob, BlobError> {
        if blob.len() != self.n_bytes {
            return Err(BlobError::Shape(format!("a buffer of {} bytes for {}", blob.len(), self.n_bytes)));
        }
        for (at, part) in &self.headers {
            blob[*at..*at + part.len()].copy_from_slice(&self.header_bytes[part.clone()]);
        }
        for (tensor, (dtype, rows)) in self.dtypes().zip(&self.rows).enumerate() {
            if !all_finite(dtype, &blob[rows.clone()]) {
                return Err(BlobError::NotFinite { tensor });
            }
        }
        Ok(ImportBlob { placement: self, bytes: blob })
    }

    /// Of each tensor, in the canonical order; an absent V counts as its K.
    fn dtypes(&self) -> impl Iterator<Item = Dtype> {
        let layers = self.layout.sections.iter().flat_map(|s| &s.layers);
        layers.flat_map(|l| [l.k.dtype, l.v.unwrap_or(l.k).dtype])
    }

    /// Goes through the blob once. `None` if it has more bytes than a `usize` counts.
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

/// Before the first section: magic and sequence.
const HEADER_BYTES: usize = 8;

/// llama.cpp reads the sequence's number and forgets it: the destination is an argument.
const SEQUENCE: u32 = 0;

fn cell(position: u32) -> [u8; CELL_BYTES] {
    let mut cell = [0; CELL_BYTES];
    cell[..4].copy_from_slice(&position.to_le_bytes());
    cell[4..8].copy_from_slice(&1u32.to_le_bytes());
    cell[8..].copy_from_slice(&SEQUENCE.to_le_bytes());
    cell
}

/// A sequence state that llama.cpp may be given: consecutive positions, rows of a checked layout, finite values.
pub struct ImportBlob {
    placement: BlobPlacement,
    bytes: Vec<u8>,
}

impl ImportBlob {
    /// From a chunk, whose rows are copied.
    pub fn build(chunk: &Chunk, layout: &KvLayout) -> Result<ImportBlob, BlobError> {
        chunk.check(layout)?;
        let starts: Vec<u32> = chunk.sections.iter().map(|s| s.start).collect();
        let placement = BlobPlacement::new(layout, chunk.p0..chunk.p1, &starts)?;
        let mut blob = vec![0; placement.n_bytes()];
        for (rows, range) in chunk.tensors().zip(placement.rows()) {
            blob[range.clone()].copy_from_slice(rows);
        }
        placement.seal(blob)
    }

    /// The blob.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The buffer, to be used again.
    pub fn into_buffer(self) -> Vec<u8> {
        self.bytes
    }

    /// The layout it was made for.
    pub fn layout(&self) -> &KvLayout {
        &self.placement.layout
    }

    /// Positions it holds.
    pub fn positions(&self) -> Range<u32> {
        self.placement.positions()
    }

    /// First position of the windowed section, if there is one and it holds any.
    pub(super) fn window_start(&self) -> Option<u32> {
        let windowed = self.placement.layout.sections.iter().zip(&self.placement.starts);
        let start = windowed.filter(|(section, _)| section.window.is_some()).map(|(_, start)| *start).next();
        start.filter(|start| *start < self.placement.positions.end)
    }

    /// A blob of the last section alone, which llama.cpp takes with its `PARTIAL_ONLY` flag.
    pub(super) fn last_section(&self) -> Vec<u8> {
        let start = self.placement.sections.last().copied().unwrap_or_default();
        [&self.bytes[..HEADER_BYTES], &self.bytes[start..]].concat()
    }
}
