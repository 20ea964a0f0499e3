//! Reads the bytes of a GGUF header.
//!
//! ```text
//! u8[4]  "GGUF"
//! u32    version
//! u64    n_tensors
//! u64    n_metadata
//! n_metadata × { string key, u32 type, value }
//! n_tensors  × { string name, u32 n_dims, u64[n_dims] dims, u32 ggml_type, u64 offset }
//! padding to `general.alignment`, then tensor data
//!
//! string: u64 n_bytes, bytes      array value: u32 element type, u64 len, elements      all little-endian
//! ```

use std::collections::BTreeMap;
use std::io::{self, BufRead};
use std::path::Path;

use super::tensor_types::{self, TensorBlock};
use super::{Array, GgufError, TensorInfo, VOCABULARY_KEYS, Value};

/// Real files have about 50 entries; a file with keys for each layer may have thousands.
const MAX_METADATA: u64 = 1 << 16;
/// Mixture-of-experts models that store each expert as a tensor have about 10⁵.
pub(super) const MAX_TENSORS: u64 = 1 << 20;
/// The format's own limit on keys.
const MAX_KEY_BYTES: u64 = 65_535;
/// ggml's own limit is 64; longer names only cost memory here.
const MAX_TENSOR_NAME_BYTES: u64 = 1024;
/// ggml's own limit.
const MAX_DIMS: u32 = 4;
/// llama.cpp's own limit for strings (in bytes) and arrays (in elements). A larger length means a damaged file.
const MAX_LEN: u64 = 1 << 30;
/// Chat templates have tens of kilobytes; a `tokenizer.json` stored as a string has megabytes and is not used.
const MAX_KEPT_STRING_BYTES: u64 = 1 << 20;
/// Keeps arrays with a number for each layer, but none with a number for each token.
const MAX_KEPT_ELEMENTS: u64 = 4096;
/// Memory of all kept strings and elements together. An element takes up to 40 times its bytes in the file, so without this
/// limit a header of 250 MB would take 10 GB. Real headers keep less than 4 MB.
const MAX_KEPT_BYTES: u64 = 64 << 20;
/// The most strings of an array that is read. The largest known vocabularies have half a million merges.
const MAX_KEPT_STRINGS: u64 = 1 << 22;
/// Known files do not nest arrays at all. The limit prevents a stack overflow.
const MAX_NESTING: u32 = 4;
/// The first bytes of a file.
pub(super) const MAGIC: [u8; 4] = *b"GGUF";
/// Tensors begin at multiples of this many bytes, unless the file says otherwise.
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;

/// A [`GgufError`] without the file's name.
pub(super) enum Fault {
    Io(io::Error),
    NotGguf,
    UnsupportedVersion(u32),
    Malformed(String),
    Truncated { expected_bytes: u64, found_bytes: u64 },
}

impl Fault {
    pub(super) fn at(self, path: &Path) -> GgufError {
        let path = path.to_owned();
        match self {
            Fault::Io(source) => GgufError::Unreadable { path, source },
            Fault::NotGguf => GgufError::NotGguf { path },
            Fault::UnsupportedVersion(version) => GgufError::UnsupportedVersion { path, version },
            Fault::Malformed(what) => GgufError::Malformed { path, what },
            Fault::Truncated { expected_bytes, found_bytes } => {
                GgufError::Truncated { path, expected_bytes, found_bytes }
            }
        }
    }
}

/// One file's header.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) metadata: BTreeMap<String, Value>,
    /// Those of file 0 of a model; the caller numbers the files.
    pub(super) tensors: Vec<TensorInfo>,
    /// See [`Gguf`](super::Gguf).
    pub(super) tokenizer_digests: BTreeMap<String, blake3::Hash>,
    /// Where the data of the last tensor end, padded: what follows is no part of this file's model.
    pub(super) data_end: u64,
}

