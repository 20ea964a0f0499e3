//! Takes llama.cpp's sequence state apart.
//!
//! `llama_state_seq_get_data` writes, little-endian (llama.cpp's `llama-context.cpp`, `llama-kv-cache.cpp` and
//! `llama-memory-recurrent.cpp`):
//!
//! ```text
//! u32 magic, i32 sequence
//! per section of rows:
//!   u32 n_stream (1), u32 n_cells; nothing more if that is 0
//!   n_cells × { i32 position, u32 n_sequences (1), with M-RoPE { i32 x, i32 y, i32 token }, i32 sequence }
//!   u32 v_transposed (0), u32 n_layers, u32 n_rot_k, u32 n_rot_v
//!   n_layers × { i32 ggml type, u64 row bytes, K rows in the order of the cells }
//!   n_layers × the same for V; nothing at all with multi-head latent attention
//! the section of states:
//!   u32 n_cells: 1, or 0 for a sequence without states
//!   n_cells × { i32 the last position that they have seen, u32 n_sequences (0) }
//!   u32 s_transposed (0), u32 n_layers (all of the model)
//!   per recurrent layer { i32 ggml type, u64 row bytes, n_cells × the convolution's row }
//!   per recurrent layer the same for the recurrence
//! ```
//!
//! The order of sections: attention to all positions, attention with a window or an indexer's keys; in a hybrid model the
//! states follow attention, and an indexer follows the states. Asked for what a sequence has beside the rows of all positions
//! (`PARTIAL_ONLY`), llama.cpp writes the section with a window and the states.
//!
//! llama.cpp wrote it in this process. It is checked all the same: a version that writes another format must cause an
//! error and not wrong rows. [`super::placement`] and [`super::import_state`] do the opposite.

mod error;
pub mod form;
pub mod parse;

use std::ops::Range;

use baton_schemas::kv::{Chunk, LayerRows, Rows, Section, SectionRows, StatePart};
use bytes::Bytes;

pub use self::error::BlobError;
use self::form::{BlobForm, HEADER_BYTES, SectionForm, StatesForm};
use self::parse::{ParsedRows, ParsedSection, ParsedStates, ParsedTensor, parse};
use super::cell_order::CellOrder;
use super::positions::TokenPositions;

/// The rows of `tokens` in an exported blob that holds exactly these, with all other tokens of the images that they cut, and
/// no states. They are slices of the blob. Only if the cells are out of order, as when llama.cpp filled free cells between
/// others, the rows are copied.
pub fn chunk(
    blob: &Bytes,
    form: &BlobForm,
    tokens: Range<u32>,
    positions: &TokenPositions,
) -> Result<Chunk, BlobError> {
    let parsed = parse(blob, form.cell(), form.sections().iter().map(SectionForm::kind))?;
    let mut sections = Vec::with_capacity(parsed.len());
    for (parsed, form) in parsed.into_iter().zip(form.sections()) {
        match (parsed, form) {
            (ParsedSection::Rows(parsed), SectionForm::Rows(section)) => {
                let rows = rows(parsed, section, &tokens, positions)?;
                if !section.layers.is_empty() {
                    sections.push(rows);
                }
            }
            (ParsedSection::States(ParsedStates { last: None, .. }), SectionForm::States(_)) => {}
            _ => return Err(BlobError::Shape("states beside a chunk's rows".into())),
        }
    }
    let chunk = Chunk { p0: tokens.start, p1: tokens.end, sections };
    chunk.check(form.layout())?;
    Ok(chunk)
}

/// What a sequence has beside the rows of all positions.
pub struct Partial {
    /// The positions of windowed rows, from the first to one past the last. `None`: there are none.
    pub window: Option<Range<u32>>,
    /// The sections before the states, as llama.cpp wrote them.
    pub before_states: Bytes,
    /// All states. `None`: the sequence has none.
    pub states: Option<StatePart>,
}

/// Reads a blob of what a sequence has beside the rows of all positions.
pub fn partial(blob: &Bytes, form: &BlobForm) -> Result<Partial, BlobError> {
    let parsed = parse(blob, form.cell(), form.partial().map(SectionForm::kind))?;
    let mut partial = Partial { window: None, before_states: blob.slice(HEADER_BYTES..), states: None };
    for (parsed, form) in parsed.into_iter().zip(form.partial()) {
        match (parsed, form) {
            (ParsedSection::Rows(rows), _) => partial.window = bounds(&rows.positions)?,
            (ParsedSection::States(parsed), SectionForm::States(form)) => {
                let n_states = form.n_bytes(parsed.last.is_some());
                partial.before_states = blob.slice(HEADER_BYTES..blob.len() - n_states);
                partial.states = states(parsed, form)?;
            }
            (ParsedSection::States(_), SectionForm::Rows(_)) => {}
        }
    }
    Ok(partial)
}

