//! Takes states of compressed caches apart; see the table of [`super`].

use baton_schemas::kv::layout::MAX_LAYERS;
use bytes::Bytes;

use super::{BESIDE, CACHE_VERSION, COMPRESSOR_VERSION, EVERYTHING, MAGIC, MAX_STREAMS, N_COMPRESSORS, VERSION};
use crate::llama::blob::BlobError;
use crate::llama::blob::form::CellForm;
use crate::llama::blob::parse::{BlobReader, ParsedRows, ParsedTensor, ROW_BYTES};

/// A whole state.
pub(in crate::llama) struct ParsedWhole {
    /// Streams of the context's caches.
    pub(in crate::llama) n_streams: u32,
    /// The cells of all positions, which have no rows.
    pub(in crate::llama) cells: ParsedRows,
    /// Finished rows of each compressor.
    pub(in crate::llama) caches: Vec<ParsedCache>,
    pub(in crate::llama) beside: ParsedBeside,
}

/// The parts of a sequence that are no finished rows: the window and the compressors.
pub(in crate::llama) struct ParsedBeside {
    pub(in crate::llama) window: ParsedRows,
    /// The section of the window, as llama.cpp wrote it.
    pub(in crate::llama) window_bytes: Bytes,
    pub(in crate::llama) compressors: Vec<ParsedCompressor>,
    /// The sections of the compressors.
    pub(in crate::llama) compressor_bytes: Bytes,
}

/// Finished rows.
pub(in crate::llama) struct ParsedCache {
    pub(in crate::llama) n_rows: u32,
    /// By the layer's number.
    pub(in crate::llama) layers: Vec<(u32, ParsedTensor)>,
}

/// A compressor's states: the last tokens' K, and their scores.
pub(in crate::llama) struct ParsedCompressor {
    pub(in crate::llama) tokens_per_row: u32,
    /// Tokens that it holds.
    pub(in crate::llama) n_tokens: u32,
    /// Values of each.
    pub(in crate::llama) n_values: u32,
    /// By the layer's number.
    pub(in crate::llama) layers: Vec<(u32, [ParsedTensor; 2])>,
}

/// Returns true if a blob is that of a compressed cache.
pub(in crate::llama) fn is_compressed(blob: &Bytes) -> bool {
    BlobReader::open(blob).and_then(|mut reader| reader.u32()).is_ok_and(|magic| magic == MAGIC)
}

/// Parses all of a sequence.
pub(in crate::llama) fn whole(blob: &Bytes) -> Result<ParsedWhole, BlobError> {
    let mut reader = opened(blob, EVERYTHING)?;
    let (n_streams, cells) = rows(&mut reader)?;
    let (window, window_bytes) = reader.with_bytes(rows)?;
    let caches = (0..N_COMPRESSORS).map(|_| cache(&mut reader)).collect::<Result<_, _>>()?;
    let beside = beside_of(reader, window.1, window_bytes)?;
    Ok(ParsedWhole { n_streams, cells, caches, beside })
}

/// Parses what a sequence has beside finished rows.
pub(in crate::llama) fn beside(blob: &Bytes) -> Result<ParsedBeside, BlobError> {
    let mut reader = opened(blob, BESIDE)?;
    let (window, window_bytes) = reader.with_bytes(rows)?;
    beside_of(reader, window.1, window_bytes)
}

fn beside_of(mut reader: BlobReader, window: ParsedRows, window_bytes: Bytes) -> Result<ParsedBeside, BlobError> {
    let compressors = |reader: &mut BlobReader| (0..N_COMPRESSORS).map(|_| compressor(reader)).collect();
    let (compressors, compressor_bytes) = reader.with_bytes(compressors)?;
    reader.end()?;
    Ok(ParsedBeside { window, window_bytes, compressors, compressor_bytes })
}

fn opened(blob: &Bytes, mode: u32) -> Result<BlobReader, BlobError> {
    let mut reader = BlobReader::open(blob)?;
    reader.expect("the magic of compressed rows", MAGIC)?;
    reader.expect("version", VERSION)?;
    reader.expect("mode", mode)?;
    Ok(reader)
}

/// The number of streams, and the rows of the only one that has any.
fn rows(reader: &mut BlobReader) -> Result<(u32, ParsedRows), BlobError> {
    let n_streams = reader.u32()?;
    if !(1..=MAX_STREAMS).contains(&n_streams) {
        return Err(BlobError::Field { field: "n_stream", found: n_streams.into() });
    }
    let mut rows = ParsedRows::default();
    for _ in 0..n_streams {
        let found = reader.stream(CellForm::Plain, false)?;
        if !found.positions.is_empty() {
            if !rows.positions.is_empty() {
                return Err(BlobError::Shape("rows of two sequences".into()));
            }
            rows = found;
        }
    }
    Ok((n_streams, rows))
}

fn cache(reader: &mut BlobReader) -> Result<ParsedCache, BlobError> {
    reader.expect("version of a cache", CACHE_VERSION)?;
    let n_rows = reader.u32()?;
    reader.expect("n_stream of a cache", 1)?;
    let n_layers = reader.count("layers of a cache", MAX_LAYERS as u32, 1)?;
    let layers = (0..n_layers).map(|_| Ok((reader.u32()?, tensor(reader, n_rows, None)?)));
    Ok(ParsedCache { n_rows, layers: layers.collect::<Result<_, BlobError>>()? })
}

fn compressor(reader: &mut BlobReader) -> Result<ParsedCompressor, BlobError> {
    reader.expect("version of a compressor", COMPRESSOR_VERSION)?;
    let [tokens_per_row, n_tokens, n_values] = [reader.u32()?, reader.u32()?, reader.u32()?];
    reader.expect("n_stream of a compressor", 1)?;
    let n_layers = reader.count("layers of a compressor", MAX_LAYERS as u32, 1)?;
    let layers = (0..n_layers).map(|_| {
        let layer = reader.u32()?;
        let [k, score] = [(); 2].map(|()| tensor(reader, n_tokens, Some(n_values)));
        Ok((layer, [k?, score?]))
    });
    Ok(ParsedCompressor { tokens_per_row, n_tokens, n_values, layers: layers.collect::<Result<_, BlobError>>()? })
}

/// A tensor of `n_rows`, of so many values each if that is known.
fn tensor(reader: &mut BlobReader, n_rows: u32, n_values: Option<u32>) -> Result<ParsedTensor, BlobError> {
    let ggml_type = reader.u32()?.cast_signed();
    let found = reader.u64()?;
    if n_values.is_some_and(|n| u64::from(n) != found) {
        return Err(BlobError::Field { field: "values of a row", found });
    }
    let found = reader.u64()?;
    if found != u64::from(n_rows) {
        return Err(BlobError::Field { field: "rows of a tensor", found });
    }
    let row_bytes = reader.u64()?;
    if !ROW_BYTES.contains(&row_bytes) {
        return Err(BlobError::Field { field: "a row's bytes", found: row_bytes });
    }
    let row_bytes = row_bytes as usize;
    let rows = reader.take(row_bytes.saturating_mul(n_rows as usize))?;
    Ok(ParsedTensor { ggml_type, row_bytes, rows })
}