/// Reads a header from the start of a file of `file_bytes`.
pub(super) fn read(source: impl BufRead, file_bytes: u64) -> Result<Header, Fault> {
    let mut reader = HeaderReader { source, position: 0, file_bytes, hasher: None, kept_bytes: 0 };
    let version = read_version(&mut reader)?;
    let n_tensors = reader.count("tensors", MAX_TENSORS)?;
    let n_metadata = reader.count("metadata entries", MAX_METADATA)?;

    let mut metadata = BTreeMap::new();
    let mut tokenizer_digests = BTreeMap::new();
    for _ in 0..n_metadata {
        let key = reader.name("metadata key", MAX_KEY_BYTES)?;
        reader.hasher = VOCABULARY_KEYS.contains(&&*key).then(blake3::Hasher::new);
        let value = read_value(&mut reader)?;
        if let Some(hasher) = reader.hasher.take() {
            tokenizer_digests.insert(key.clone(), hasher.finalize());
        }
        if metadata.insert(key.clone(), value).is_some() {
            return Err(Fault::Malformed(format!("the metadata key {key:?} appears twice")));
        }
    }

    let alignment = alignment(&metadata)?;
    let mut tensors = (0..n_tensors).map(|_| read_tensor(&mut reader, alignment)).collect::<Result<Vec<_>, _>>()?;
    let data_start = reader.position.next_multiple_of(alignment);
    let last_end = place(&mut tensors, data_start)?;
    if last_end > file_bytes {
        return Err(Fault::Truncated { expected_bytes: last_end, found_bytes: file_bytes });
    }
    let data_end = last_end.max(data_start).next_multiple_of(alignment);
    Ok(Header { version, metadata, tensors, tokenizer_digests, data_end })
}

/// The digests of a vocabulary that is in no file, as [`read`] makes them of one that is.
pub(super) fn vocabulary_digests(spellings: &[String], types: &[u32]) -> BTreeMap<String, blake3::Hash> {
    let array = |element_type: u32, len: usize| {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&ARRAY.to_le_bytes()).update(&element_type.to_le_bytes()).update(&(len as u64).to_le_bytes());
        hasher
    };
    let mut of_tokens = array(STRING, spellings.len());
    for spelling in spellings {
        of_tokens.update(&(spelling.len() as u64).to_le_bytes()).update(spelling.as_bytes());
    }
    let mut of_types = array(I32, types.len());
    for kind in types {
        of_types.update(&kind.to_le_bytes());
    }
    let digests = [of_tokens, of_types].map(|hasher| hasher.finalize());
    VOCABULARY_KEYS.map(str::to_owned).into_iter().zip(digests).collect()
}

/// Reads an array of strings from the header. `None`: the file has no such array.
pub(super) fn read_strings(source: impl BufRead, file_bytes: u64, wanted: &str) -> Result<Option<Vec<String>>, Fault> {
    let mut reader = HeaderReader { source, position: 0, file_bytes, hasher: None, kept_bytes: 0 };
    if find_array(&mut reader, wanted)? != Some(STRING) {
        return Ok(None);
    }
    let n_strings = reader.count("array elements", MAX_KEPT_STRINGS)?;
    let string = |_| {
        let n_bytes = reader.string_length("string")?;
        if !reader.keeps(n_bytes) {
            return Err(Fault::Malformed(format!("the strings of {wanted:?} take more than {MAX_KEPT_BYTES} bytes")));
        }
        Ok(String::from_utf8_lossy(&reader.vec(n_bytes)?).into_owned())
    };
    (0..n_strings).map(string).collect::<Result<_, _>>().map(Some)
}

