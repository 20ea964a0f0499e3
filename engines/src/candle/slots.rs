//! The scheduler's view of a model: a KV cache for each slot.

use std::ops::Range;
use std::sync::Arc;

use baton_schemas::kv::{Chunk, KvLayout, LayerRows, SectionRows, VerifiedKv};
use bytes::Bytes;
use candle_core::{DType, Error, Result, Tensor};
use half::f16;

use super::cache::{LayerTensor, SlotCache};
use super::forward::{SlotRows, Transformer};
use crate::serving::context::{BatchToken, CannotCut, ComputeError, ExportTo, ModelContext, NoHead};
use crate::serving::images::NoImages;

/// A model with the KV of its slots, and the logits of the last batch.
pub(crate) struct CandleSlots {
    model: Arc<Transformer>,
    layout: Arc<KvLayout>,
    /// The layers of each section of the layout.
    sections: Vec<Vec<usize>>,
    caches: Vec<SlotCache>,
    logits: Vec<f32>,
    /// For each token of the last batch, the row of its logits.
    logit_rows: Vec<usize>,
}

impl CandleSlots {
    pub(super) fn new(model: Arc<Transformer>, n_slots: usize) -> Self {
        CandleSlots {
            layout: Arc::new(model.shape.layout()),
            sections: model.shape.sections(),
            caches: (0..n_slots).map(|_| SlotCache::default()).collect(),
            logits: Vec::new(),
            logit_rows: Vec::new(),
            model,
        }
    }

    fn forward(&mut self, batch: &[BatchToken]) -> Result<()> {
        let parts = parts(batch);
        for part in &parts {
            let cache = &mut self.caches[part.slot];
            if cache.extent.n != part.from {
                candle_core::bail!("position {} does not follow a slot that holds {}", part.from, cache.extent.n);
            }
            cache.reserve(part.from + part.rows.len(), &self.model.shape, &self.model.device)?;
        }
        let tokens: Vec<u32> = batch.iter().map(|t| t.token).collect();
        let wanted = |(row, t): (u32, &BatchToken)| t.wants_logits.then_some(row);
        let wanted: Vec<u32> = (0..).zip(batch).filter_map(wanted).collect();
        let states = self.model.states(&tokens, &parts, &mut self.caches)?;
        self.logits = self.model.logits(&states, &wanted)?;
        let mut n_before = 0;
        self.logit_rows = batch
            .iter()
            .map(|t| {
                n_before += usize::from(t.wants_logits);
                n_before.saturating_sub(1)
            })
            .collect();
        Ok(())
    }

    /// The bytes of K or V at `positions`: `[n_positions][n_kv_heads * head_size]` in f16.
    fn rows(&self, slot: usize, of: LayerTensor, positions: &Range<usize>) -> Result<Bytes> {
        let rows = self.caches[slot].read(of, positions)?.transpose(0, 1)?.contiguous()?;
        let values: Vec<f16> = rows.to_dtype(DType::F16)?.flatten_all()?.to_vec1()?;
        Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    /// Writes K or V at `positions`. Errors: `rows` has the wrong number of positions.
    fn write(&self, slot: usize, of: LayerTensor, positions: Range<usize>, rows: &[u8]) -> Result<()> {
        let shape = &self.model.shape;
        let n_positions = positions.len();
        let n_bytes = n_positions * shape.n_kv_heads * shape.head_size * size_of::<f16>();
        if rows.len() != n_bytes {
            candle_core::bail!("a layer has {} bytes for positions {positions:?}, not {n_bytes}", rows.len());
        }
        let values: Vec<f16> = rows.as_chunks::<2>().0.iter().map(|bytes| f16::from_le_bytes(*bytes)).collect();
        if n_positions == 0 {
            return Ok(());
        }
        let dims = (n_positions, shape.n_kv_heads, shape.head_size);
        let rows = Tensor::from_vec(values, dims, &self.model.device)?.transpose(0, 1)?;
        self.caches[slot].write(of, positions.start, &rows)
    }

    /// Adds the rows of `positions`, of which sections begin at `starts`. `tensors` are in canonical order.
    fn add<'r>(
        &mut self,
        slot: usize,
        positions: Range<u32>,
        starts: &[u32],
        mut tensors: impl Iterator<Item = &'r [u8]>,
    ) -> Result<()> {
        let extent = self.caches[slot].extent.with(&self.layout, &positions, starts).map_err(Error::Msg)?;
        self.caches[slot].reserve(extent.n, &self.model.shape, &self.model.device)?;
        for (layers, start) in self.sections.iter().zip(starts) {
            for &layer in layers {
                for of in LayerTensor::of(layer) {
                    let Some(rows) = tensors.next() else {
                        candle_core::bail!("positions {positions:?} lack a tensor")
                    };
                    self.write(slot, of, *start as usize..extent.n, rows)?;
                }
            }
        }
        if tensors.next().is_some() {
            candle_core::bail!("positions {positions:?} have more tensors than the model");
        }
        self.caches[slot].extent = extent;
        Ok(())
    }
}

