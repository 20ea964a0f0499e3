//! Loads a model's tensors. Every tensor of the file must be used: a model with one that is unknown here would be computed
//! wrongly.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use baton_model::files::FilesReader;
use baton_model::gguf::{Gguf, TensorInfo};
use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor};

use super::shape::{MAX_SIZE, ROPE_FACTORS};
use crate::serving::LoadError;

/// The name of the matrix of embeddings.
const EMBEDDING: &str = "token_embd.weight";

/// The tensors of a model that were not loaded yet.
pub(super) struct Weights<'g> {
    files: FilesReader<'g>,
    device: Device,
    left: HashMap<&'g str, &'g TensorInfo>,
}

/// A matrix, and what is added to its products.
pub(super) struct Linear {
    weight: QMatMul,
    bias: Option<Tensor>,
}

impl Linear {
    /// `[n_rows][n_in]` to `[n_rows][n_out]`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = match &self.weight {
            QMatMul::QTensor(weight) if is_faster_widened(weight, x.dim(0)?) => {
                x.matmul(&weight.dequantize(&Device::Cpu)?.t()?)?
            }
            weight => weight.forward(x)?,
        };
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}

/// Types whose products with many rows candle 0.11 computes on a processor faster than those in f32. It has kernels for
/// tiles of them; for the others it has only products of one row with another.
const TILED: [GgmlDType; 2] = [GgmlDType::Q4K, GgmlDType::Q6K];

/// Rows from which on it is faster to widen a matrix of another type and to multiply in f32.
const MIN_WIDENED_ROWS: usize = 32;

/// The largest matrix that is widened, elements: for a moment it takes four times as many bytes.
const MAX_WIDENED: usize = 64 << 20;

fn is_faster_widened(weight: &QTensor, n_rows: usize) -> bool {
    n_rows >= MIN_WIDENED_ROWS
        && !TILED.contains(&weight.dtype())
        && weight.device().is_cpu()
        && weight.shape().elem_count() <= MAX_WIDENED
}

impl<'g> Weights<'g> {
    pub(super) fn open(gguf: &'g Gguf, device: &Device) -> std::result::Result<Self, LoadError> {
        let mut left: HashMap<&str, &TensorInfo> = gguf.tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        if left.len() != gguf.tensors.len() {
            return Err(LoadError::Unsupported("two of its tensors have the same name".into()));
        }
        // `Gguf::key_rotation` reads it, and `ModelShape::of` has checked its size.
        left.remove(ROPE_FACTORS);
        Ok(Weights { files: gguf.files.reader(), device: device.clone(), left })
    }

    /// Reads a tensor of the shape `dims` to `device`; its last dimension is the contiguous one. `None`: the file does not
    /// have it.
    fn read(&mut self, name: &str, dims: &[usize], device: &Device) -> std::result::Result<Option<QTensor>, LoadError> {
        let Some(info) = self.left.remove(name) else { return Ok(None) };
        if !info.dims.iter().rev().copied().eq(dims.iter().map(|n| *n as u64)) || dims.contains(&0) {
            let found: Vec<u64> = info.dims.iter().rev().copied().collect();
            return Err(LoadError::Unsupported(format!("its tensor {name} has the shape {found:?}, not {dims:?}")));
        }
        let dtype = dtype(info.ggml_type).ok_or_else(|| {
            LoadError::Unsupported(format!("its tensor {name} has ggml's type {}, which candle lacks", info.ggml_type))
        })?;
        let n_bytes = info.size_bytes.and_then(|n| usize::try_from(n).ok());
        let n_bytes = n_bytes.ok_or_else(|| LoadError::Unsupported(format!("its tensor {name} is too large")))?;
        // `Gguf::open` has checked that the file is so long.
        let mut bytes = vec![0; n_bytes];
        let read = self.files.read(info.file_idx, info.start, &mut bytes);
        read.map_err(|fault| candle_core::Error::from(fault.source))?;
        let storage = QStorage::from_data(Cow::Owned(bytes), device, dtype)?;
        Ok(Some(QTensor::new(storage, dims.to_vec())?))
    }

    fn required(&mut self, name: &str, dims: &[usize]) -> std::result::Result<QTensor, LoadError> {
        let device = self.device.clone();
        self.read(name, dims, &device)?.ok_or_else(|| missing(name))
    }

    /// The matrix of the embeddings, `[n_vocab][n_embd]`, in the processor's memory: a step reads a few of its rows.
    pub(super) fn embedding(&mut self, n_vocab: usize, n_embd: usize) -> std::result::Result<Arc<QTensor>, LoadError> {
        let tensor = self.read(EMBEDDING, &[n_vocab, n_embd], &Device::Cpu)?;
        tensor.map(Arc::new).ok_or_else(|| missing(EMBEDDING))
    }

