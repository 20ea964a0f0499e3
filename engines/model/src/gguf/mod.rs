//! Reads the header of a GGUF file: facts about a model that is not loaded.
//!
//! `baton doctor`, the node and the tests use it to name the model, to size its KV cache and to compare two files
//! without llama.cpp. Of the tensors it reads only the samples that identify the weights. llama.cpp aborts or
//! over-allocates on some damaged files, so every count and length is checked here first. Format: `docs/gguf.md` of the
//! ggml project, versions 2 and 3. [`writer`] writes such
//! files.

mod adapter;
pub mod byte_level;
mod companions;
mod file_type;
mod fingerprint;
mod header;
mod kept_layers;
mod kv_shape;
mod outline;
mod prediction_head;
mod rollback;
mod rotation;
mod sizes;
mod split;
mod tensor_types;
#[cfg(test)]
mod tests;
mod weights_hash;
pub mod window;
pub mod writer;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use baton_schemas::printable::one_line;

pub use companions::{CompanionFiles, UnfitDraft};
pub use kept_layers::has_compressed_rows;
pub use kv_shape::{CELL_ALIGNMENT, CacheRow, KvShape, Sequences};
pub use prediction_head::{FoundHead, HeadRows, UnusedHead};
pub use sizes::{COMPUTE_RESERVE, CompanionMemory, ModelSizes, SizeError, SizeOptions};
pub use split::PartsError;

use crate::files::{ModelFile, ModelFiles, UnreadableFile};

/// Why a file cannot be used as a GGUF model. Each message is one line for the operator.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// There is no file of this name.
    #[error("there is no model file at {}", path.display())]
    NotFound {
        /// The path as the user gave it.
        path: PathBuf,
    },
    /// The file, or a part of it, cannot be read.
    #[error("cannot read the model file {}: {source}", path.display())]
    Unreadable {
        /// The path as the user gave it.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The file does not begin with the four bytes `GGUF`.
    #[error("{} is not a GGUF file", path.display())]
    NotGguf {
        /// The path as the user gave it.
        path: PathBuf,
    },
    /// A GGUF of a version, or a byte order, that Baton does not read.
    #[error("{} is a GGUF file of version {version}, but Baton reads little-endian versions 2 and 3", path.display())]
    UnsupportedVersion {
        /// The path as the user gave it.
        path: PathBuf,
        /// The file's version; a big-endian file shows a huge number.
        version: u32,
    },
    /// A GGUF file, but not a projector (mmproj).
    #[error("{} is not a projector but a model with architecture {}", path.display(), one_line(architecture))]
    NotProjector {
        /// The path as the user gave it.
        path: PathBuf,
        architecture: String,
    },
    /// A GGUF file, but not an adapter that can be applied.
    #[error("{} cannot be used as a LoRA adapter: {}", path.display(), one_line(why))]
    NotAdapter {
        /// The path as the user gave it.
        path: PathBuf,
        why: String,
    },
    /// The parts of a split model are not complete, or do not belong together.
    #[error(transparent)]
    Parts(#[from] PartsError),
    /// The header contradicts itself or the format.
    #[error("the GGUF file {} is damaged: {}", path.display(), one_line(what))]
    Malformed {
        /// The path as the user gave it.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The file ends too early, most often because a download was interrupted.
    #[error(
        "the GGUF file {} is cut short: it has {found_bytes} bytes but needs at least {expected_bytes}",
        path.display()
    )]
    Truncated {
        /// The path as the user gave it.
        path: PathBuf,
        /// The end of the last tensor, or of the header if the file ends in it.
        expected_bytes: u64,
        /// The file's length.
        found_bytes: u64,
    },
}

/// A metadata value. All integers are widened to 64 bits, because writers use different widths for the same key.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// u8, u16, u32 or u64.
    Unsigned(u64),
    /// i8, i16, i32 or i64.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// One byte, 0 or 1.
    Bool(bool),
    /// UTF-8; invalid sequences are replaced by U+FFFD.
    String(String),
    /// A string of more than 1 MiB, or after 64 MiB of kept values, which is not kept.
    LongString {
        /// Its length in bytes.
        n_bytes: u64,
    },
    /// An array. Its elements are kept only if they are few and not strings.
    Array(Array),
}

