//! Writes llama.cpp's sequence state: where each row goes, and the only way to make an [`ImportBlob`].
//!
//! llama.cpp checks nothing: it accepts positions with gaps, repeated or impossible positions, trailing bytes and NaN,
//! and one NaN spoils every sequence of the cache. So only an [`ImportBlob`] reaches it. Its headers are written here,
//! from a checked layout and consecutive positions. Every value is checked to be finite exactly once: those of a
//! [`VerifiedKv`] by the reader that made it, those of a plain [`Chunk`] in [`ImportBlob::build`]. The format is in
//! [`super::blob`].

use std::ops::Range;

use baton_schemas::kv::{Chunk, Dtype, KvLayout, Places, Rows, Section, VerifiedKv, all_finite};

use super::blob::BlobError;
use super::blob::form::{BlobForm, CellForm, HEADER_BYTES, MAGIC, SEQUENCE, SectionForm, TENSOR_HEADER_BYTES};
use super::positions::TokenPositions;

/// Positions one blob may hold: four times the largest ubatch, and few enough that headers stay small.
pub const MAX_POSITIONS: u32 = 1 << 16;

/// Where the rows of a chunk lie in a blob.
///
/// A reader of a handoff puts each tensor's rows at their [`BlobPlacement::places`], and [`BlobPlacement::seal`] makes
/// its buffer the blob: no row is copied after it was received.
#[derive(Debug, Clone)]
pub struct BlobPlacement {
    form: BlobForm,
    /// The tokens that it holds.
    positions: Range<u32>,
    /// Where these lie.
    at: TokenPositions,
    starts: Vec<u32>,
    n_bytes: usize,
    /// First byte of the section with a window.
    window_at: Option<usize>,
    rows: Vec<Range<usize>>,
    /// Everything except rows: its offset in the blob, and its part of `header_bytes`.
    headers: Vec<(usize, Range<usize>)>,
    header_bytes: Vec<u8>,
}

impl BlobPlacement {
    /// The placement for the KV of `positions`, at most [`MAX_POSITIONS`]. Section `i` of the layout holds the rows from
    /// `section_starts[i]` on. The rules are those of [`Chunk::check`].
    pub fn new(form: &BlobForm, positions: Range<u32>, section_starts: &[u32]) -> Result<Self, BlobError> {
        Self::among(form, positions, section_starts, TokenPositions::default())
    }

