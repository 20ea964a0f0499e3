//! Parses llama.cpp's sequence state.
//!
//! `llama_state_seq_get_data` writes, little-endian (llama.cpp's `llama-context.cpp` and `llama-kv-cache.cpp`):
//!
//! ```text
//! u32 magic, i32 sequence
//! per section (a sliding-window model has two: the full cache, then the windowed one):
//!   u32 n_stream (1), u32 n_cells; nothing more if that is 0
//!   n_cells × { i32 position, u32 n_sequences (1), i32 sequence }
//!   u32 v_transposed (0), u32 n_layers, u32 n_rot_k (0), u32 n_rot_v (0)
//!   n_layers × { i32 ggml type, u64 row bytes, K rows in the order of the cells }
//!   n_layers × the same for V; nothing at all with multi-head latent attention
//! ```
//!
//! llama.cpp wrote it in this process. It is checked all the same: a version that writes another format must cause an
//! error and not wrong rows. [`super::placement`] does the opposite.

use std::ops::Range;

use baton_schemas::kv::layout::{MAX_LAYERS, MAX_ROW_VALUES, MAX_SECTIONS};
use baton_schemas::kv::{Chunk, ChunkError, KvLayout, LayerRows, LayoutError, Rows, Section, SectionRows};
use bytes::{Buf, Bytes};

use super::cell_order::CellOrder;

/// The first four bytes of a blob.
pub(super) const MAGIC: u32 = 0xaf14_3cd8;
/// Bytes of a cell's entry.
pub(super) const CELL_BYTES: usize = 12;
/// Bytes before a tensor's rows.
pub(super) const TENSOR_HEADER_BYTES: usize = 12;

/// Why bytes are not a sequence state, or why KV cannot become one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlobError {
    /// The blob ends within a field.
    #[error("the state ends at byte {len}, within {n_bytes} bytes that begin at {at}")]
    Truncated {
        /// Offset of the field.
        at: usize,
        /// Length of the field, bytes.
        n_bytes: usize,
        /// Length of the blob, bytes.
        len: usize,
    },
    /// A header field has a value that is impossible or not supported.
    #[error("the state says {found} for {field}")]
    Field {
        /// Its name in the table above.
        field: &'static str,
        /// The value in the blob.
        found: u64,
    },
    /// The cells are not exactly the requested positions, each once.
    #[error("the cells are wrong: {0}")]
    Positions(String),
    /// The tensors or rows do not fit the layout.
    #[error("the state does not fit the layout: {0}")]
    Shape(String),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A chunk does not fit its layout.
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// A row holds NaN or infinity.
    #[error("tensor {tensor} holds a value that is not finite")]
    NotFinite {
        /// Index of the tensor in the canonical order ([`Chunk::tensors`]).
        tensor: usize,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedBlob {
    /// One section, or two for a model with a sliding window.
    pub sections: Vec<ParsedSection>,
}

/// A section; see the module's table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedSection {
    /// The position of each cell, in the cells' order.
    pub positions: Vec<i32>,
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

/// One tensor's rows, `[n_cells][row_bytes]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedTensor {
    /// ggml's number of the value type.
    pub ggml_type: i32,
    /// Bytes of one cell's row.
    pub row_bytes: usize,
    /// The rows, as a slice of the blob without a copy.
    pub rows: Bytes,
}

/// Parses a blob. Only positions are copied. `has_v` is true if V tensors follow the K tensors, which the blob itself
/// does not say.
pub fn parse(blob: &Bytes, has_v: bool) -> Result<ParsedBlob, BlobError> {
    let mut reader = BlobReader { left: blob.clone(), len: blob.len() };
    reader.expect("magic", MAGIC)?;
    let sequence = reader.u32()?;
    let mut sections = Vec::new();
    while !reader.left.is_empty() {
        if sections.len() == MAX_SECTIONS {
            return Err(BlobError::Field { field: "bytes after the last section", found: reader.left.len() as u64 });
        }
        sections.push(parse_section(&mut reader, sequence, has_v)?);
    }
    Ok(ParsedBlob { sections })
}

/// The rows of an exported blob that holds exactly `positions`. They are slices of the blob. Only if the cells are out
/// of order, as when llama.cpp filled free cells between others, the rows are copied.
pub fn chunk(blob: &Bytes, layout: &KvLayout, positions: Range<u32>) -> Result<Chunk, BlobError> {
    let parsed = parse(blob, has_v(layout)?)?;
    if parsed.sections.len() != layout.sections.len() {
        let message = format!("{} sections for {}", parsed.sections.len(), layout.sections.len());
        return Err(BlobError::Shape(message));
    }
    let sections = parsed.sections.into_iter().zip(&layout.sections);
    let sections = sections.map(|(parsed, section)| rows(parsed, section, &positions)).collect::<Result<_, _>>()?;
    let chunk = Chunk { p0: positions.start, p1: positions.end, sections };
    chunk.check(layout)?;
    Ok(chunk)
}

/// Returns true if a layout's layers have V. In llama.cpp either all layers have it or none.
pub(super) fn has_v(layout: &KvLayout) -> Result<bool, BlobError> {
    let mut layers = layout.sections.iter().flat_map(|s| &s.layers).map(|l| l.v.is_some());
    let first = layers.next().unwrap_or(false);
    match layers.all(|has_v| has_v == first) {
        true => Ok(first),
        false => Err(BlobError::Shape("some layers have V and some have none".into())),
    }
}

