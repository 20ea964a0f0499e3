//! Facts about a model that the writer of a stream may know.

use serde::{Deserialize, Serialize};

use crate::kv::layout::KvLayout;
use crate::kv::rotation::KeyRotation;

/// Facts about a model that `kvq` and `kvq_fast` use when they write.
#[derive(Debug, Clone, Copy, Default)]
pub struct ModelKnowledge<'a> {
    /// How K was rotated. `None`: not known, so it stays rotated.
    pub rotation: Option<&'a KeyRotation>,
    /// How exactly each channel has to be kept. Empty: not known, so all of a tensor are equal.
    pub tensors: &'a [TensorProfile],
}

/// How a tensor is quantized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorProfile {
    /// The step of a relative step of 1, in the unit of the rows.
    pub step: f32,
    /// Of each channel: the binary logarithm of its step relative to `step`, in eighths, plus 128. Empty: all are equal.
    #[serde(with = "hex", default, skip_serializing_if = "Vec::is_empty")]
    pub channel_steps: Vec<u8>,
}

/// How a profile differs from what it is used for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the codec's profile does not fit the model: {0}")]
pub struct ProfileError(pub String);

/// Checks that every tensor of the layout has possible steps.
pub(in crate::kv) fn check(tensors: &[TensorProfile], layout: &KvLayout) -> Result<(), ProfileError> {
    let wrong = |what: String| Err(ProfileError(what));
    if tensors.len() != layout.n_tensors() {
        return wrong(format!("{} tensors instead of {}", tensors.len(), layout.n_tensors()));
    }
    for (tensor, rows) in tensors.iter().zip(layout.tensors()) {
        if !tensor.step.is_normal() || tensor.step < 0.0 {
            return wrong(format!("a step of {}", tensor.step));
        }
        let n = tensor.channel_steps.len();
        if n != 0 && n != rows.n_values as usize {
            return wrong(format!("steps of {n} channels instead of {}", rows.n_values));
        }
    }
    Ok(())
}
