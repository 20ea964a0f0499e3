//! Takes blobs apart, without copying what they hold.

use std::ops::Range;

use baton_schemas::kv::layout::{MAX_LAYERS, MAX_ROW_VALUES, MAX_STATE_BYTES};
use bytes::{Buf, Bytes};

use super::error::BlobError;
use super::form::{CellForm, MAGIC, SectionKind, TENSOR_HEADER_BYTES};

/// A section; see the table of [`super`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParsedSection {
    Rows(ParsedRows),
    States(ParsedStates),
}

/// Rows of layers that share a cache.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParsedRows {
    /// The position of each cell, in the cells' order.
    pub positions: Vec<i32>,
    /// Height and width of each cell's token, in models with several axes.
    pub axes: Vec<[i32; 2]>,
    /// Sizes of the Hadamard rotations of K and V; 0 if there are no cells.
    pub n_rot: [u32; 2],
    /// Empty if there are no cells.
    pub layers: Vec<ParsedLayer>,
}

/// One layer's tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedLayer {
    pub k: ParsedTensor,
    /// Values, if the model stores any.
    pub v: Option<ParsedTensor>,
}

/// States of recurrent layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedStates {
    /// The last position that the states have seen. `None`: the sequence has none.
    pub last: Option<i32>,
    /// All layers of the model.
    pub n_layers: u32,
    /// Every convolution, then every recurrence; with values if there is a position.
    pub tensors: Vec<ParsedTensor>,
}

/// One tensor's rows, `[n_cells][row_bytes]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedTensor {
    /// ggml's number of the value type.
    pub ggml_type: i32,
    /// Bytes of one cell's row.
    pub row_bytes: usize,
    /// The rows, as a slice of the blob.
    pub rows: Bytes,
}

/// Possible bytes of a row.
pub(in crate::llama) const ROW_BYTES: Range<u64> = 1..MAX_ROW_VALUES as u64 * 4 + 1;

/// Parses a blob that consists of exactly these sections. Only positions are copied.
pub fn parse(
    blob: &Bytes,
    cell: CellForm,
    kinds: impl IntoIterator<Item = SectionKind>,
) -> Result<Vec<ParsedSection>, BlobError> {
    let mut reader = BlobReader::open(blob)?;
    let section = |kind| match kind {
        SectionKind::Rows { has_v } => {
            reader.expect("n_stream", 1)?;
            Ok(ParsedSection::Rows(reader.stream(cell, has_v)?))
        }
        SectionKind::States { n_recurrent } => Ok(ParsedSection::States(reader.states(n_recurrent)?)),
    };
    let sections = kinds.into_iter().map(section).collect::<Result<_, BlobError>>()?;
    reader.end()?;
    Ok(sections)
}

/// A cursor over the blob that cannot leave it.
pub(in crate::llama) struct BlobReader {
    left: Bytes,
    len: usize,
    sequence: u32,
}

impl BlobReader {
    /// Reads the header of a blob.
    pub(in crate::llama) fn open(blob: &Bytes) -> Result<BlobReader, BlobError> {
        let mut reader = BlobReader { left: blob.clone(), len: blob.len(), sequence: 0 };
        reader.expect("magic", MAGIC)?;
        reader.sequence = reader.u32()?;
        Ok(reader)
    }

    /// Checks that nothing follows.
    pub(in crate::llama) fn end(&self) -> Result<(), BlobError> {
        match self.left.len() {
            0 => Ok(()),
            n => Err(BlobError::Field { field: "bytes after the last section", found: n as u64 }),
        }
    }

