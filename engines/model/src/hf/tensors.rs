//! Reads the headers of safetensors files, and identifies their weights.
//!
//! ```text
//! u64    n_bytes                             little-endian
//! JSON   { name: { "dtype", "shape", "data_offsets": [begin, end] }, …, "__metadata__": {…} }      n_bytes
//! data   offsets count from here
//! ```

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use baton_schemas::part_name::PartName;
use serde::Deserialize;

use super::entries::{Dims, MAX_ENTRIES, Name, NamedEntries};
use super::error::FolderError;
use super::files::{existing, open, parse_json, read_json};
use crate::files::{ModelFile, ModelFiles, SampleStride};
use crate::gguf::TensorInfo;

/// Real headers have some hundred bytes a tensor.
const MAX_HEADER_BYTES: u64 = 32 << 20;
/// The largest known models have some hundred files.
const MAX_FILES: usize = 4_096;
/// The file that says which tensor is in which file, if there are several.
const INDEX: &str = "model.safetensors.index.json";
/// Some hundred bytes a tensor.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// A model in one file has this name. Transformers does not read an index beside it.
const WHOLE: &str = "model.safetensors";

/// The type of a tensor's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum TensorDtype {
    F64,
    F32,
    F16,
    Bf16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
}

impl TensorDtype {
    fn bytes(self) -> u64 {
        match self {
            TensorDtype::F64 | TensorDtype::I64 | TensorDtype::U64 => 8,
            TensorDtype::F32 | TensorDtype::I32 | TensorDtype::U32 => 4,
            TensorDtype::F16 | TensorDtype::Bf16 | TensorDtype::I16 | TensorDtype::U16 => 2,
            TensorDtype::I8 | TensorDtype::U8 | TensorDtype::Bool => 1,
        }
    }

    /// As people call the type of a model's weights.
    fn as_str(self) -> &'static str {
        match self {
            TensorDtype::F64 => "F64",
            TensorDtype::F32 => "F32",
            TensorDtype::F16 => "F16",
            TensorDtype::Bf16 => "BF16",
            TensorDtype::I64 | TensorDtype::I32 | TensorDtype::I16 | TensorDtype::I8 => "integers",
            TensorDtype::U64 | TensorDtype::U32 | TensorDtype::U16 | TensorDtype::U8 | TensorDtype::Bool => "packed",
        }
    }

    /// ggml's number of the type, or of one of its size.
    fn ggml_type(self) -> u32 {
        match self {
            TensorDtype::F32 => 0,
            TensorDtype::F16 => 1,
            TensorDtype::Bf16 => 30,
            TensorDtype::F64 => 28,
            TensorDtype::I64 | TensorDtype::U64 => 27,
            TensorDtype::I32 | TensorDtype::U32 => 26,
            TensorDtype::I16 | TensorDtype::U16 => 25,
            TensorDtype::I8 | TensorDtype::U8 | TensorDtype::Bool => 24,
        }
    }
}

/// An entry of a header.
#[derive(Deserialize)]
struct Entry {
    dtype: TensorDtype,
    shape: Dims,
    data_offsets: [u64; 2],
}

/// The index. Its total size is ignored: many published ones are wrong.
#[derive(Deserialize)]
struct Index {
    /// Files by the names of tensors.
    weight_map: NamedEntries<Name>,
}

/// A tensor, and its place.
struct Tensor {
    dtype: TensorDtype,
    /// The contiguous dimension last.
    shape: Vec<u64>,
    /// The index of its file.
    file: usize,
    /// Where its data begin in the file.
    start: u64,
    n_bytes: u64,
}

/// See [`PartName::following`]. `None`: the file is no part.
fn following(path: &Path) -> Option<PathBuf> {
    let name = PartName::parse(path.file_name()?.to_str()?)?;
    Some(path.with_file_name(name.following()))
}

/// All tensors of a folder, by their names.
pub(super) struct Tensors {
    pub(super) files: ModelFiles,
    tensors: BTreeMap<String, Tensor>,
}

