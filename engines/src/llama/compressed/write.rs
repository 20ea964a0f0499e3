//! Writes whole states of compressed caches as llama.cpp reads them, and the only place that makes a [`WholeBlob`].
//!
//! llama.cpp takes fewer rows than the positions need, and NaN. So only a [`WholeBlob`] reaches it: consecutive positions from 0,
//! all rows that these complete, and values that were checked when they arrived.

use baton_schemas::kv::Dtype;

use super::form::{CompressedForm, CompressorForm, StatePlace};
use super::pieces::RowPieces;
use super::whole_blob::WholeBlob;
use super::{CACHE_VERSION, COMPRESSOR_VERSION, EVERYTHING, MAGIC, VERSION};
use crate::llama::blob::BlobError;
use crate::llama::blob::form::{MAGIC as BLOB_MAGIC, SEQUENCE};
use crate::llama::import_state::ImportState;

/// Where a sequence's window and states come from.
pub(super) enum Beside<'b> {
    /// The pieces' windowed rows, and states that were handed over.
    States(&'b ImportState),
    /// This context wrote both.
    Written { window: &'b [u8], compressors: &'b [u8] },
}

impl CompressedForm {
    /// The sequence of the first `end` tokens. Errors: rows are missing.
    pub(super) fn blob(&self, pieces: &RowPieces, end: u32, beside: &Beside<'_>) -> Result<WholeBlob, BlobError> {
        let mut to = Vec::new();
        numbers(&mut to, [BLOB_MAGIC, SEQUENCE, MAGIC, VERSION, EVERYTHING]);
        self.cells(&mut to, 0, end);
        numbers(&mut to, [0, 0].into_iter().chain(self.cells_n_rot));
        self.other_streams(&mut to);
        match beside {
            Beside::Written { window, .. } => to.extend(*window),
            Beside::States(_) => self.window_section(&mut to, pieces, end)?,
        }
        let mut finished = pieces.sections.iter().skip(1);
        for cache in &self.caches {
            let n_rows = cache.section.rows_of(0, end).end;
            numbers(&mut to, [CACHE_VERSION, n_rows, 1, cache.layers.len() as u32]);
            let pieces = if cache.layers.is_empty() { None } else { finished.next() };
            for (l, (number, shape)) in cache.layers.iter().zip(&cache.section.layers).enumerate() {
                numbers(&mut to, [*number]);
                tensor_header(&mut to, shape.k.dtype, shape.k.n_values, n_rows);
                let pieces = pieces.and_then(|layers| layers.get(l)).map(Vec::as_slice).unwrap_or_default();
                extend(&mut to, pieces, shape.k.bytes() * n_rows as usize)?;
            }
        }
        match beside {
            Beside::Written { compressors, .. } => to.extend(*compressors),
            Beside::States(states) => self.compressor_sections(&mut to, states),
        }
        Ok(WholeBlob::written(to))
    }

    /// The number of streams, and the cells of one of them.
    fn cells(&self, to: &mut Vec<u8>, start: u32, end: u32) {
        numbers(to, [self.n_streams, end - start]);
        (start..end).for_each(|position| numbers(to, [position, 1, SEQUENCE]));
    }

    /// The streams that are empty.
    fn other_streams(&self, to: &mut Vec<u8>) {
        numbers(to, (1..self.n_streams).map(|_| 0));
    }

    fn window_section(&self, to: &mut Vec<u8>, pieces: &RowPieces, end: u32) -> Result<(), BlobError> {
        let Some(section) = self.layout().sections.first() else { return Ok(()) };
        let start = pieces.window_start.max(end.saturating_sub(self.window()));
        // The next position attends to the window's last rows and to itself.
        if start > (end + 1).saturating_sub(self.window()) {
            return Err(BlobError::Positions(format!("windowed rows from {start} on, for position {end}")));
        }
        self.cells(to, start, end);
        numbers(to, [0, section.layers.len() as u32].into_iter().chain(section.n_rot));
        let n_left_out = (start - pieces.window_start) as usize;
        for (layer, shape) in pieces.sections[0].iter().zip(&section.layers) {
            to.extend((shape.k.dtype as i32).to_le_bytes());
            to.extend((shape.k.bytes() as u64).to_le_bytes());
            let rows: Vec<u8> = layer.iter().flatten().copied().collect();
            extend(to, &[&rows[n_left_out * shape.k.bytes()..]], (end - start) as usize * shape.k.bytes())?;
        }
        self.other_streams(to);
        Ok(())
    }

    fn compressor_sections(&self, to: &mut Vec<u8>, states: &ImportState) {
        let places: Vec<StatePlace> = self.states().collect();
        for (compressor, form) in self.compressors.iter().enumerate() {
            let CompressorForm { tokens_per_row, n_tokens, n_values, ref layers } = *form;
            numbers(to, [COMPRESSOR_VERSION, tokens_per_row, n_tokens, n_values, 1, layers.len() as u32]);
            for (layer, number) in layers.iter().enumerate() {
                numbers(to, [*number]);
                for is_score in [false, true] {
                    let wanted = StatePlace { compressor, layer, is_score };
                    let all = places.iter().zip(states.tensors()).zip(&self.layout().states);
                    for ((_, values), shape) in all.filter(|((place, _), _)| **place == wanted) {
                        tensor_header(to, shape.values.dtype, n_values, n_tokens);
                        to.extend(values);
                    }
                }
            }
        }
    }
}

fn numbers(to: &mut Vec<u8>, numbers: impl IntoIterator<Item = u32>) {
    to.extend(numbers.into_iter().flat_map(u32::to_le_bytes));
}

fn tensor_header(to: &mut Vec<u8>, dtype: Dtype, n_values: u32, n_rows: u32) {
    to.extend((dtype as i32).to_le_bytes());
    let row_bytes = n_values as usize / dtype.block_values() * dtype.block_bytes();
    for number in [u64::from(n_values), n_rows.into(), row_bytes as u64] {
        to.extend(number.to_le_bytes());
    }
}

/// Adds pieces that have `n_bytes` together.
fn extend(to: &mut Vec<u8>, pieces: &[impl AsRef<[u8]>], n_bytes: usize) -> Result<(), BlobError> {
    let found: usize = pieces.iter().map(|piece| piece.as_ref().len()).sum();
    if found != n_bytes {
        return Err(BlobError::Shape(format!("{found} bytes of rows instead of {n_bytes}")));
    }
    pieces.iter().for_each(|piece| to.extend_from_slice(piece.as_ref()));
    Ok(())
}