    /// What is read by `read`, and its bytes.
    pub(in crate::llama) fn with_bytes<R>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<R, BlobError>,
    ) -> Result<(R, Bytes), BlobError> {
        let before = self.left.clone();
        let found = read(self)?;
        Ok((found, before.slice(..before.len() - self.left.len())))
    }

    /// Reads the cells and rows of a sequence in one stream of a cache.
    pub(in crate::llama) fn stream(&mut self, cell: CellForm, has_v: bool) -> Result<ParsedRows, BlobError> {
        let n_cells = self.count("n_cells", u32::MAX, cell.bytes())?;
        if n_cells == 0 {
            return Ok(ParsedRows::default());
        }
        let mut positions = Vec::with_capacity(n_cells);
        let mut axes = Vec::new();
        for _ in 0..n_cells {
            positions.push(self.cell(cell, &mut axes)?);
        }
        self.expect("v_transposed", 0)?;
        let n_layers = self.count("n_layers", MAX_LAYERS as u32, TENSOR_HEADER_BYTES)?;
        let n_rot = [self.u32()?, self.u32()?];
        let mut tensors = || (0..n_layers).map(|_| self.tensor(&ROW_BYTES, n_cells)).collect::<Result<Vec<_>, _>>();
        let keys = tensors()?;
        let values = if has_v { tensors()?.into_iter().map(Some).collect() } else { vec![None; n_layers] };
        let layers = keys.into_iter().zip(values).map(|(k, v)| ParsedLayer { k, v }).collect();
        Ok(ParsedRows { positions, axes, n_rot, layers })
    }

    fn cell(&mut self, form: CellForm, axes: &mut Vec<[i32; 2]>) -> Result<i32, BlobError> {
        let position = self.u32()?;
        self.expect("a cell's n_sequences", 1)?;
        match form {
            CellForm::Plain => {}
            CellForm::MultiAxis => {
                let [x, y, _token] = [self.u32()?, self.u32()?, self.u32()?];
                axes.push([y, x].map(u32::cast_signed));
            }
        }
        self.expect("a cell's sequence", self.sequence)?;
        Ok(position.cast_signed())
    }

    fn states(&mut self, n_recurrent: usize) -> Result<ParsedStates, BlobError> {
        let last = match self.u32()? {
            0 => None,
            1 => {
                let position = self.u32()?.cast_signed();
                self.expect("the n_sequences of states", 0)?;
                Some(position)
            }
            found => return Err(BlobError::Field { field: "cells of states", found: found.into() }),
        };
        self.expect("s_transposed", 0)?;
        let n_layers = self.u32()?;
        let row_bytes = 0..MAX_STATE_BYTES as u64 + 1;
        let tensor = |_| self.tensor(&row_bytes, usize::from(last.is_some()));
        let tensors = (0..2 * n_recurrent).map(tensor).collect::<Result<_, _>>()?;
        Ok(ParsedStates { last, n_layers, tensors })
    }

    fn tensor(&mut self, possible: &Range<u64>, n_cells: usize) -> Result<ParsedTensor, BlobError> {
        let ggml_type = self.u32()?.cast_signed();
        let row_bytes = self.u64()?;
        if !possible.contains(&row_bytes) {
            return Err(BlobError::Field { field: "a row's bytes", found: row_bytes });
        }
        let row_bytes = row_bytes as usize;
        let rows = self.take(n_cells.saturating_mul(row_bytes))?;
        Ok(ParsedTensor { ggml_type, row_bytes, rows })
    }

    pub(in crate::llama) fn take(&mut self, n_bytes: usize) -> Result<Bytes, BlobError> {
        if n_bytes > self.left.len() {
            return Err(BlobError::Truncated { at: self.len - self.left.len(), n_bytes, len: self.len });
        }
        Ok(self.left.split_to(n_bytes))
    }

    pub(in crate::llama) fn u32(&mut self) -> Result<u32, BlobError> {
        let at = self.len - self.left.len();
        self.left.try_get_u32_le().map_err(|_| BlobError::Truncated { at, n_bytes: 4, len: self.len })
    }

    pub(in crate::llama) fn u64(&mut self) -> Result<u64, BlobError> {
        let at = self.len - self.left.len();
        self.left.try_get_u64_le().map_err(|_| BlobError::Truncated { at, n_bytes: 8, len: self.len })
    }

    pub(in crate::llama) fn expect(&mut self, field: &'static str, value: u32) -> Result<(), BlobError> {
        match self.u32()? {
            found if found == value => Ok(()),
            found => Err(BlobError::Field { field, found: found.into() }),
        }
    }

    /// Reads a count of elements that take at least `bytes_each` bytes, and checks that the rest of the blob has room
    /// for them.
    pub(in crate::llama) fn count(
        &mut self,
        field: &'static str,
        max: u32,
        bytes_each: usize,
    ) -> Result<usize, BlobError> {
        match self.u32()? {
            n if n <= max && (n as usize) <= self.left.len() / bytes_each => Ok(n as usize),
            found => Err(BlobError::Field { field, found: found.into() }),
        }
    }
}
