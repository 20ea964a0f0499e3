//! The KV of one slot: for each layer K and V of consecutive positions, `[n_kv_heads][capacity][head_size]` in f32.
//!
//! Every value is rounded to f16 when it is written, because KV is handed over in f16. So a sequence continues identically
//! whether its KV was computed here or came back from another node.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};

use super::shape::ModelShape;
use crate::serving::extent::SlotExtent;

/// Positions are allocated in multiples of this. Each growth copies the slot's KV.
pub(super) const GROWTH: usize = 256;

/// One of a layer's two tensors.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerTensor {
    pub(super) layer: usize,
    pub(super) kind: TensorKind,
}

/// K after the rotation, or V.
#[derive(Debug, Clone, Copy)]
pub(super) enum TensorKind {
    K,
    V,
}

impl LayerTensor {
    /// K and V of a layer, in canonical order.
    pub(super) fn of(layer: usize) -> [LayerTensor; 2] {
        [TensorKind::K, TensorKind::V].map(|kind| LayerTensor { layer, kind })
    }
}

/// K and V of one slot. See the module's documentation.
#[derive(Default)]
pub(super) struct SlotCache {
    /// K and V of each layer; empty without positions.
    layers: Vec<[Tensor; 2]>,
    /// The positions that are there.
    pub(super) extent: SlotExtent,
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
        let n = self.extent.n.min(capacity);
        let empty = || Tensor::zeros((shape.n_kv_heads, capacity, shape.head_size), DType::F32, device);
        if self.layers.is_empty() {
            self.layers = (0..shape.n_layers).map(|_| Ok([empty()?, empty()?])).collect::<Result<_>>()?;
        } else {
            // One tensor after the other, so that only one is there twice. A slot whose growth fails keeps what it has: its
            // tensors then differ in capacity, and `capacity` is the least.
            self.capacity = self.capacity.min(capacity);
            for tensor in self.layers.iter_mut().flatten() {
                let resized = empty()?;
                if n > 0 {
                    resized.slice_set(&tensor.narrow(1, 0, n)?.contiguous()?, 1, 0)?;
                }
                *tensor = resized;
            }
        }
        self.capacity = capacity;
        Ok(())
    }

    /// Writes rows from position `from` on: `[n_kv_heads][n_positions][head_size]`.
    pub(super) fn write(&self, of: LayerTensor, from: usize, rows: &Tensor) -> Result<()> {
        let rounded = rows.to_dtype(DType::F16)?.to_dtype(DType::F32)?.contiguous()?;
        self.tensor(of).slice_set(&rounded, 1, from)
    }

    /// The rows at `positions`, without a copy.
    pub(super) fn read(&self, of: LayerTensor, positions: &Range<usize>) -> Result<Tensor> {
        self.tensor(of).narrow(1, positions.start, positions.len())
    }

    fn tensor(&self, of: LayerTensor) -> &Tensor {
        let [k, v] = &self.layers[of.layer];
        match of.kind {
            TensorKind::K => k,
            TensorKind::V => v,
        }
    }

    /// Keeps the first `n_keep` positions, and only the memory that they need.
    pub(super) fn cut(&mut self, n_keep: usize, shape: &ModelShape, device: &Device) -> Result<()> {
        self.extent = self.extent.prefix(n_keep);
        let needed = self.extent.n.next_multiple_of(GROWTH);
        if self.extent.n == 0 {
            *self = SlotCache::default();
        } else if needed < self.capacity {
            self.resize(needed, shape, device)?;
        }
        Ok(())
    }

    /// A copy of the first `n` positions.
    pub(super) fn fork(&self, n: usize, shape: &ModelShape, device: &Device) -> Result<SlotCache> {
        let mut copy = SlotCache::default();
        copy.reserve(n, shape, device)?;
        for layer in 0..shape.n_layers {
            for of in LayerTensor::of(layer) {
                copy.tensor(of).slice_set(&self.read(of, &(0..n))?.contiguous()?, 1, 0)?;
            }
        }
        copy.extent = self.extent.prefix(n);
        Ok(copy)
    }
}
