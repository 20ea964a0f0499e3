//! The angles of the rotary embedding.

use baton_schemas::kv::SectionRotation;
use candle_core::{Device, Result, Tensor};

/// Cosines and sines of a batch's positions: `[n_rows][n_pairs]` each.
pub(super) struct BatchAngles {
    pub(super) cos: Tensor,
    pub(super) sin: Tensor,
}

impl BatchAngles {
    /// The angle of pair `i` at a position is the position times the pair's frequency.
    pub(super) fn of(rotation: &SectionRotation, positions: &[u32], device: &Device) -> Result<BatchAngles> {
        let frequencies = &rotation.frequencies;
        let shape = (positions.len(), frequencies.len());
        let angles = || positions.iter().flat_map(|p| frequencies.iter().map(move |f| f64::from(*p) * f));
        let cos: Vec<f32> = angles().map(|angle| angle.cos() as f32).collect();
        let sin: Vec<f32> = angles().map(|angle| angle.sin() as f32).collect();
        Ok(BatchAngles { cos: Tensor::from_vec(cos, shape, device)?, sin: Tensor::from_vec(sin, shape, device)? })
    }
}