    /// The matrix of the logits. A file without one shares it with the embeddings.
    pub(super) fn output(&mut self, embedding: &Arc<QTensor>) -> std::result::Result<Linear, LoadError> {
        let dims = embedding.shape().dims().to_vec();
        let weight = if self.left.contains_key("output.weight") {
            QMatMul::from_qtensor(self.required("output.weight", &dims)?)?
        } else if self.device.is_cpu() {
            QMatMul::from_arc(Arc::clone(embedding))?
        } else {
            let storage = QStorage::from_data(embedding.data()?, &self.device, embedding.dtype())?;
            QMatMul::from_qtensor(QTensor::new(storage, dims.clone())?)?
        };
        Ok(Linear { weight, bias: self.vector("output.bias", dims[0])? })
    }

    /// A matrix `name.weight` of `n_out` rows, and `name.bias` if the file has it.
    pub(super) fn linear(&mut self, name: &str, n_in: usize, n_out: usize) -> std::result::Result<Linear, LoadError> {
        let weight = QMatMul::from_qtensor(self.required(&format!("{name}.weight"), &[n_out, n_in])?)?;
        Ok(Linear { weight, bias: self.vector(&format!("{name}.bias"), n_out)? })
    }

    /// The rows of a matrix that is not loaded yet.
    pub(super) fn n_rows(&self, name: &str) -> std::result::Result<usize, LoadError> {
        let info = self.left.get(name).ok_or_else(|| missing(name))?;
        let rows = info.dims.get(1).and_then(|n| usize::try_from(*n).ok()).filter(|n| (1..=MAX_SIZE).contains(n));
        rows.ok_or_else(|| LoadError::Unsupported(format!("its tensor {name} has no valid number of rows")))
    }

    /// A norm's factors, in f32.
    pub(super) fn norm(&mut self, name: &str, n: usize) -> std::result::Result<Tensor, LoadError> {
        self.vector(name, n)?.ok_or_else(|| missing(name))
    }

    /// A vector in f32. `None`: the file does not have it.
    pub(super) fn vector(&mut self, name: &str, n: usize) -> std::result::Result<Option<Tensor>, LoadError> {
        let device = self.device.clone();
        let Some(tensor) = self.read(name, &[n], &device)? else { return Ok(None) };
        Ok(Some(tensor.dequantize(&device)?.to_dtype(DType::F32)?))
    }

    /// Checks that every tensor was used.
    pub(super) fn finish(self) -> std::result::Result<(), LoadError> {
        match self.left.keys().min() {
            Some(name) => Err(LoadError::Unsupported(format!("its file has the tensor {name}, which is unknown here"))),
            None => Ok(()),
        }
    }
}

/// The memory that weights take beyond the file's size, bytes. Matrices of 16 bits are widened to 32. If the file has one
/// matrix for embeddings and logits, the latter is a copy. Tensors may overlap in the file.
pub(super) fn bytes_beyond_file(gguf: &Gguf) -> u64 {
    let (f32, f16, bf16) = (0, 1, 30);
    let of = |tensor: &TensorInfo| {
        let size = tensor.size_bytes.unwrap_or(0);
        let widened = if [f16, bf16].contains(&tensor.ggml_type) { size } else { 0 };
        let is_shared = tensor.name == EMBEDDING && !gguf.tensors.iter().any(|other| other.name == "output.weight");
        let is_copied = is_shared && [f32, f16, bf16].contains(&tensor.ggml_type);
        widened.saturating_add(if is_copied { size } else { 0 })
    };
    let sizes = gguf.tensors.iter().map(|tensor| tensor.size_bytes.unwrap_or(0)).fold(0, u64::saturating_add);
    let overlapping = sizes.saturating_sub(gguf.files.n_bytes());
    gguf.tensors.iter().map(of).fold(overlapping, u64::saturating_add)
}

fn missing(name: &str) -> LoadError {
    LoadError::Unsupported(format!("its file lacks the tensor {name}"))
}

/// candle's type for ggml's number.
fn dtype(ggml_type: u32) -> Option<GgmlDType> {
    Some(match ggml_type {
        0 => GgmlDType::F32,
        1 => GgmlDType::F16,
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        10 => GgmlDType::Q2K,
        11 => GgmlDType::Q3K,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        30 => GgmlDType::BF16,
        _ => return None,
    })
}