/// See [`Value::Array`]. The tokenizer's arrays have 10⁵ strings and more, which Baton does not read.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    /// GGUF's number of the element type (8 is a string, 9 an array).
    pub element_type: u32,
    /// Elements in the file.
    pub len: u64,
    /// The elements, if they are numbers or booleans, at most 4,096, and not after 64 MiB of kept values; else `None`.
    pub elements: Option<Vec<Value>>,
}

impl From<UnreadableFile> for GgufError {
    fn from(UnreadableFile { path, source }: UnreadableFile) -> Self {
        GgufError::Unreadable { path, source }
    }
}

/// A tensor's name, shape, type and place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// For example `blk.0.attn_k.weight`.
    pub name: String,
    /// Elements of each of the 1 to 4 dimensions, the contiguous dimension first.
    pub dims: Vec<u64>,
    /// ggml's type number.
    pub ggml_type: u32,
    /// The index of its file among the model's.
    pub file_idx: usize,
    /// Where its data begin in that file, bytes.
    pub start: u64,
    /// Length of the data. `None` if the type is unknown.
    pub size_bytes: Option<u64>,
}

/// The header of a GGUF file, or those of all parts of a split model.
#[derive(Debug, Clone)]
pub struct Gguf {
    /// Version of the format, 2 or 3.
    pub version: u32,
    /// The file, or all parts.
    pub files: ModelFiles,
    /// All tensors, in the files' order.
    pub tensors: Vec<TensorInfo>,
    metadata: BTreeMap<String, Value>,
    /// BLAKE3 of the type and the raw bytes of each value of [`VOCABULARY_KEYS`].
    tokenizer_digests: BTreeMap<String, blake3::Hash>,
}

impl Gguf {
    /// Reads and checks the header, and that the file is long enough for its tensors. Of a split model, whose first part
    /// `path` names, all parts are read.
    ///
    /// Blocking: a few megabytes are read, most of them the tokenizer's tokens. Errors: also those of [`PartsError`].
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf, GgufError> {
        split::open(path.as_ref())
    }

