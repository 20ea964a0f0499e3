//! Writes GGUF files of version 3: the header, then the data of one tensor after the other as somebody makes it. No part
//! of a tensor needs to be in memory, so a file may be larger than the memory.
//!
//! `baton-bench backends` and the tests write models with made-up weights. The format is that of `docs/gguf.md` of the ggml
//! project, whose byte table stands in `header.rs`.

use std::io::{self, Write};

use super::header::{DEFAULT_ALIGNMENT, MAGIC};
use super::tensor_types;

const VERSION: u32 = 3;

/// A metadata value, with the width that it is written in.
#[derive(Debug, Clone, PartialEq)]
pub enum WrittenValue {
    U16(u16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    /// Elements of one type. An empty list is written as one of strings.
    Array(Vec<WrittenValue>),
    U64(u64),
}

/// The types that tensors are written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WrittenType {
    F32,
    F16,
    /// Blocks of an f16 scale and 32 values of 4 bits.
    Q4_0,
    /// Blocks of an f16 scale and 32 values of 8 bits.
    Q8_0,
    /// Blocks of a shared exponent and 32 floats of 4 bits.
    Mxfp4,
}

impl WrittenType {
    /// ggml's number of the type (`enum ggml_type` in `ggml.h`).
    fn number(self) -> u32 {
        match self {
            WrittenType::F32 => 0,
            WrittenType::F16 => 1,
            WrittenType::Q4_0 => 2,
            WrittenType::Q8_0 => 8,
            WrittenType::Mxfp4 => 39,
        }
    }
}

/// A tensor that will be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedTensor {
    pub name: String,
    /// As ggml counts them: the contiguous dimension first. It must be a multiple of the type's block.
    pub dims: Vec<u64>,
    pub kind: WrittenType,
}

impl PlannedTensor {
    /// Bytes of its data. `None`: its rows are not whole blocks, or its size overflows.
    pub fn n_bytes(&self) -> Option<u64> {
        let block = tensor_types::block(self.kind.number())?;
        let (row, others) = self.dims.split_first()?;
        let n_rows = others.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim))?;
        let row_bytes =
            (row % block.n_elements == 0).then(|| (row / block.n_elements).checked_mul(block.n_bytes))??;
        row_bytes.checked_mul(n_rows)
    }
}

/// A file that will be written: what its header says.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GgufPlan {
    /// In order. `general.alignment` must not be among them.
    pub metadata: Vec<(String, WrittenValue)>,
    /// In order.
    pub tensors: Vec<PlannedTensor>,
}

impl GgufPlan {
    /// The size of the whole file, bytes. Errors: a tensor's rows are not whole blocks.
    pub fn file_bytes(&self) -> io::Result<u64> {
        let data: u64 = self.sizes()?.into_iter().map(padded).sum();
        Ok(self.head()?.len() as u64 + data)
    }

    /// Writes the file. `fill` gets the number of a tensor, and writes exactly its bytes. Errors: those of `out` and
    /// `fill`; other than the tensor's bytes were written; a tensor's rows are not whole blocks.
    pub fn write(
        &self,
        out: &mut dyn Write,
        mut fill: impl FnMut(usize, &mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        out.write_all(&self.head()?)?;
        for (i, n_bytes) in self.sizes()?.into_iter().enumerate() {
            let mut data = Counted { out, n_bytes: 0 };
            fill(i, &mut data)?;
            if data.n_bytes != n_bytes {
                let (name, found) = (&self.tensors[i].name, data.n_bytes);
                return Err(invalid(format!("the tensor {name} has {n_bytes} bytes, but {found} were written")));
            }
            out.write_all(&vec![0; (padded(n_bytes) - n_bytes) as usize])?;
        }
        Ok(())
    }

    /// The header, padded to the start of the first tensor.
    fn head(&self) -> io::Result<Vec<u8>> {
        let mut head = MAGIC.to_vec();
        head.extend(VERSION.to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_string(&mut head, key);
            head.extend(type_of(value).to_le_bytes());
            put_value(&mut head, value);
        }
        let mut offset = 0;
        for (tensor, n_bytes) in self.tensors.iter().zip(self.sizes()?) {
            put_string(&mut head, &tensor.name);
            head.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| head.extend(dim.to_le_bytes()));
            head.extend(tensor.kind.number().to_le_bytes());
            head.extend(u64::to_le_bytes(offset));
            offset += padded(n_bytes);
        }
        head.resize(padded(head.len() as u64) as usize, 0);
        Ok(head)
    }

