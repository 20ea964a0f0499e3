//! The KV of one slot: for each layer K and V of consecutive positions, `[n_kv_heads][capacity][head_size]` in f32.
//!
//! Every value is rounded to f16 when it is written, because KV is handed over in f16: so a sequence continues identically
//! whether its KV was computed here or came back from another node.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};

use super::shape::ModelShape;

/// Positions are allocated in multiples of this. Each growth copies the slot's KV.
pub(super) const GROWTH: usize = 256;

/// K and V of one slot. See the module's documentation.
#[derive(Default)]
pub(super) struct SlotCache {
    /// K and V of each layer; empty without positions.
    layers: Vec<[Tensor; 2]>,
    /// Positions that are complete.
    pub(super) n: usize,
    /// The first position that layers with a window have; those before it were never received.
    pub(super) window_from: usize,
    capacity: usize,
}

impl SlotCache {
    /// Makes room for positions up to `n`.
    pub(super) fn reserve(&mut self, n: usize, shape: &ModelShape, device: &Device) -> Result<()> {
        if n > self.capacity {
            self.resize(n.next_multiple_of(GROWTH), shape, device)?;
        }
        Ok(())
    }

    fn resize(&mut self, capacity: usize, shape: &ModelShape, device: &Device) -> Result<()> {
        let n = self.n.min(capacity);
        let layers = (0..shape.n_layers).map(|layer| {
            let tensor = |which: usize| -> Result<Tensor> {
                let resized = Tensor::zeros((shape.n_kv_heads, capacity, shape.head_size), DType::F32, device)?;
                if let Some(old) = self.layers.get(layer).filter(|_| n > 0) {
                    resized.slice_set(&old[which].narrow(1, 0, n)?.contiguous()?, 1, 0)?;
                }
                Ok(resized)
            };
            Ok([tensor(0)?, tensor(1)?])
        });
        self.layers = layers.collect::<Result<_>>()?;
        self.capacity = capacity;
        Ok(())
    }

    /// Writes K or V (`which`) of a layer from position `from` on: `[n_kv_heads][n_positions][head_size]`.
    pub(super) fn write(&self, layer: usize, which: usize, from: usize, rows: &Tensor) -> Result<()> {
        let rounded = rows.to_dtype(DType::F16)?.to_dtype(DType::F32)?.contiguous()?;
        self.layers[layer][which].slice_set(&rounded, 1, from)
    }

    /// K or V of a layer at `positions`, without a copy.
    pub(super) fn read(&self, layer: usize, which: usize, positions: &Range<usize>) -> Result<Tensor> {
        self.layers[layer][which].narrow(1, positions.start, positions.len())
    }

    /// Keeps the first `n_keep` positions, and only the memory that they need.
    pub(super) fn cut(&mut self, n_keep: usize, shape: &ModelShape, device: &Device) -> Result<()> {
        self.n = self.n.min(n_keep);
        self.window_from = self.window_from.min(self.n);
        let needed = self.n.next_multiple_of(GROWTH);
        if self.n == 0 {
            *self = SlotCache::default();
        } else if needed < self.capacity {
            self.resize(needed, shape, device)?;
        }
        Ok(())
    }

    /// A copy of the first `n` positions.
    pub(super) fn fork(&self, n: usize, shape: &ModelShape, device: &Device) -> Result<SlotCache> {
        let mut copy = SlotCache { n: 0, window_from: self.window_from.min(n), ..SlotCache::default() };
        copy.reserve(n, shape, device)?;
        for layer in 0..shape.n_layers {
            for which in [0, 1] {
                copy.layers[layer][which].slice_set(&self.read(layer, which, &(0..n))?.contiguous()?, 1, 0)?;
            }
        }
        copy.n = n;
        Ok(copy)
    }
}