/// Reads an array of integers or floats from the header. `None`: the file has no such array.
pub(super) fn read_numbers(source: impl BufRead, file_bytes: u64, wanted: &str) -> Result<Option<Vec<f64>>, Fault> {
    let mut reader = HeaderReader { source, position: 0, file_bytes, hasher: None, kept_bytes: 0 };
    let Some(element_type) = find_array(&mut reader, wanted)?.filter(|kind| scalar_bytes(*kind).is_some()) else {
        return Ok(None);
    };
    let n_numbers = reader.count("array elements", MAX_KEPT_STRINGS)?;
    let number = |_| {
        Ok(match read_scalar(&mut reader, element_type)? {
            Value::Unsigned(n) => n as f64,
            Value::Signed(n) => n as f64,
            Value::Float(n) => n,
            _ => f64::NAN,
        })
    };
    (0..n_numbers).map(number).collect::<Result<_, _>>().map(Some)
}

/// Reads up to the number of elements of an array. Returns their type. `None`: the file has no such array.
fn find_array(reader: &mut HeaderReader<impl BufRead>, wanted: &str) -> Result<Option<u32>, Fault> {
    read_version(reader)?;
    reader.count("tensors", MAX_TENSORS)?;
    for _ in 0..reader.count("metadata entries", MAX_METADATA)? {
        if reader.name("metadata key", MAX_KEY_BYTES)? == wanted {
            return if reader.u32()? == ARRAY { reader.u32().map(Some) } else { Ok(None) };
        }
        read_value(reader)?;
    }
    Ok(None)
}

fn read_version(reader: &mut HeaderReader<impl BufRead>) -> Result<u32, Fault> {
    // A file that is shorter than the magic number is "not GGUF" rather than "truncated".
    if reader.remaining() < 4 || reader.bytes::<4>()? != MAGIC {
        return Err(Fault::NotGguf);
    }
    match reader.u32()? {
        version @ (2 | 3) => Ok(version),
        version => Err(Fault::UnsupportedVersion(version)),
    }
}

fn alignment(metadata: &BTreeMap<String, Value>) -> Result<u64, Fault> {
    match metadata.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        // The limit prevents an overflow when it is added to a position.
        Some(Value::Unsigned(n)) if n.is_power_of_two() && *n <= 1 << 30 => Ok(*n),
        Some(value) => Err(Fault::Malformed(format!("the alignment is {value:?}, not a power of two"))),
    }
}

fn read_value(reader: &mut HeaderReader<impl BufRead>) -> Result<Value, Fault> {
    match reader.u32()? {
        STRING => read_string(reader),
        ARRAY => Ok(Value::Array(read_array(reader, 1)?)),
        scalar => read_scalar(reader, scalar),
    }
}