/// The first of some positions, and one past the last.
fn bounds(positions: &[i32]) -> Result<Option<Range<u32>>, BlobError> {
    let bound = |position: i32| u32::try_from(position).map_err(|_| BlobError::Positions(format!("{position}")));
    match (positions.iter().min(), positions.iter().max()) {
        (Some(first), Some(last)) => Ok(Some(bound(*first)?..bound(*last)? + 1)),
        _ => Ok(None),
    }
}

fn states(parsed: ParsedStates, form: &StatesForm) -> Result<Option<StatePart>, BlobError> {
    let shapes = parsed.tensors.iter().map(|tensor| (tensor.ggml_type, tensor.row_bytes));
    let expected = form.shapes.iter().map(|shape| (shape.values.dtype as i32, shape.values.bytes()));
    if parsed.n_layers != form.n_layers || !shapes.eq(expected) {
        return Err(BlobError::Shape(format!("other states than those of {} layers", form.n_layers)));
    }
    let Some(last) = parsed.last else { return Ok(None) };
    let position = u32::try_from(last).map_err(|_| BlobError::Positions(format!("states at {last}")))? + 1;
    let tensors = form.of_layout().map(|i| parsed.tensors[i].rows.clone()).collect();
    Ok(Some(StatePart { position, first: 0, tensors }))
}

fn rows(
    parsed: ParsedRows,
    section: &Section,
    tokens: &Range<u32>,
    positions: &TokenPositions,
) -> Result<SectionRows, BlobError> {
    let TakenRows { order, start, skipped } =
        taken_rows(&parsed, section, tokens, positions).map_err(BlobError::Positions)?;
    let taken = |rows: Bytes, row_bytes: usize| match skipped {
        None => rows,
        Some(n) => rows.slice(n * row_bytes..(n + tokens.len()) * row_bytes),
    };
    if parsed.positions.is_empty() {
        let layers = vec![LayerRows { k: Bytes::new(), v: Bytes::new() }; section.layers.len()];
        return Ok(SectionRows { start, layers });
    }
    if parsed.layers.len() != section.layers.len() || parsed.n_rot != section.n_rot {
        let found = format!("{} layers, rotated by {:?}", parsed.layers.len(), parsed.n_rot);
        return Err(BlobError::Shape(format!("{found}, for {}", section.layers.len())));
    }
    let layers = parsed.layers.into_iter().zip(&section.layers).map(|(layer, shape)| {
        let k = taken(canonical(layer.k, shape.k, &order)?, shape.k.bytes());
        let v = match (layer.v, shape.v) {
            (Some(tensor), Some(rows)) => taken(canonical(tensor, rows, &order)?, rows.bytes()),
            _ => Bytes::new(),
        };
        Ok(LayerRows { k, v })
    });
    Ok(SectionRows { start, layers: layers.collect::<Result<_, BlobError>>()? })
}

/// The order in which a section has the rows of some tokens.
struct TakenRows {
    order: CellOrder,
    /// The first token that has a row.
    start: u32,
    /// The rows before theirs, of an image that they cut. `None`: there are no others than theirs.
    skipped: Option<usize>,
}

fn taken_rows(
    parsed: &ParsedRows,
    section: &Section,
    tokens: &Range<u32>,
    positions: &TokenPositions,
) -> Result<TakenRows, String> {
    if positions.are_apart(tokens) {
        // Text has its position on all axes.
        let is_text = |(position, axes): (&i32, &[i32; 2])| axes == &[*position; 2];
        if !parsed.positions.iter().zip(&parsed.axes).all(is_text) {
            return Err("a token of text lies on several positions".to_owned());
        }
        let lie = positions.range(tokens);
        let order = CellOrder::of(&parsed.positions, &lie)?;
        let start = tokens.start + (order.start - lie.start);
        return Ok(TakenRows { order, start, skipped: None });
    }
    if section.window.is_some() {
        return Err("an image in a cache with a window".to_owned());
    }
    let whole = positions.whole(tokens);
    let cells: Vec<[i32; 3]> = parsed.positions.iter().zip(&parsed.axes).map(|(t, [y, x])| [*t, *y, *x]).collect();
    let order = CellOrder::of_axes(&cells, &whole, positions)?;
    Ok(TakenRows { order, start: tokens.start, skipped: Some((tokens.start - whole.start) as usize) })
}

fn canonical(tensor: ParsedTensor, shape: Rows, order: &CellOrder) -> Result<Bytes, BlobError> {
    if tensor.ggml_type != shape.dtype as i32 || tensor.row_bytes != shape.bytes() {
        let found = format!("rows of {} bytes and type {}", tensor.row_bytes, tensor.ggml_type);
        return Err(BlobError::Shape(format!("{found} for {shape:?}")));
    }
    Ok(order.sorted(tensor.rows, tensor.row_bytes))
}

#[cfg(test)]
mod tests;