    /// Reads the header of one file.
    fn read_file(path: &Path) -> Result<(header::Header, ModelFile), GgufError> {
        let unreadable = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => GgufError::NotFound { path: path.to_owned() },
            _ => GgufError::Unreadable { path: path.to_owned(), source },
        };
        // Reading a device or a pipe might never end, or never begin.
        let metadata = std::fs::metadata(path).map_err(unreadable)?;
        if metadata.is_dir() {
            return Err(unreadable(io::Error::other("it is a folder, which --engine mlx may run")));
        }
        if !metadata.is_file() {
            return Err(unreadable(io::Error::other("it is no regular file")));
        }
        let (source, n_bytes) = source(path)?;
        let header = header::read(source, n_bytes).map_err(|fault| fault.at(path))?;
        Ok((header, ModelFile { path: path.to_owned(), n_bytes }))
    }

    /// The model of a single file.
    fn of_file(header: header::Header, file: ModelFile) -> Gguf {
        let header::Header { version, metadata, tensors, tokenizer_digests, data_end: _ } = header;
        let mut files = ModelFiles::default();
        files.push(file);
        Gguf { version, files, tensors, metadata, tokenizer_digests }
    }

    /// Reads a header from bytes that are a whole file. For the fuzz targets.
    #[doc(hidden)]
    pub fn parse(bytes: &[u8]) -> Result<Gguf, GgufError> {
        let (path, n_bytes) = (PathBuf::from("-"), bytes.len() as u64);
        let header = header::read(bytes, n_bytes).map_err(|fault| fault.at(&path))?;
        Ok(Gguf::of_file(header, ModelFile { path, n_bytes }))
    }

    /// Reads an array of strings from the header of the file at `path`, such as the tokenizer's merges, which a [`Gguf`]
    /// does not keep. Blocking, like [`Gguf::open`]. `None`: the file has no such array.
    pub fn strings(path: &Path, key: &str) -> Result<Option<Vec<String>>, GgufError> {
        let (source, file_bytes) = source(path)?;
        header::read_strings(source, file_bytes, key).map_err(|fault| fault.at(path))
    }

    /// Reads an array of numbers from the header of the file at `path`, such as the tokens' scores. Blocking, like
    /// [`Gguf::open`]. `None`: the file has no such array.
    pub fn numbers(path: &Path, key: &str) -> Result<Option<Vec<f64>>, GgufError> {
        let (source, file_bytes) = source(path)?;
        header::read_numbers(source, file_bytes, key).map_err(|fault| fault.at(path))
    }

    /// A header of what is in no GGUF file. `spellings` and `types` are those of all tokens.
    pub(crate) fn described(
        metadata: BTreeMap<String, Value>,
        tensors: Vec<TensorInfo>,
        files: ModelFiles,
        spellings: &[String],
        types: &[u32],
    ) -> Gguf {
        let tokenizer_digests = header::vocabulary_digests(spellings, types);
        Gguf { version: 3, files, tensors, metadata, tokenizer_digests }
    }

    /// A metadata value by its full key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// A string value. `None` also for one that was too long to keep.
    pub fn str(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// A non-negative integer value of any width.
    pub fn u64(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_u64()
    }

    /// A float value.
    pub fn f32(&self, key: &str) -> Option<f32> {
        match self.get(key)? {
            Value::Float(value) => Some(*value as f32),
            _ => None,
        }
    }

    /// A boolean value.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// `llama`, `gemma3`, ...: the prefix of the model's own keys.
    pub fn architecture(&self) -> Option<&str> {
        self.str("general.architecture")
    }

    /// The model's human-readable name.
    pub fn name(&self) -> Option<&str> {
        self.str("general.name")
    }

    /// The Jinja source of the default chat template.
    pub fn chat_template(&self) -> Option<&str> {
        self.str("tokenizer.chat_template")
    }

    /// The context the model was trained for, in tokens.
    pub fn context_length(&self) -> Option<u64> {
        self.u64(&self.arch_key("context_length")?)
    }

    /// Returns true if the model generates text, and false if it only gives vectors: if its tokens attend to later tokens,
    /// as in encoders.
    pub fn generates(&self) -> bool {
        // A file without the key holds a causal model, unless its architecture is an encoder.
        let is_causal = self.arch_key("attention.causal").and_then(|key| self.bool(&key)) != Some(false);
        is_causal && !self.architecture().is_some_and(|name| ENCODERS.contains(&name))
    }

    /// llama.cpp's number for the pooling of token states into a text's vector, if the file names one.
    pub fn pooling_type(&self) -> Option<u64> {
        self.u64(&self.arch_key("pooling_type")?)
    }

    /// The number of scores that a reranker's classifier gives; `None` without a classifier. The file has its last layer, or
    /// only one layer.
    pub fn classes(&self) -> Option<u64> {
        let tensor = |name| self.tensors.iter().find(|tensor| tensor.name == name);
        let layer = tensor("cls.output.weight").or_else(|| tensor("cls.weight"))?;
        Some(layer.dims.get(1).copied().unwrap_or(1))
    }

    /// Hash of the tokens, in the order of their numbers, and of their types: equal for two files whose token ids mean the
    /// same. How text becomes tokens and messages become text does not count. It is often corrected in one quantization of a
    /// model but not in another, and a folder of the same model ([`crate::hf`]) says it in other words.
    pub fn vocabulary_hash(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for (key, digest) in &self.tokenizer_digests {
            // The length distinguishes `ab` + `c` from `a` + `bc`.
            hasher.update(&(key.len() as u64).to_le_bytes()).update(key.as_bytes()).update(digest.as_bytes());
        }
        hasher.finalize()
    }

    /// The architecture's own key: `llama.` + suffix for a llama.
    fn arch_key(&self, suffix: &str) -> Option<String> {
        Some(format!("{}.{suffix}", self.architecture()?))
    }
}

/// A file's bytes, and its length.
fn source(path: &Path) -> Result<(BufReader<File>, u64), GgufError> {
    let unreadable = |source: io::Error| GgufError::Unreadable { path: path.to_owned(), source };
    let file = File::open(path).map_err(unreadable)?;
    let file_bytes = file.metadata().map_err(unreadable)?.len();
    Ok((BufReader::with_capacity(1 << 16, file), file_bytes))
}

impl Value {
    /// The value, if it is a non-negative integer.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Value::Unsigned(value) => Some(*value),
            Value::Signed(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }
}

/// The tokens and their types: what a token id means.
const VOCABULARY_KEYS: [&str; 2] = ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type"];

/// Architectures that have no KV cache in llama.cpp. Their files may lack the key for non-causal attention.
const ENCODERS: [&str; 9] = [
    "bert",
    "jina-bert-v2",
    "jina-bert-v3",
    "nomic-bert",
    "nomic-bert-moe",
    "neo-bert",
    "eurobert",
    "modern-bert",
    "gemma-embedding",
];