/// GGUF's numbers of types. Converters write types of tokens as this one.
const I32: u32 = 5;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// Bytes of a scalar type, or `None` for strings, arrays and unknown types.
fn scalar_bytes(value_type: u32) -> Option<u64> {
    match value_type {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn read_scalar(reader: &mut HeaderReader<impl BufRead>, value_type: u32) -> Result<Value, Fault> {
    Ok(match value_type {
        0 => Value::Unsigned(u8::from_le_bytes(reader.bytes()?).into()),
        1 => Value::Signed(i8::from_le_bytes(reader.bytes()?).into()),
        2 => Value::Unsigned(u16::from_le_bytes(reader.bytes()?).into()),
        3 => Value::Signed(i16::from_le_bytes(reader.bytes()?).into()),
        4 => Value::Unsigned(u32::from_le_bytes(reader.bytes()?).into()),
        5 => Value::Signed(i32::from_le_bytes(reader.bytes()?).into()),
        6 => Value::Float(f32::from_le_bytes(reader.bytes()?).into()),
        7 => match reader.bytes::<1>()? {
            [0] => Value::Bool(false),
            [1] => Value::Bool(true),
            [other] => return Err(Fault::Malformed(format!("a boolean has the value {other}"))),
        },
        10 => Value::Unsigned(u64::from_le_bytes(reader.bytes()?)),
        11 => Value::Signed(i64::from_le_bytes(reader.bytes()?)),
        12 => Value::Float(f64::from_le_bytes(reader.bytes()?)),
        other => return Err(Fault::Malformed(format!("a metadata value has the unknown type {other}"))),
    })
}

fn read_string(reader: &mut HeaderReader<impl BufRead>) -> Result<Value, Fault> {
    let n_bytes = reader.string_length("string")?;
    if n_bytes > MAX_KEPT_STRING_BYTES || !reader.keeps(n_bytes) {
        reader.skip(n_bytes)?;
        return Ok(Value::LongString { n_bytes });
    }
    Ok(Value::String(String::from_utf8_lossy(&reader.vec(n_bytes)?).into_owned()))
}

fn read_array(reader: &mut HeaderReader<impl BufRead>, depth: u32) -> Result<Array, Fault> {
    if depth > MAX_NESTING {
        return Err(Fault::Malformed(format!("arrays are nested more than {MAX_NESTING} deep")));
    }
    let element_type = reader.u32()?;
    let len = reader.count("array elements", MAX_LEN)?;
    let mut elements = None;
    match scalar_bytes(element_type) {
        Some(_) if len <= MAX_KEPT_ELEMENTS && reader.keeps(len * size_of::<Value>() as u64) => {
            let values = (0..len).map(|_| read_scalar(reader, element_type));
            elements = Some(values.collect::<Result<_, _>>()?);
        }
        Some(n_bytes) => reader.skip(len * n_bytes)?,
        None if element_type == STRING => {
            for _ in 0..len {
                let n_bytes = reader.string_length("string")?;
                reader.skip(n_bytes)?;
            }
        }
        None if element_type == ARRAY => {
            for _ in 0..len {
                read_array(reader, depth + 1)?;
            }
        }
        None => return Err(Fault::Malformed(format!("an array has elements of the unknown type {element_type}"))),
    }
    Ok(Array { element_type, len, elements })
}

fn read_tensor(reader: &mut HeaderReader<impl BufRead>, alignment: u64) -> Result<TensorInfo, Fault> {
    let name = reader.name("tensor name", MAX_TENSOR_NAME_BYTES)?;
    let damaged = |what: String| Fault::Malformed(format!("tensor {name:?} {what}"));
    let n_dims = reader.u32()?;
    if !(1..=MAX_DIMS).contains(&n_dims) {
        return Err(damaged(format!("has {n_dims} dimensions")));
    }
    let dims = (0..n_dims).map(|_| reader.u64()).collect::<Result<Vec<_>, _>>()?;
    let ggml_type = reader.u32()?;
    let offset_bytes = reader.u64()?;
    if !offset_bytes.is_multiple_of(alignment) {
        return Err(damaged(format!("starts at {offset_bytes}, which is not aligned to {alignment} bytes")));
    }
    let size_bytes = match tensor_types::block(ggml_type) {
        Some(block) => {
            Some(tensor_bytes(&dims, block).ok_or_else(|| damaged(format!("has the impossible shape {dims:?}")))?)
        }
        None => None,
    };
    // From the start of the data section, which is not known yet.
    Ok(TensorInfo { name, dims, ggml_type, file_idx: 0, start: offset_bytes, size_bytes })
}

/// The size of a tensor in bytes. `None` if a row is not a whole number of blocks, or if the size overflows.
fn tensor_bytes(dims: &[u64], block: TensorBlock) -> Option<u64> {
    if !dims.first()?.is_multiple_of(block.n_elements) {
        return None;
    }
    let n_elements = dims.iter().try_fold(1u64, |product, n| product.checked_mul(*n))?;
    (n_elements / block.n_elements).checked_mul(block.n_bytes)
}

/// Makes offsets from the start of the data section those in the file. Returns where the last tensor's data
/// end, 0 if no size is known.
fn place(tensors: &mut [TensorInfo], data_start: u64) -> Result<u64, Fault> {
    let mut last_end = 0;
    for tensor in tensors {
        let start = data_start.checked_add(tensor.start);
        // A tensor of an unknown type has no length to check.
        let end = start.and_then(|start| start.checked_add(tensor.size_bytes.unwrap_or(0)));
        let (Some(start), Some(end)) = (start, end) else {
            return Err(Fault::Malformed(format!("tensor {:?} ends beyond 2^64", tensor.name)));
        };
        tensor.start = start;
        if tensor.size_bytes.is_some() {
            last_end = last_end.max(end);
        }
    }
    Ok(last_end)
}

/// A cursor that knows the file's length and hashes what it reads while it has a hasher.
struct HeaderReader<R> {
    source: R,
    position: u64,
    file_bytes: u64,
    hasher: Option<blake3::Hasher>,
    kept_bytes: u64,
}

impl<R: BufRead> HeaderReader<R> {
    fn remaining(&self) -> u64 {
        self.file_bytes - self.position
    }

    /// Returns true if a value of `n_bytes` may be kept, and counts it.
    fn keeps(&mut self, n_bytes: u64) -> bool {
        let fits = self.kept_bytes + n_bytes <= MAX_KEPT_BYTES;
        self.kept_bytes += if fits { n_bytes } else { 0 };
        fits
    }

    /// Checks that the file has `n_bytes` more. Called before each allocation and each read.
    fn need(&self, n_bytes: u64) -> Result<(), Fault> {
        if n_bytes <= self.remaining() {
            return Ok(());
        }
        let expected_bytes = self.position.saturating_add(n_bytes);
        Err(Fault::Truncated { expected_bytes, found_bytes: self.file_bytes })
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), Fault> {
        self.need(buffer.len() as u64)?;
        self.source.read_exact(buffer).map_err(Fault::Io)?;
        self.position += buffer.len() as u64;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(buffer);
        }
        Ok(())
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let mut buffer = [0; N];
        self.fill(&mut buffer)?;
        Ok(buffer)
    }

    /// Reads `n_bytes`, which the caller has limited.
    fn vec(&mut self, n_bytes: u64) -> Result<Vec<u8>, Fault> {
        self.need(n_bytes)?;
        let mut buffer = vec![0; n_bytes as usize];
        self.fill(&mut buffer)?;
        Ok(buffer)
    }

    /// Reads `n_bytes` without keeping them. They are hashed if there is a hasher.
    fn skip(&mut self, n_bytes: u64) -> Result<(), Fault> {
        self.need(n_bytes)?;
        let mut left = n_bytes;
        while left > 0 {
            let chunk = self.source.fill_buf().map_err(Fault::Io)?;
            if chunk.is_empty() {
                // The file shrank while it was being read.
                return Err(Fault::Io(io::ErrorKind::UnexpectedEof.into()));
            }
            let n = left.min(chunk.len() as u64) as usize;
            if let Some(hasher) = &mut self.hasher {
                hasher.update(&chunk[..n]);
            }
            self.source.consume(n);
            left -= n as u64;
            self.position += n as u64;
        }
        Ok(())
    }

    fn u32(&mut self) -> Result<u32, Fault> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    fn count(&mut self, what: &str, limit: u64) -> Result<u64, Fault> {
        match self.u64()? {
            n if n <= limit => Ok(n),
            n => Err(Fault::Malformed(format!("it claims {n} {what}, more than the limit of {limit}"))),
        }
    }

    fn string_length(&mut self, what: &str) -> Result<u64, Fault> {
        match self.u64()? {
            n if n <= MAX_LEN => Ok(n),
            n => Err(Fault::Malformed(format!("a {what} claims a length of {n} bytes"))),
        }
    }

    /// A key or a tensor's name: short, and valid UTF-8.
    fn name(&mut self, what: &str, limit: u64) -> Result<String, Fault> {
        let n_bytes = self.string_length(what)?;
        if n_bytes > limit {
            return Err(Fault::Malformed(format!("a {what} has {n_bytes} bytes, more than {limit}")));
        }
        String::from_utf8(self.vec(n_bytes)?).map_err(|_| Fault::Malformed(format!("a {what} is not UTF-8")))
    }
}
