//! Splits a model into several files, as llama.cpp's `llama-gguf-split` does.

use std::path::{Path, PathBuf};

use crate::file::{Gguf, Value};

/// The paths of the parts that [`write()`] writes.
pub fn paths(folder: &Path, stem: &str, n_parts: usize) -> Vec<PathBuf> {
    (1..=n_parts).map(|number| folder.join(format!("{stem}-{number:05}-of-{n_parts:05}.gguf"))).collect()
}

/// Writes the parts, each with about the same number of tensors. Returns their paths.
pub fn write(model: &Gguf, folder: &Path, stem: &str, n_parts: usize) -> Vec<PathBuf> {
    let paths = paths(folder, stem, n_parts);
    let n_tensors = model.tensors.len();
    let chunks = model.tensors.chunks(n_tensors.div_ceil(n_parts));
    assert_eq!(chunks.len(), n_parts, "there are too few tensors");
    for (i, (tensors, path)) in chunks.zip(&paths).enumerate() {
        let mut metadata = if i == 0 { model.metadata.clone() } else { Vec::new() };
        metadata.push(("split.no".to_owned(), Value::U16(i as u16)));
        metadata.push(("split.count".to_owned(), Value::U16(n_parts as u16)));
        metadata.push(("split.tensors.count".to_owned(), Value::I32(n_tensors as i32)));
        Gguf { metadata, tensors: tensors.to_vec() }.write(path);
    }
    paths
}

/// Writes two models in three parts each, with the same first part and other weights in the last two. Both have a folder
/// of their own and the same names. Returns their first parts.
pub fn write_twins(folder: &Path, whole: &Path) -> [PathBuf; 2] {
    let model = Gguf::read(whole);
    let mut other = Gguf::read(whole);
    let in_first = other.tensors.len().div_ceil(3);
    for (name, tensor) in &mut other.tensors[in_first..] {
        // Norms are in both, so that the KV has the same size.
        if !name.contains("norm") {
            tensor.values.reverse();
        }
    }
    [(model, "a"), (other, "b")].map(|(model, name)| {
        let folder = folder.join(name);
        std::fs::create_dir_all(&folder).unwrap();
        write(&model, &folder, "model", 3).swap_remove(0)
    })
}