/// The slots' parts of a batch, in the order of the batch.
fn parts(batch: &[BatchToken]) -> Vec<SlotRows> {
    let mut parts: Vec<SlotRows> = Vec::new();
    for (row, token) in batch.iter().enumerate() {
        let slot = token.slot as usize;
        match parts.last_mut().filter(|part| part.slot == slot) {
            Some(part) => part.rows.end = row + 1,
            None => parts.push(SlotRows { slot, rows: row..row + 1, from: token.position as usize }),
        }
    }
    parts
}

impl ModelContext for CandleSlots {
    type Preparation = NoImages;
    type Head = NoHead;

    fn compute(&mut self, batch: &[BatchToken]) -> std::result::Result<(), ComputeError> {
        self.forward(batch).map_err(|e| ComputeError::Refused(e.to_string()))
    }

    fn logits(&mut self, index: usize) -> &[f32] {
        let n_vocab = self.model.shape.n_vocab;
        let row = self.logit_rows[index];
        &self.logits[row * n_vocab..(row + 1) * n_vocab]
    }

    fn synchronize(&mut self) {
        if let Err(error) = self.model.device.synchronize() {
            tracing::error!(%error, "the device cannot be waited for");
        }
    }

    fn cut(&mut self, slot: usize, n_keep: usize) -> std::result::Result<(), CannotCut> {
        let cut = self.caches[slot].cut(n_keep, &self.model.shape, &self.model.device);
        cut.map_err(|error| {
            tracing::error!(%error, slot, "a slot's KV cannot be moved to less memory; it is dropped");
            self.caches[slot] = SlotCache::default();
            CannotCut
        })
    }

    fn max_rollback(&self) -> usize {
        usize::MAX
    }

    fn fork(&mut self, source: usize, slot: usize, n: usize) -> bool {
        match self.caches[source].fork(n, &self.model.shape, &self.model.device) {
            Ok(copy) => {
                self.caches[slot] = copy;
                true
            }
            Err(error) => {
                tracing::warn!(%error, source, slot, "a prefix cannot be copied; it is computed again");
                false
            }
        }
    }

    fn forks_share_cells(&self) -> bool {
        false
    }

    fn keeps_freed_cells(&self) -> bool {
        false
    }

    fn oldest(&self, slot: usize) -> usize {
        self.caches[slot].extent.window_from
    }

    fn overwrite(&mut self) {
        self.caches.iter_mut().for_each(|cache| *cache = SlotCache::default());
    }

    fn export(
        &mut self,
        slot: usize,
        positions: Range<u32>,
        end: u32,
        _: ExportTo,
    ) -> std::result::Result<Chunk, String> {
        let starts = self.caches[slot].extent.starts(&self.layout, &positions, end)?;
        let sections = starts.into_iter().zip(&self.sections).map(|(start, layers)| {
            let range = start as usize..positions.end as usize;
            let rows = |of| self.rows(slot, of, &range).map_err(|e| e.to_string());
            let layers = layers.iter().map(|&layer| {
                let [k, v] = LayerTensor::of(layer);
                Ok(LayerRows { k: rows(k)?, v: rows(v)? })
            });
            Ok(SectionRows { start, layers: layers.collect::<std::result::Result<_, String>>()? })
        });
        let sections = sections.collect::<std::result::Result<_, String>>()?;
        Ok(Chunk { p0: positions.start, p1: positions.end, sections })
    }

    fn import(&mut self, slot: usize, n_present: u32, chunk: VerifiedKv) -> std::result::Result<Vec<u8>, String> {
        if *chunk.layout() != *self.layout || chunk.span().p0 != n_present {
            return Err("the chunk does not continue this slot".to_owned());
        }
        let span = chunk.span().clone();
        let tensors = chunk.tensors().iter().map(|range| &chunk.buffer()[range.clone()]);
        self.add(slot, span.p0..span.p1, &span.starts, tensors).map_err(|e| e.to_string())?;
        Ok(chunk.into_buffer())
    }

    fn restore(&mut self, slot: usize, chunk: &Chunk) -> std::result::Result<(), String> {
        let starts: Vec<u32> = chunk.sections.iter().map(|section| section.start).collect();
        self.add(slot, chunk.p0..chunk.p1, &starts, chunk.tensors().map(|rows| &rows[..])).map_err(|e| e.to_string())
    }

    fn can_continue(&self, slot: usize, n_present: usize) -> bool {
        self.caches[slot].extent.can_continue(&self.layout, n_present)
    }
}
