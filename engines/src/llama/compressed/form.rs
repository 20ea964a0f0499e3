//! The form of a model's compressed caches: all that llama.cpp writes except for positions and values.

use std::sync::Arc;

use baton_schemas::kv::{Chunk, KvLayout, LayerRows, LayerShape, RopePairing, Rows, Section, SectionRows, StatePart};
use baton_schemas::kv::{StateKind, StateShape};
use bytes::Bytes;

use super::parse::{self, ParsedBeside, ParsedCache, ParsedCompressor, ParsedWhole};
use crate::llama::blob::BlobError;
use crate::llama::blob::parse::{ParsedRows, ParsedTensor};
use crate::llama::cell_order::CellOrder;
use crate::llama::no_kv::NoHandoff;
use crate::llama::shapes::{rows_form, shape};

/// The form of a context's sequences.
#[derive(Debug)]
pub struct CompressedForm {
    /// Streams of the context, which differ from node to node.
    pub(super) n_streams: u32,
    /// The rotation that the section without layers names.
    pub(super) cells_n_rot: [u32; 2],
    /// The layers of each kind of finished rows, by their numbers in the model.
    pub(super) caches: Vec<CacheForm>,
    pub(super) compressors: Vec<CompressorForm>,
    /// The window, the finished rows that have layers, and the states of the compressors.
    layout: Arc<KvLayout>,
}

/// Finished rows of one kind.
#[derive(Debug)]
pub(super) struct CacheForm {
    pub(super) layers: Vec<u32>,
    pub(super) section: Section,
}

/// A compressor.
#[derive(Debug)]
pub(super) struct CompressorForm {
    pub(super) tokens_per_row: u32,
    pub(super) n_tokens: u32,
    pub(super) n_values: u32,
    pub(super) layers: Vec<u32>,
}

/// A state of the layout: which compressor's, the place of the layer among its layers, and whether it is the scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StatePlace {
    pub(super) compressor: usize,
    pub(super) layer: usize,
    pub(super) is_score: bool,
}

impl CompressedForm {
    /// The form of a sequence that has some positions. `window` is its length.
    pub(in crate::llama) fn of(blob: &Bytes, rope: RopePairing, window: u32) -> Result<CompressedForm, NoHandoff> {
        let ParsedWhole { n_streams, cells, caches, beside } = parse::whole(blob).map_err(NoHandoff::UnknownState)?;
        let window = rows_form(beside.window, Some(window))?;
        let of = |(cache, compressor): (ParsedCache, &ParsedCompressor)| cache_form(cache, compressor, window.n_rot);
        let caches = caches.into_iter().zip(&beside.compressors).map(of).collect::<Result<Vec<_>, _>>()?;
        let compressors: Vec<_> = beside.compressors.iter().map(compressor_form).collect();
        let sections = [&window].into_iter().chain(caches.iter().map(|cache| &cache.section));
        let sections = sections.filter(|section| !section.layers.is_empty()).cloned().collect();
        let mut form = CompressedForm {
            n_streams,
            cells_n_rot: cells.n_rot,
            caches,
            compressors,
            layout: Arc::new(KvLayout { rope, sections, states: Vec::new() }),
        };
        let states = form.states().map(|place| {
            let kind = if place.is_score { StateKind::CompressorScore } else { StateKind::Compressor };
            let tensor = &beside.compressors[place.compressor].layers[place.layer].1[usize::from(place.is_score)];
            let n_tokens = form.compressors[place.compressor].n_tokens;
            let values = shape(tensor)?;
            Ok(StateShape { kind, values: Rows { n_values: values.n_values * n_tokens, ..values } })
        });
        let states = states.collect::<Result<_, NoHandoff>>()?;
        let layout = KvLayout { states, ..KvLayout::clone(&form.layout) };
        layout.check()?;
        form.layout = Arc::new(layout);
        Ok(form)
    }

    /// The layout of the model's KV.
    pub fn layout(&self) -> &Arc<KvLayout> {
        &self.layout
    }

    /// Positions that the window has.
    pub(super) fn window(&self) -> u32 {
        self.layout.sections.first().and_then(|section| section.window).unwrap_or(0)
    }

