//! How far the tensors of two engines' KV lie apart, and the words for it.

use std::fmt;

use baton_schemas::kv::StateKind;
use serde::Serialize;

/// A tensor that a layer keeps of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KvTensor {
    K,
    V,
    Convolution,
    Recurrence,
    Compressor,
    CompressorScore,
}

impl From<StateKind> for KvTensor {
    fn from(kind: StateKind) -> KvTensor {
        match kind {
            StateKind::Convolution => KvTensor::Convolution,
            StateKind::Recurrence => KvTensor::Recurrence,
            StateKind::Compressor => KvTensor::Compressor,
            StateKind::CompressorScore => KvTensor::CompressorScore,
        }
    }
}

impl KvTensor {
    /// In words.
    fn words(self) -> &'static str {
        match self {
            KvTensor::K => "K",
            KvTensor::V => "V",
            KvTensor::Convolution => "convolution",
            KvTensor::Recurrence => "recurrence",
            KvTensor::Compressor => "compressor",
            KvTensor::CompressorScore => "compressor's scores",
        }
    }
}

/// How far one tensor of two engines lies apart.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TensorDistance {
    /// The model's layer, from 0. `None`: its file does not say which one it is.
    pub layer: Option<u32>,
    /// The tensor's place among those of rows in the layout, or among its states.
    pub index: u32,
    pub tensor: KvTensor,
    /// Relative L2, `‖theirs − ours‖ / ‖ours‖`. Infinite if there is nothing to compare, or if only ours is zero.
    pub distance: f64,
}

impl fmt::Display for TensorDistance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (words, distance) = (self.tensor.words(), self.distance);
        match self.layer {
            Some(layer) => write!(f, "layer {layer} {words} {distance:.1e}"),
            None => write!(f, "tensor {} ({words}) {distance:.1e}", self.index),
        }
    }
}

/// The distances of all tensors, in the order of the layout.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct KvDistances {
    /// Distances of the layers' K and V.
    pub rows: Vec<TensorDistance>,
    /// Distances of the recurrent layers' states.
    pub states: Vec<TensorDistance>,
}

impl KvDistances {
    /// The largest of all, by which a pair is judged. Infinite if there is none.
    pub fn worst(&self) -> f64 {
        largest(&self.rows).into_iter().chain(largest(&self.states)).reduce(f64::max).unwrap_or(f64::INFINITY)
    }

    /// The largest of the rows; `None` if the model has none.
    pub fn of_rows(&self) -> Option<f64> {
        largest(&self.rows)
    }

    /// The largest of the states; `None` if the model has none.
    pub fn of_states(&self) -> Option<f64> {
        largest(&self.states)
    }
}

pub(super) fn largest(distances: &[TensorDistance]) -> Option<f64> {
    distances.iter().map(|tensor| tensor.distance).reduce(f64::max)
}

/// Names the tensors that lie farthest apart, the farthest first. It writes nothing if all are equal.
#[derive(Debug, Clone, Copy)]
pub struct Farthest<'a>(pub &'a [TensorDistance]);

/// The most tensors that are named: a line must stay readable.
const N_NAMED: usize = 5;

impl fmt::Display for Farthest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut different: Vec<_> = self.0.iter().filter(|tensor| tensor.distance > 0.0).collect();
        different.sort_by(|a, b| b.distance.total_cmp(&a.distance));
        for (i, tensor) in different.iter().take(N_NAMED).enumerate() {
            write!(f, "{}{tensor}", if i == 0 { "" } else { ", " })?;
        }
        match different.len().saturating_sub(N_NAMED) {
            0 => Ok(()),
            n => write!(f, ", {n} more"),
        }
    }
}
