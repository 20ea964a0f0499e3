//! The fingerprint by which two nodes recognise that they run the same model.

use baton_schemas::kv::Fingerprint;

use super::{Gguf, GgufError};

/// Metadata that changes a model's KV without changing a tensor.
const KV_KEYS: [&str; 6] = [
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
];

impl Gguf {
    /// Hashes (BLAKE3) of the model's vocabulary and weights. The hash of the weights includes the architecture and the
    /// settings of the position embedding, and `changes`: what the operator's options change of KV or logits, empty if
    /// nothing. Errors: those of [`Gguf::weights_hash`].
    pub fn fingerprint(&self, changes: &[String]) -> Result<Fingerprint, GgufError> {
        Ok(self.fingerprint_of(self.weights_hash()?, changes))
    }

    /// The same, with the hash of the weights themselves.
    pub(crate) fn fingerprint_of(&self, weights: blake3::Hash, changes: &[String]) -> Fingerprint {
        let mut hasher = blake3::Hasher::new();
        hasher.update(weights.as_bytes());
        let architecture = self.architecture().unwrap_or_default();
        // `Debug` of a value includes its type.
        let of_file =
            KV_KEYS.map(|key| format!("{architecture}.{key}")).map(|key| format!("{key}={:?}", self.get(&key)));
        for value in of_file.iter().chain(changes) {
            hasher.update(&(value.len() as u64).to_le_bytes()).update(value.as_bytes());
        }
        let vocabulary = *self.vocabulary_hash().as_bytes();
        Fingerprint { vocabulary, weights: *hasher.finalize().as_bytes() }
    }
}