impl Tensors {
    /// Reads the headers of the files that mlx-lm loads: `model*.safetensors`.
    pub(super) fn read(folder: &Path) -> Result<Tensors, FolderError> {
        let unreadable = |source| FolderError::unreadable(folder, source);
        let is_weights = |name: &str| name.starts_with("model") && name.ends_with(".safetensors");
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(unreadable)? {
            let name = entry.map_err(unreadable)?.file_name();
            if name.to_str().is_some_and(is_weights) {
                files.push(folder.join(name));
            }
            if files.len() > MAX_FILES {
                return Err(FolderError::malformed(folder, format!("it has more than {MAX_FILES} files of weights")));
            }
        }
        if files.is_empty() {
            return Err(FolderError::Missing { path: folder.join(WHOLE) });
        }
        files.sort();
        if let Some(path) = files.iter().filter_map(|path| following(path)).find(|path| !path.exists()) {
            return Err(FolderError::Missing { path });
        }
        let mut all = Tensors { files: ModelFiles::default(), tensors: BTreeMap::new() };
        for path in files {
            all.add(path)?;
        }
        if let Some(index) = existing(folder, INDEX) {
            all.check_against(&index)?;
        }
        Ok(all)
    }

    /// The number of tensors of a file in memory.
    pub(super) fn count(file: &[u8]) -> Result<usize, FolderError> {
        let mut all = Tensors { files: ModelFiles::default(), tensors: BTreeMap::new() };
        all.add_header(WHOLE.into(), file, file.len() as u64)?;
        Ok(all.tensors.len())
    }

    /// Checks that the folder's files have what its index names.
    fn check_against(&self, index: &Path) -> Result<(), FolderError> {
        let Index { weight_map: NamedEntries(weight_map) } = read_json(index, MAX_INDEX_BYTES)?;
        let files = self.files.all().iter().enumerate();
        let known: BTreeMap<&str, usize> =
            files.filter_map(|(file_idx, file)| Some((file.path.file_name()?.to_str()?, file_idx))).collect();
        // Quantized copies in one file often have the index of their original.
        if known.contains_key(WHOLE) && !weight_map.iter().any(|(_, Name(file))| file == WHOLE) {
            return Ok(());
        }
        for (tensor, Name(name)) in &weight_map {
            let path = index.with_file_name(name);
            let Some(&file_idx) = known.get(name.as_str()) else { return Err(FolderError::Missing { path }) };
            if self.tensors.get(tensor).is_none_or(|found| found.file != file_idx) {
                let what =
                    format!("it lacks the tensor {tensor:?}, which {INDEX} says is in it: it is of another model");
                return Err(FolderError::malformed(&path, what));
            }
        }
        Ok(())
    }

    fn add(&mut self, path: PathBuf) -> Result<(), FolderError> {
        let file = open(&path)?;
        let file_bytes = file.metadata().map_err(|source| FolderError::unreadable(&path, source))?.len();
        self.add_header(path, file, file_bytes)
    }

    /// Adds what the header of a file of this length says.
    fn add_header(&mut self, path: PathBuf, mut file: impl Read, file_bytes: u64) -> Result<(), FolderError> {
        let unreadable = |source| FolderError::unreadable(&path, source);
        let malformed = |what: String| FolderError::malformed(&path, what);
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(unreadable)?;
        let n_header = u64::from_le_bytes(length);
        let Some(data_start) = n_header.checked_add(8).filter(|start| *start <= file_bytes) else {
            return Err(malformed(format!("its header has {n_header} of {file_bytes} bytes")));
        };
        if n_header > MAX_HEADER_BYTES {
            return Err(FolderError::TooLong { path, max_bytes: MAX_HEADER_BYTES });
        }
        let mut header = vec![0; n_header as usize];
        file.read_exact(&mut header).map_err(unreadable)?;
        let NamedEntries(header) = parse_json::<NamedEntries<Entry>>(&path, &header)?;
        let file_idx = self.files.all().len();
        let mut last_end = data_start;
        for (name, entry) in header {
            let Entry { dtype, shape: Dims(shape), data_offsets: [begin, end] } = entry;
            let n_bytes = shape.iter().try_fold(dtype.bytes(), |n, dim| n.checked_mul(*dim));
            let end_in_file = data_start.checked_add(end).filter(|_| begin <= end && n_bytes == Some(end - begin));
            let Some(end_in_file) = end_in_file else {
                return Err(malformed(format!("the tensor {name:?} has {begin}..{end} for the shape {shape:?}")));
            };
            last_end = last_end.max(end_in_file);
            let tensor = Tensor { dtype, shape, file: file_idx, start: data_start + begin, n_bytes: end - begin };
            if self.tensors.insert(name.clone(), tensor).is_some() {
                return Err(malformed(format!("the tensor {name:?} is there twice")));
            }
            if self.tensors.len() > MAX_ENTRIES {
                return Err(malformed(format!("there are more than {MAX_ENTRIES} tensors")));
            }
        }
        if last_end != file_bytes {
            return Err(malformed(format!("it has {file_bytes} bytes, and its header describes {last_end}")));
        }
        self.files.push(ModelFile { path, n_bytes: file_bytes });
        Ok(())
    }

