//! LoRA adapters with random weights. Keys and names are those of llama.cpp's `convert_lora_to_gguf.py`.

use std::path::Path;

use super::Draft;
use crate::file::Value;

/// The rank of the adapters.
const RANK: usize = 4;

/// Writes an adapter for models of an architecture, e.g. `llama`. `changes` are the names of the model's weights, and their
/// dimensions as ggml counts them. The changes are as large as the weights themselves.
pub fn write(path: &Path, architecture: &str, changes: &[(&str, [usize; 2])], seed: u64) {
    let mut draft = Draft::new(seed);
    draft.set("general.type", Value::String("adapter".into()));
    draft.set("general.architecture", Value::String(architecture.into()));
    draft.set("adapter.type", Value::String("lora".into()));
    draft.set("adapter.lora.alpha", Value::F32(RANK as f32));
    for (name, [n_in, n_out]) in changes {
        draft.weight(&format!("{name}.lora_a"), &[*n_in, RANK]);
        draft.weight(&format!("{name}.lora_b"), &[RANK, *n_out]);
    }
    draft.file.write(path);
}
