//! Identifies a model's weights without reading gigabytes.

use super::{Gguf, GgufError, TensorInfo};
use crate::files::SampleStride;

impl Gguf {
    /// BLAKE3 of each tensor's name, shape and type and of samples of its data ([`SampleStride`]), in the order of names.
    /// Metadata, the tensors' order and how they are split into files do not matter.
    ///
    /// Samples distinguish models, quantizations and fine-tunes, which change whole tensors, and show parts that a download
    /// left out. They do not show a change between two samples: the hash identifies weights, it does not authenticate them.
    ///
    /// Blocking: up to some ten thousand short reads. Errors: a file cannot be read, has a tensor of a type whose size is unknown, or
    /// is shorter than when its header was read.
    pub fn weights_hash(&self) -> Result<blake3::Hash, GgufError> {
        let mut tensors: Vec<&TensorInfo> = self.tensors.iter().collect();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let sizes = tensors.iter().filter_map(|tensor| tensor.size_bytes);
        let stride = SampleStride::for_model(sizes.fold(0, u64::saturating_add));
        let mut reader = self.files.reader();
        let mut hasher = blake3::Hasher::new();
        for tensor in tensors {
            let Some(size_bytes) = tensor.size_bytes else {
                let what = format!("tensor {:?} has the unknown type {}", tensor.name, tensor.ggml_type);
                return Err(GgufError::Malformed { path: self.files.path(tensor.file_idx).to_owned(), what });
            };
            hasher.update(&(tensor.name.len() as u64).to_le_bytes()).update(tensor.name.as_bytes());
            hasher.update(&(tensor.dims.len() as u64).to_le_bytes());
            for n in &tensor.dims {
                hasher.update(&n.to_le_bytes());
            }
            hasher.update(&tensor.ggml_type.to_le_bytes());
            let at = tensor.start..tensor.start.saturating_add(size_bytes);
            reader.hash_samples(tensor.file_idx, at, stride, &mut hasher)?;
        }
        Ok(hasher.finalize())
    }
}