    /// Bytes of each tensor's data.
    fn sizes(&self) -> io::Result<Vec<u64>> {
        let size = |tensor: &PlannedTensor| {
            let wrong = || {
                let PlannedTensor { name, dims, kind } = tensor;
                invalid(format!("the tensor {name} of {dims:?} values has no whole blocks of {kind:?}"))
            };
            tensor.n_bytes().ok_or_else(wrong)
        };
        self.tensors.iter().map(size).collect()
    }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

fn padded(n_bytes: u64) -> u64 {
    n_bytes.next_multiple_of(DEFAULT_ALIGNMENT)
}

/// Counts what is written through it.
struct Counted<'w> {
    out: &'w mut dyn Write,
    n_bytes: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.n_bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// The format's number of a value's type.
fn type_of(value: &WrittenValue) -> u32 {
    match value {
        WrittenValue::U16(_) => 2,
        WrittenValue::U32(_) => 4,
        WrittenValue::I32(_) => 5,
        WrittenValue::F32(_) => 6,
        WrittenValue::Bool(_) => 7,
        WrittenValue::String(_) => 8,
        WrittenValue::Array(_) => 9,
        WrittenValue::U64(_) => 10,
    }
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &WrittenValue) {
    match value {
        WrittenValue::U16(number) => out.extend(number.to_le_bytes()),
        WrittenValue::U32(number) => out.extend(number.to_le_bytes()),
        WrittenValue::I32(number) => out.extend(number.to_le_bytes()),
        WrittenValue::F32(number) => out.extend(number.to_le_bytes()),
        WrittenValue::Bool(flag) => out.push(u8::from(*flag)),
        WrittenValue::String(text) => put_string(out, text),
        WrittenValue::Array(values) => {
            out.extend(values.first().map_or(8, type_of).to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| put_value(out, value));
        }
        WrittenValue::U64(number) => out.extend(number.to_le_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Value, header};
    use super::*;

    fn planned(name: &str, dims: &[u64], kind: WrittenType) -> PlannedTensor {
        PlannedTensor { name: name.to_owned(), dims: dims.to_vec(), kind }
    }

    /// Writes a plan whose tensors are filled with their number.
    fn written(plan: &GgufPlan) -> Vec<u8> {
        let mut out = Vec::new();
        let sizes = plan.sizes().unwrap();
        plan.write(&mut out, |i, data| data.write_all(&vec![i as u8 + 1; sizes[i] as usize])).unwrap();
        out
    }

    #[test]
    fn the_reader_finds_what_was_written() {
        let text = |text: &str| WrittenValue::String(text.to_owned());
        let plan = GgufPlan {
            metadata: vec![
                ("general.architecture".to_owned(), text("llama")),
                ("a.number".to_owned(), WrittenValue::U32(7)),
                ("a.short".to_owned(), WrittenValue::U16(300)),
                ("a.negative".to_owned(), WrittenValue::I32(-7)),
                ("a.flag".to_owned(), WrittenValue::Bool(true)),
                ("a.float".to_owned(), WrittenValue::F32(0.5)),
                ("a.list".to_owned(), WrittenValue::Array(vec![text("x"), text("y")])),
                ("a.large".to_owned(), WrittenValue::U64(1 << 40)),
            ],
            tensors: vec![
                planned("norm", &[3], WrittenType::F32),
                planned("half", &[5, 2], WrittenType::F16),
                planned("four", &[64, 3], WrittenType::Q4_0),
                planned("eight", &[32], WrittenType::Q8_0),
                planned("experts", &[32, 2, 2], WrittenType::Mxfp4),
            ],
        };
        let bytes = written(&plan);
        assert_eq!(bytes.len() as u64, plan.file_bytes().unwrap());
        let Ok(read) = header::read(&bytes[..], bytes.len() as u64) else { panic!("the header is refused") };
        assert_eq!(read.metadata["a.short"], Value::Unsigned(300));
        assert_eq!(read.metadata["a.number"], Value::Unsigned(7));
        assert_eq!(read.metadata["a.negative"], Value::Signed(-7));
        assert_eq!(read.metadata["a.flag"], Value::Bool(true));
        assert_eq!(read.metadata["a.float"], Value::Float(0.5));
        assert_eq!(read.metadata["a.large"], Value::Unsigned(1 << 40));
        assert_eq!(read.tensors.len(), plan.tensors.len());
        for (i, (found, planned)) in read.tensors.iter().zip(&plan.tensors).enumerate() {
            assert_eq!((&found.name, &found.dims), (&planned.name, &planned.dims));
            let start = found.start as usize;
            let n_bytes = planned.n_bytes().unwrap() as usize;
            assert!(bytes[start..start + n_bytes].iter().all(|byte| *byte == i as u8 + 1), "{}", planned.name);
        }
    }

    #[test]
    fn sizes_are_those_of_whole_blocks() {
        let check = |dims: &[u64], kind, expected| assert_eq!(planned("t", dims, kind).n_bytes(), expected, "{dims:?}");
        check(&[64, 3], WrittenType::Q4_0, Some(3 * 2 * 18));
        check(&[64, 3], WrittenType::Q8_0, Some(3 * 2 * 34));
        check(&[32, 3, 2], WrittenType::Mxfp4, Some(6 * 17));
        check(&[3, 2], WrittenType::F32, Some(24));
        check(&[33, 32], WrittenType::Q4_0, None);
        check(&[], WrittenType::F32, None);
        check(&[u64::MAX, 2], WrittenType::F16, None);
        let plan = GgufPlan { tensors: vec![planned("odd", &[33], WrittenType::Q8_0)], ..GgufPlan::default() };
        let error = plan.file_bytes().unwrap_err().to_string();
        assert!(error.contains("odd") && error.contains("whole blocks"), "{error}");
    }

    #[test]
    fn a_tensor_with_other_than_its_bytes_is_an_error() {
        let plan = GgufPlan { tensors: vec![planned("t", &[4], WrittenType::F32)], ..GgufPlan::default() };
        for n in [0, 15, 17] {
            let error = plan.write(&mut Vec::new(), |_, data| data.write_all(&vec![0; n])).unwrap_err();
            assert!(error.to_string().contains(&format!("but {n} were written")), "{error}");
        }
    }
}