fn rows(parsed: ParsedSection, section: &Section, positions: &Range<u32>) -> Result<SectionRows, BlobError> {
    let order = CellOrder::of(&parsed.positions, positions).map_err(BlobError::Positions)?;
    if parsed.positions.is_empty() {
        let layers = vec![LayerRows { k: Bytes::new(), v: Bytes::new() }; section.layers.len()];
        return Ok(SectionRows { start: order.start, layers });
    }
    if parsed.layers.len() != section.layers.len() {
        return Err(BlobError::Shape(format!("{} layers for {}", parsed.layers.len(), section.layers.len())));
    }
    let layers = parsed.layers.into_iter().zip(&section.layers).map(|(layer, shape)| {
        let k = canonical(layer.k, shape.k, &order)?;
        let v = match (layer.v, shape.v) {
            (Some(tensor), Some(rows)) => canonical(tensor, rows, &order)?,
            _ => Bytes::new(),
        };
        Ok(LayerRows { k, v })
    });
    Ok(SectionRows { start: order.start, layers: layers.collect::<Result<_, BlobError>>()? })
}

fn canonical(tensor: ParsedTensor, shape: Rows, order: &CellOrder) -> Result<Bytes, BlobError> {
    if tensor.ggml_type != shape.dtype as i32 || tensor.row_bytes != shape.bytes() {
        let found = format!("rows of {} bytes and type {}", tensor.row_bytes, tensor.ggml_type);
        return Err(BlobError::Shape(format!("{found} for {shape:?}")));
    }
    Ok(order.sorted(tensor.rows, tensor.row_bytes))
}

fn parse_section(reader: &mut BlobReader, sequence: u32, has_v: bool) -> Result<ParsedSection, BlobError> {
    reader.expect("n_stream", 1)?;
    let n_cells = reader.count("n_cells", u32::MAX, CELL_BYTES)?;
    if n_cells == 0 {
        return Ok(ParsedSection { positions: Vec::new(), layers: Vec::new() });
    }
    let mut positions = Vec::with_capacity(n_cells);
    for _ in 0..n_cells {
        positions.push(reader.u32()?.cast_signed());
        reader.expect("a cell's n_sequences", 1)?;
        reader.expect("a cell's sequence", sequence)?;
    }
    reader.expect("v_transposed", 0)?;
    let n_layers = reader.count("n_layers", MAX_LAYERS as u32, TENSOR_HEADER_BYTES)?;
    // Quantized caches are stored rotated, which only llama.cpp can undo.
    reader.expect("n_rot_k", 0)?;
    reader.expect("n_rot_v", 0)?;
    let mut tensors = || (0..n_layers).map(|_| parse_tensor(reader, n_cells)).collect::<Result<Vec<_>, _>>();
    let keys = tensors()?;
    let values = if has_v { tensors()?.into_iter().map(Some).collect() } else { vec![None; n_layers] };
    let layers = keys.into_iter().zip(values).map(|(k, v)| ParsedLayer { k, v }).collect();
    Ok(ParsedSection { positions, layers })
}

fn parse_tensor(reader: &mut BlobReader, n_cells: usize) -> Result<ParsedTensor, BlobError> {
    let ggml_type = reader.u32()?.cast_signed();
    let row_bytes = reader.u64()?;
    if row_bytes == 0 || row_bytes > u64::from(MAX_ROW_VALUES) * 4 {
        return Err(BlobError::Field { field: "a row's bytes", found: row_bytes });
    }
    let row_bytes = row_bytes as usize;
    let rows = reader.take(n_cells.saturating_mul(row_bytes))?;
    Ok(ParsedTensor { ggml_type, row_bytes, rows })
}

/// A cursor over the blob that cannot leave it.
struct BlobReader {
    left: Bytes,
    len: usize,
}

impl BlobReader {
    fn take(&mut self, n_bytes: usize) -> Result<Bytes, BlobError> {
        if n_bytes > self.left.len() {
            return Err(BlobError::Truncated { at: self.len - self.left.len(), n_bytes, len: self.len });
        }
        Ok(self.left.split_to(n_bytes))
    }

    fn u32(&mut self) -> Result<u32, BlobError> {
        let at = self.len - self.left.len();
        self.left.try_get_u32_le().map_err(|_| BlobError::Truncated { at, n_bytes: 4, len: self.len })
    }

    fn u64(&mut self) -> Result<u64, BlobError> {
        let at = self.len - self.left.len();
        self.left.try_get_u64_le().map_err(|_| BlobError::Truncated { at, n_bytes: 8, len: self.len })
    }

    fn expect(&mut self, field: &'static str, value: u32) -> Result<(), BlobError> {
        match self.u32()? {
            found if found == value => Ok(()),
            found => Err(BlobError::Field { field, found: found.into() }),
        }
    }

    /// Reads a count of elements that take at least `bytes_each` bytes, and checks that the rest of the blob has room
    /// for them.
    fn count(&mut self, field: &'static str, max: u32, bytes_each: usize) -> Result<usize, BlobError> {
        match self.u32()? {
            n if n <= max && (n as usize) <= self.left.len() / bytes_each => Ok(n as usize),
            found => Err(BlobError::Field { field, found: found.into() }),
        }
    }
}

#[cfg(test)]
mod tests;