    /// The same for a slot whose tokens lie so. The byte ranges do not depend on it.
    pub(super) fn among(
        form: &BlobForm,
        positions: Range<u32>,
        section_starts: &[u32],
        at: TokenPositions,
    ) -> Result<Self, BlobError> {
        let layout = form.layout();
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
        // Sections without layers hold all positions.
        let n_rows = form.sections().iter().filter(|section| matches!(section, SectionForm::Rows(_))).count();
        if n_rows > 0 && n_rows == section_starts.iter().filter(|start| **start == p1).count() {
            return wrong(format!("no section holds any of {p0}..{p1}"));
        }
        let placement = BlobPlacement {
            form: form.clone(),
            positions,
            at,
            starts: section_starts.to_vec(),
            n_bytes: 0,
            window_at: None,
            rows: Vec::with_capacity(2 * layout.n_tensors()),
            headers: Vec::new(),
            header_bytes: Vec::new(),
        };
        placement.laid_out().ok_or_else(|| BlobError::Shape("a state of more bytes than memory".into()))
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
        let has_v = self.form.layout().sections.iter().flat_map(|s| &s.layers).flat_map(|l| [true, l.v.is_some()]);
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
        if kv.layout() != &**self.form.layout() || (span.p0..span.p1) != self.positions || span.starts != self.starts {
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
        let layers = self.form.layout().sections.iter().flat_map(|s| &s.layers);
        layers.flat_map(|l| [l.k.dtype, l.v.unwrap_or(l.k).dtype])
    }

    /// Lays out the blob from its first byte to its last. `None` if it has more bytes than a `usize` counts.
    fn laid_out(mut self) -> Option<Self> {
        self.header(&MAGIC.to_le_bytes())?;
        self.header(&SEQUENCE.to_le_bytes())?;
        let (form, starts) = (self.form.clone(), self.starts.clone());
        let mut starts = starts.into_iter();
        for section in form.sections() {
            match section {
                SectionForm::Rows(section) if section.layers.is_empty() => {
                    self.section(section, self.positions.start)?
                }
                SectionForm::Rows(section) => self.section(section, starts.next()?)?,
                SectionForm::States(states) => {
                    let mut bytes = Vec::new();
                    states.write_none(&mut bytes);
                    self.header(&bytes)?;
                }
            }
        }
        Some(self)
    }

    /// Lays out the rows from `start` on.
    fn section(&mut self, section: &Section, start: u32) -> Option<()> {
        let n_cells = self.positions.end - start;
        if section.window.is_some() {
            self.window_at = Some(self.n_bytes);
        }
        self.header(&1u32.to_le_bytes())?;
        self.header(&n_cells.to_le_bytes())?;
        if n_cells == 0 {
            self.rows.extend(std::iter::repeat_n(self.n_bytes..self.n_bytes, 2 * section.layers.len()));
            return Some(());
        }
        for position in start..self.positions.end {
            self.header(&cell(self.form.cell(), self.at.axes(position)))?;
        }
        let [n_rot_k, n_rot_v] = section.n_rot;
        for number in [0, u32::try_from(section.layers.len()).ok()?, n_rot_k, n_rot_v] {
            self.header(&number.to_le_bytes())?;
        }
        let keys = section.layers.iter().map(|l| self.tensor(Some(l.k), n_cells)).collect::<Option<Vec<_>>>()?;
        let values = section.layers.iter().map(|l| self.tensor(l.v, n_cells)).collect::<Option<Vec<_>>>()?;
        self.rows.extend(keys.into_iter().zip(values).flat_map(|(k, v)| [k, v]));
        Some(())
    }

    /// Lays out a tensor's rows, if there is such a tensor.
    fn tensor(&mut self, rows: Option<Rows>, n_cells: u32) -> Option<Range<usize>> {
        let Some(rows) = rows else { return Some(self.n_bytes..self.n_bytes) };
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

/// The entry of a token's cell.
fn cell(form: CellForm, [position, y, x]: [u32; 3]) -> Vec<u8> {
    let words = match form {
        CellForm::Plain => &[position, 1, SEQUENCE][..],
        // llama.cpp reads the token of models with n-gram embeddings alone.
        CellForm::MultiAxis => &[position, 1, x, y, 0, SEQUENCE],
    };
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A sequence state that is safe to import: consecutive positions, rows of a checked layout, finite values.
pub struct ImportBlob {
    placement: BlobPlacement,
    bytes: Vec<u8>,
}

impl ImportBlob {
    /// Copies the rows of a chunk that no reader has verified. Errors: the chunk does not fit the layout; a value is
    /// not finite.
    pub fn build(chunk: &Chunk, form: &BlobForm) -> Result<ImportBlob, BlobError> {
        Self::build_among(chunk, form, TokenPositions::default(), Vec::new())
    }

    /// The same for a slot whose tokens lie so, in an old buffer: fresh memory costs as much time as the copy.
    pub(super) fn build_among(
        chunk: &Chunk,
        form: &BlobForm,
        at: TokenPositions,
        buffer: Vec<u8>,
    ) -> Result<ImportBlob, BlobError> {
        chunk.check(form.layout())?;
        let starts: Vec<u32> = chunk.sections.iter().map(|s| s.start).collect();
        let placement = BlobPlacement::among(form, chunk.p0..chunk.p1, &starts, at)?;
        let mut blob = buffer;
        // Rows and headers cover all of it.
        blob.resize(placement.n_bytes(), 0);
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
        self.placement.form.layout()
    }

    /// The tokens that it holds.
    pub fn positions(&self) -> Range<u32> {
        self.placement.positions()
    }

    /// The positions of its tokens.
    pub(super) fn at(&self) -> &TokenPositions {
        &self.placement.at
    }

    /// First position of the windowed section. `None` if there is no such section or it is empty.
    pub(super) fn window_start(&self) -> Option<u32> {
        let windowed = self.layout().sections.iter().zip(&self.placement.starts);
        let start = windowed.filter(|(section, _)| section.window.is_some()).map(|(_, start)| *start).next();
        start.filter(|start| *start < self.placement.positions.end)
    }

    /// A blob of the section with a window and those after it, for llama.cpp's `PARTIAL_ONLY` flag.
    pub(super) fn windowed(&self) -> Vec<u8> {
        let start = self.placement.window_at.unwrap_or(self.bytes.len());
        [&self.bytes[..HEADER_BYTES], &self.bytes[start..]].concat()
    }
}