    /// The states in the layout's order: lower layers first.
    pub(super) fn states(&self) -> impl Iterator<Item = StatePlace> + use<> {
        let mut places: Vec<(u32, StatePlace)> = Vec::new();
        for (compressor, form) in self.compressors.iter().enumerate() {
            for (layer, number) in form.layers.iter().enumerate() {
                let place = |is_score| (*number, StatePlace { compressor, layer, is_score });
                places.extend([false, true].map(place));
            }
        }
        places.sort_by_key(|(number, place)| (*number, place.compressor, place.is_score));
        places.into_iter().map(|(_, place)| place)
    }

    /// All rows of a sequence, as slices of the blob.
    pub(super) fn whole(&self, blob: &Bytes) -> Result<Chunk, BlobError> {
        let ParsedWhole { cells, caches, beside, .. } = parse::whole(blob)?;
        let n = u32::try_from(cells.positions.len()).unwrap_or(u32::MAX);
        // Each position, once.
        CellOrder::of(&cells.positions, &(0..n)).map_err(BlobError::Positions)?;
        let mut sections = vec![self.window_rows(beside.window, n)?];
        for (parsed, form) in caches.into_iter().zip(&self.caches) {
            if !form.section.layers.is_empty() {
                sections.push(finished_rows(parsed, form)?);
            }
        }
        let chunk = Chunk { p0: 0, p1: n, sections };
        chunk.check(&self.layout)?;
        Ok(chunk)
    }

    /// Windowed rows of a sequence that ends at `end`.
    fn window_rows(&self, window: ParsedRows, end: u32) -> Result<SectionRows, BlobError> {
        let order = CellOrder::of(&window.positions, &(0..end)).map_err(BlobError::Positions)?;
        let sorted =
            |tensor: ParsedTensor| LayerRows { k: order.sorted(tensor.rows, tensor.row_bytes), v: Bytes::new() };
        Ok(SectionRows { start: order.start, layers: window.layers.into_iter().map(|layer| sorted(layer.k)).collect() })
    }

    /// What a blob of the part beside finished rows says, for a sequence that ends at `end`.
    pub(super) fn beside(blob: &Bytes, end: u32) -> Result<ParsedBeside, BlobError> {
        let beside = parse::beside(blob)?;
        match beside.window.positions.iter().max() {
            Some(last) if u32::try_from(*last).is_ok_and(|last| last + 1 == end) => Ok(beside),
            last => Err(BlobError::Positions(format!("the window ends at {last:?}, for {end} tokens"))),
        }
    }

    /// The states of a sequence that ends at `position`.
    pub(super) fn state_part(&self, blob: &Bytes, position: u32) -> Result<StatePart, BlobError> {
        let beside = Self::beside(blob, position)?;
        let rows = |place: StatePlace| {
            let layers = beside.compressors.get(place.compressor).map(|compressor| &compressor.layers);
            layers
                .and_then(|layers| layers.get(place.layer))
                .map(|(_, both)| both[usize::from(place.is_score)].rows.clone())
        };
        let tensors = self.states().map(rows).collect::<Option<Vec<_>>>();
        let tensors = tensors.ok_or_else(|| BlobError::Shape("other compressors".into()))?;
        let part = StatePart { position, first: 0, tensors };
        part.check(&self.layout)?;
        Ok(part)
    }
}

fn cache_form(cache: ParsedCache, compressor: &ParsedCompressor, n_rot: [u32; 2]) -> Result<CacheForm, NoHandoff> {
    let layers = cache.layers.iter().map(|(_, tensor)| Ok(LayerShape { k: shape(tensor)?, v: None }));
    let layers = layers.collect::<Result<_, NoHandoff>>()?;
    let section = Section { window: None, n_rot, tokens_per_row: compressor.tokens_per_row, layers };
    Ok(CacheForm { layers: cache.layers.into_iter().map(|(number, _)| number).collect(), section })
}

fn compressor_form(compressor: &ParsedCompressor) -> CompressorForm {
    let ParsedCompressor { tokens_per_row, n_tokens, n_values, ref layers } = *compressor;
    CompressorForm { tokens_per_row, n_tokens, n_values, layers: layers.iter().map(|(number, _)| *number).collect() }
}

fn finished_rows(parsed: ParsedCache, form: &CacheForm) -> Result<SectionRows, BlobError> {
    if !parsed.layers.iter().map(|(number, _)| *number).eq(form.layers.iter().copied()) {
        return Err(BlobError::Shape(format!("{} rows of other layers", parsed.n_rows)));
    }
    let layers = parsed.layers.into_iter().map(|(_, tensor)| LayerRows { k: tensor.rows, v: Bytes::new() });
    Ok(SectionRows { start: 0, layers: layers.collect() })
}
