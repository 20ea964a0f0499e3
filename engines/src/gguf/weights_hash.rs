//! Identifies a file's weights without reading gigabytes.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use super::{Gguf, GgufError, TensorInfo};

/// Bytes read at each end of a tensor.
pub(crate) const SAMPLE_BYTES: u64 = 4096;

impl Gguf {
    /// BLAKE3 of each tensor's name, shape and type and of the first and last 4 KiB of its data, in the order of names.
    /// Metadata and the tensors' order in the file do not matter.
    ///
    /// Samples distinguish models, quantizations and fine-tunes, which change whole tensors. They do not show a change
    /// in the middle of a tensor only: the hash identifies weights, it does not authenticate them.
    ///
    /// `path` is the file that this header was read from. Blocking: some hundred short reads. Errors: the file cannot
    /// be read, has a tensor of a type whose size is unknown, or is shorter than when the header was read.
    pub fn weights_hash(&self, path: impl AsRef<Path>) -> Result<blake3::Hash, GgufError> {
        let path = path.as_ref();
        let unreadable = |source: io::Error| GgufError::Unreadable { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(unreadable)?;
        let mut tensors: Vec<&TensorInfo> = self.tensors.iter().collect();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let mut hasher = blake3::Hasher::new();
        for tensor in tensors {
            let Some(size_bytes) = tensor.size_bytes else {
                let what = format!("tensor {:?} has the unknown type {}", tensor.name, tensor.ggml_type);
                return Err(GgufError::Malformed { path: path.to_owned(), what });
            };
            hasher.update(&(tensor.name.len() as u64).to_le_bytes()).update(tensor.name.as_bytes());
            hasher.update(&(tensor.dims.len() as u64).to_le_bytes());
            for n in &tensor.dims {
                hasher.update(&n.to_le_bytes());
            }
            hasher.update(&tensor.ggml_type.to_le_bytes());
            // `header::read` has checked that the file reaches this far.
            let start = self.data_start + tensor.offset_bytes;
            let n_first = size_bytes.min(SAMPLE_BYTES);
            let n_last = (size_bytes - n_first).min(SAMPLE_BYTES);
            hash_part(&mut file, start, n_first, &mut hasher).map_err(unreadable)?;
            hash_part(&mut file, start + size_bytes - n_last, n_last, &mut hasher).map_err(unreadable)?;
        }
        Ok(hasher.finalize())
    }
}

/// Hashes at most [`SAMPLE_BYTES`] of a file.
pub(crate) fn hash_part(file: &mut File, start: u64, n_bytes: u64, hasher: &mut blake3::Hasher) -> io::Result<()> {
    let mut sample = [0; SAMPLE_BYTES as usize];
    let sample = &mut sample[..n_bytes as usize];
    file.seek(SeekFrom::Start(start))?;
    file.read_exact(sample)?;
    hasher.update(sample);
    Ok(())
}