    /// Returns true if K and V are f32: the type of the weights that compute K.
    pub(super) fn computes_in_f32(&self) -> bool {
        let of_k = |suffix: &str| self.tensors.get(&format!("model.layers.0.self_attn.k_proj.{suffix}"));
        // The scales of quantized weights have the type of what they compute.
        of_k("scales")
            .or_else(|| of_k("weight"))
            .is_none_or(|tensor| matches!(tensor.dtype, TensorDtype::F32 | TensorDtype::F64))
    }

    /// The type that most bytes have.
    pub(super) fn main_type(&self) -> &'static str {
        let mut bytes: BTreeMap<&str, u64> = BTreeMap::new();
        for tensor in self.tensors.values() {
            *bytes.entry(tensor.dtype.as_str()).or_default() += tensor.n_bytes;
        }
        bytes.into_iter().max_by_key(|(_, n_bytes)| *n_bytes).map_or("unknown", |(name, _)| name)
    }

    /// The tensors as a GGUF file lists them. With `bits`, packed weights count as the weights that they hold, and their
    /// scales and biases do not count.
    pub(super) fn infos(&self, bits: Option<u64>) -> Vec<TensorInfo> {
        let is_packed = |stem: &str| self.tensors.contains_key(&format!("{stem}.scales"));
        let info = |(name, tensor): (&String, &Tensor)| {
            let mut dims: Vec<u64> = tensor.shape.iter().rev().copied().collect();
            if let Some(bits) = bits {
                let stem = name.rsplit_once('.').map_or("", |(stem, _)| stem);
                if is_packed(stem) {
                    if !name.ends_with(".weight") {
                        return None;
                    }
                    if let Some(first) = dims.first_mut() {
                        *first = first.saturating_mul(8 * tensor.dtype.bytes()) / bits.max(1);
                    }
                }
            }
            let ggml_type = tensor.dtype.ggml_type();
            let (file_idx, start, size_bytes) = (tensor.file, tensor.start, Some(tensor.n_bytes));
            Some(TensorInfo { name: name.clone(), dims, ggml_type, file_idx, start, size_bytes })
        };
        self.tensors.iter().filter_map(info).collect()
    }

    /// BLAKE3 of each tensor's name, shape and type and of samples of its data, as
    /// [`Gguf::weights_hash`](crate::gguf::Gguf::weights_hash) takes them. Blocking: up to some ten thousand short
    /// reads.
    pub(super) fn hash(&self) -> Result<blake3::Hash, FolderError> {
        let sizes = self.tensors.values().map(|tensor| tensor.n_bytes);
        let stride = SampleStride::for_model(sizes.fold(0, u64::saturating_add));
        let mut reader = self.files.reader();
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"safetensors");
        for (name, tensor) in &self.tensors {
            hasher.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
            hasher.update(&(tensor.shape.len() as u64).to_le_bytes());
            for n in &tensor.shape {
                hasher.update(&n.to_le_bytes());
            }
            hasher.update(&(tensor.dtype as u32).to_le_bytes());
            let at = tensor.start..tensor.start.saturating_add(tensor.n_bytes);
            let hashed = reader.hash_samples(tensor.file, at, stride, &mut hasher);
            hashed.map_err(|fault| FolderError::unreadable(&fault.path, fault.source))?;
        }
        Ok(hasher.finalize())
    }
}
