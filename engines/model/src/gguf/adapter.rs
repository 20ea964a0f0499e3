//! LoRA adapters: whether a file is one that fits a model, and the hash of its content.

use std::fs::File;
use std::io;
use std::path::Path;

use super::{Gguf, GgufError};

impl Gguf {
    /// Reads the header of a LoRA adapter. Blocking, like [`Gguf::open`]. Errors: those of [`Gguf::open`], and
    /// [`GgufError::NotAdapter`].
    pub fn open_adapter(path: impl AsRef<Path>) -> Result<Gguf, GgufError> {
        let gguf = Gguf::open(&path)?;
        gguf.require_one_file()?;
        let not_one = |why: String| Err(GgufError::NotAdapter { path: path.as_ref().to_owned(), why });
        match (gguf.str("general.type"), gguf.str("adapter.type")) {
            (Some("adapter"), Some("lora")) => {}
            (Some("adapter"), kind) => {
                return not_one(format!("it is an adapter of the kind {:?}", kind.unwrap_or("")));
            }
            _ => {
                return not_one(format!(
                    "it is a model of the architecture {:?}",
                    gguf.architecture().unwrap_or("unknown")
                ));
            }
        }
        // llama.cpp aborts the process if the value has another type.
        if gguf.get("adapter.lora.alpha").is_some() && gguf.f32("adapter.lora.alpha").is_none() {
            return not_one("its adapter.lora.alpha is not a number".to_owned());
        }
        if gguf.get("adapter.alora.invocation_tokens").is_some() {
            return not_one("it applies only after certain tokens (aLoRA), which is not supported".to_owned());
        }
        Ok(gguf)
    }

    /// Checks that an adapter fits this model. Errors: why not.
    pub fn check_adapter(&self, adapter: &Gguf) -> Result<(), String> {
        let [ours, theirs] = [self, adapter].map(|gguf| gguf.architecture().unwrap_or("unknown"));
        if ours != theirs {
            return Err(format!("it was made for models of the architecture {theirs:?}, and this model's is {ours:?}"));
        }
        for tensor in &adapter.tensors {
            let (base, is_a) = match tensor.name.strip_suffix(".lora_a") {
                Some(base) => (base, true),
                None => match tensor.name.strip_suffix(".lora_b") {
                    Some(base) => (base, false),
                    None => continue,
                },
            };
            let Some(model) = self.tensors.iter().find(|tensor| tensor.name == base) else {
                return Err(format!("it changes the tensor {base:?}, which this model does not have"));
            };
            // The tensor of the embedding has its own rule, which llama.cpp checks.
            let same = |i: usize, j: usize| model.dims.get(i) == tensor.dims.get(j);
            if !base.ends_with("token_embd.weight") && !(if is_a { same(0, 0) } else { same(1, 1) }) {
                return Err(format!("its tensor {:?} has another shape than the model's", tensor.name));
            }
        }
        Ok(())
    }

    /// BLAKE3 of a whole adapter file: adapters are small. Blocking. Errors: the file cannot be read.
    pub fn adapter_hash(path: &Path) -> Result<blake3::Hash, GgufError> {
        let unreadable = |source: io::Error| GgufError::Unreadable { path: path.to_owned(), source };
        let file = File::open(path).map_err(unreadable)?;
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(file).map_err(unreadable)?;
        Ok(hasher.finalize())
    }
}
