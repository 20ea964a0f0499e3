//! GGUF files, as far as the tests' models need them: read in F32, F16, Q4_1 and Q8_0; written in F32, F16 and
//! Q8_0, by Baton's own writer.
//!
//! The format is that of llama.cpp's `docs/gguf.md` and `ggml-common.h`. Malformed files panic.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// A value of the metadata.
pub use baton_model::gguf::writer::WrittenValue as Value;
use baton_model::gguf::writer::{GgufPlan, PlannedTensor, WrittenType};
use half::f16;

const MAGIC: &[u8; 4] = b"GGUF";
/// Tensor data begins at multiples of this many bytes.
const ALIGNMENT: usize = 32;
/// Values in a block of a quantized row.
const BLOCK: usize = 32;

/// How a tensor is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    F32,
    F16,
    /// Rows are multiples of 32 values.
    Q8_0,
}

impl Precision {
    fn kind(self) -> WrittenType {
        match self {
            Precision::F32 => WrittenType::F32,
            Precision::F16 => WrittenType::F16,
            Precision::Q8_0 => WrittenType::Q8_0,
        }
    }
}

/// A tensor in memory.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// As ggml counts them: the contiguous dimension first.
    pub dims: Vec<usize>,
    /// The product of the dimensions.
    pub values: Vec<f32>,
    /// How it is written. Quantized tensors are read as [`Precision::F16`].
    pub precision: Precision,
}

#[derive(Debug, Default)]
pub struct Gguf {
    /// In order.
    pub metadata: Vec<(String, Value)>,
    /// In order.
    pub tensors: Vec<(String, Tensor)>,
}

impl Gguf {
    pub fn write(&self, path: &Path) {
        let mut out = BufWriter::new(File::create(path).unwrap());
        self.write_to(&mut out);
        out.flush().unwrap();
    }

    pub(crate) fn write_to(&self, out: &mut dyn Write) {
        let planned = |(name, tensor): &(String, Tensor)| {
            assert_eq!(tensor.dims.iter().product::<usize>(), tensor.values.len(), "{name}");
            let dims = tensor.dims.iter().map(|&dim| dim as u64).collect();
            PlannedTensor { name: name.clone(), dims, kind: tensor.precision.kind() }
        };
        let plan = GgufPlan { metadata: self.metadata.clone(), tensors: self.tensors.iter().map(planned).collect() };
        let written = plan.write(out, |i, data| {
            let Tensor { values, precision, .. } = &self.tensors[i].1;
            match precision {
                Precision::F32 => values.iter().try_for_each(|value| data.write_all(&value.to_le_bytes())),
                Precision::F16 => {
                    values.iter().try_for_each(|&value| data.write_all(&f16::from_f32(value).to_le_bytes()))
                }
                Precision::Q8_0 => values.chunks(BLOCK).try_for_each(|block| data.write_all(&q8_0(block))),
            }
        });
        written.unwrap();
    }

    pub fn read(path: &Path) -> Gguf {
        let bytes = std::fs::read(path).unwrap();
        let mut input = ByteReader { bytes: &bytes, at: 0 };
        assert_eq!(input.take(4), MAGIC);
        let _version = input.u32();
        let n_tensors = input.u64();
        let n_keys = input.u64();
        let metadata = (0..n_keys).map(|_| {
            let key = input.string();
            let kind = input.u32();
            (key, input.value(kind))
        });
        let metadata = metadata.collect();
        let infos: Vec<(String, Vec<usize>, u32, u64)> = (0..n_tensors)
            .map(|_| {
                let name = input.string();
                let n_dims = input.u32();
                let dims = (0..n_dims).map(|_| input.u64() as usize).collect();
                (name, dims, input.u32(), input.u64())
            })
            .collect();
        let data = input.at.next_multiple_of(ALIGNMENT);
        let tensors = infos.into_iter().map(|(name, dims, ggml_type, offset)| {
            let at = data + offset as usize;
            let values = dequantize(&bytes[at..], ggml_type, dims.iter().product());
            let precision = if ggml_type == 0 { Precision::F32 } else { Precision::F16 };
            (name, Tensor { dims, values, precision })
        });
        Gguf { metadata, tensors: tensors.collect() }
    }
}

/// A block of Q8_0: a scale, by which the largest value becomes 127, and 32 signed bytes.
fn q8_0(block: &[f32]) -> Vec<u8> {
    let largest = block.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    let scale = largest / 127.0;
    let inverse = if scale > 0.0 { scale.recip() } else { 0.0 };
    let quants = block.iter().map(|value| (value * inverse).round() as i8 as u8);
    f16::from_f32(scale).to_le_bytes().into_iter().chain(quants).collect()
}

fn dequantize(bytes: &[u8], ggml_type: u32, n: usize) -> Vec<f32> {
    let half = |bytes: &[u8]| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
    let blocks = |block_bytes: usize| bytes.chunks_exact(block_bytes).take(n / BLOCK);
    match ggml_type {
        0 => bytes.chunks_exact(4).take(n).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        1 => bytes.chunks_exact(2).take(n).map(half).collect(),
        // Q4_1: a scale, a minimum, and the low halves of 16 bytes before their high halves.
        3 => blocks(20)
            .flat_map(|block| {
                let scale = half(block);
                let minimum = half(&block[2..]);
                let low = block[4..].iter().map(|byte| byte & 15);
                let high = block[4..].iter().map(|byte| byte >> 4);
                low.chain(high).map(move |quant| f32::from(quant) * scale + minimum)
            })
            .collect(),
        // Q8_0: a scale and 32 signed bytes.
        8 => blocks(34)
            .flat_map(|block| {
                let scale = half(block);
                block[2..].iter().map(move |&quant| f32::from(quant as i8) * scale)
            })
            .collect(),
        other => panic!("ggml type {other} is not read here"),
    }
}

struct ByteReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl ByteReader<'_> {
    fn take(&mut self, n: usize) -> &[u8] {
        self.at += n;
        &self.bytes[self.at - n..self.at]
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().unwrap())
    }

    fn string(&mut self) -> String {
        let n = self.u64() as usize;
        String::from_utf8(self.take(n).to_vec()).unwrap()
    }

    fn value(&mut self, kind: u32) -> Value {
        match kind {
            2 => Value::U16(u16::from_le_bytes(self.take(2).try_into().unwrap())),
            4 => Value::U32(self.u32()),
            5 => Value::I32(self.u32().cast_signed()),
            6 => Value::F32(f32::from_bits(self.u32())),
            7 => Value::Bool(self.take(1)[0] != 0),
            8 => Value::String(self.string()),
            9 => {
                let kind = self.u32();
                let n = self.u64();
                Value::Array((0..n).map(|_| self.value(kind)).collect())
            }
            10 => Value::U64(self.u64()),
            other => panic!("GGUF type {other} is not read here"),
        }
    }
}
