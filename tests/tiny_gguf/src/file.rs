//! GGUF files, as far as the tests' models need them: read in F32, F16, Q4_1 and Q8_0; written in F32 and F16.
//!
//! The format is that of llama.cpp's `docs/gguf.md` and `ggml-common.h`. Malformed files panic.

use std::path::Path;

use half::f16;

const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
/// Tensor data begins at multiples of this many bytes.
const ALIGNMENT: usize = 32;
/// Values in a block of a quantized row.
const BLOCK: usize = 32;

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Vec<Value>),
    U64(u64),
}

/// How a tensor is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    F32,
    F16,
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
        let mut head = Vec::new();
        head.extend(MAGIC);
        head.extend(VERSION.to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_string(&mut head, key);
            head.extend(type_of(value).to_le_bytes());
            put_value(&mut head, value);
        }
        let mut data = Vec::new();
        for (name, tensor) in &self.tensors {
            assert_eq!(tensor.dims.iter().product::<usize>(), tensor.values.len(), "{name}");
            put_string(&mut head, name);
            head.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|&dim| head.extend((dim as u64).to_le_bytes()));
            let ggml_type: u32 = if tensor.precision == Precision::F32 { 0 } else { 1 };
            head.extend(ggml_type.to_le_bytes());
            head.extend((data.len() as u64).to_le_bytes());
            for &value in &tensor.values {
                match tensor.precision {
                    Precision::F32 => data.extend(value.to_le_bytes()),
                    Precision::F16 => data.extend(f16::from_f32(value).to_le_bytes()),
                }
            }
            data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
        }
        head.resize(head.len().next_multiple_of(ALIGNMENT), 0);
        head.extend(data);
        std::fs::write(path, head).unwrap();
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

fn type_of(value: &Value) -> u32 {
    match value {
        Value::U32(_) => 4,
        Value::I32(_) => 5,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => 9,
        Value::U64(_) => 10,
    }
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U32(number) => out.extend(number.to_le_bytes()),
        Value::I32(number) => out.extend(number.to_le_bytes()),
        Value::F32(number) => out.extend(number.to_le_bytes()),
        Value::Bool(flag) => out.push(u8::from(*flag)),
        Value::String(text) => put_string(out, text),
        Value::Array(values) => {
            // An empty list is one of strings.
            out.extend(values.first().map_or(8, type_of).to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| put_value(out, value));
        }
        Value::U64(number) => out.extend(number.to_le_bytes()),
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
