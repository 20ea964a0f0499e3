//! A model in one GGUF file, or in several: `NAME-00001-of-00003.gguf` and so on, as llama.cpp's `llama-gguf-split` writes
//! them. The first part has the metadata, each part some of the tensors, and three keys say which part it is.
//!
//! llama.cpp refuses parts that do not belong together without saying which. Here each is checked against the first. A
//! part of another model with the same tensors cannot be told apart: no key names the model. Such a mixture has a weights
//! hash of its own.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use baton_schemas::part_name::{PartName, parts_beside};

use super::header::{Header, MAGIC, MAX_TENSORS};
use super::{Gguf, GgufError, Value};
use crate::files::ModelFile;

/// The most parts that are read. The largest known models have about a hundred.
const MAX_PARTS: u64 = 4_096;

#[cfg(test)]
mod tests;

/// Why files are not the parts of one model. Each message is one line for the operator.
#[derive(Debug, thiserror::Error)]
pub enum PartsError {
    /// The operator named another part.
    #[error("{} is part {number} of {n_parts} of a split model: name its first part, -00001-of-{n_parts:05}.gguf", path.display())]
    NotFirst { path: PathBuf, number: u64, n_parts: u64 },
    /// llama.cpp derives the parts' names from the first one's.
    #[error(
        "{} is part 1 of {n_parts} of a split model, so its name must end with -00001-of-{n_parts:05}.gguf, and the other \
         parts must be beside it",
        path.display()
    )]
    WrongName { path: PathBuf, n_parts: u64 },
    /// It would be served without the tensors of the other parts.
    #[error("{} is named as part of {n_parts}, but its key `split.count` says that it is not split", path.display())]
    NoCount { path: PathBuf, n_parts: u32 },
    /// Real models have fewer parts.
    #[error("{} is a part of a model of {n_parts} parts, and at most {MAX_PARTS} are read", path.display())]
    TooMany { path: PathBuf, n_parts: u64 },
    #[error("part {number} of {n_parts} of the split model is missing: there is no file at {}", path.display())]
    Missing { path: PathBuf, number: u64, n_parts: u64 },
    #[error("{} is not part {number} of {n_parts} of this model: {why}", path.display())]
    Foreign { path: PathBuf, number: u64, n_parts: u64, why: String },
    /// No part contradicts the first one, but something is missing.
    #[error(
        "the parts of {} have {} tensors together ({}), and the model has {expected}: one of them is of another model",
        path.display(), found.iter().sum::<usize>(), listed(found)
    )]
    OtherTensors {
        /// The first part.
        path: PathBuf,
        /// Tensors of each part.
        found: Vec<usize>,
        expected: u64,
    },
    /// `cat` does not make one file of the parts.
    #[error(
        "{} has several parts of a split model one after another, which no program reads: name the first of the separate \
         parts, or join them with `llama-gguf-split --merge`",
        path.display()
    )]
    Joined { path: PathBuf },
    /// Something in parts that is not read from parts.
    #[error(
        "{} is split, but projectors, adapters and models to convert must be in one file: join the parts with \
         `llama-gguf-split --merge`",
        path.display()
    )]
    MustBeOne { path: PathBuf },
}

fn listed(found: &[usize]) -> String {
    let parts = found.iter().enumerate().map(|(i, n)| format!("part {}: {n}", i + 1));
    parts.collect::<Vec<_>>().join(", ")
}

/// What a file says of its place in a split model.
#[derive(Clone, Copy)]
struct SplitKeys {
    n_parts: u64,
    /// The first part is 1.
    number: u64,
    /// Tensors of all parts.
    n_tensors: Option<u64>,
}

impl SplitKeys {
    /// `None`: the file is a whole model.
    fn of(header: &Header) -> Option<SplitKeys> {
        let number = |key: &str| header.metadata.get(key).and_then(Value::as_u64);
        let n_parts = number("split.count").filter(|n| *n > 1)?;
        let number_in_file = number("split.no").unwrap_or(0).saturating_add(1);
        Some(SplitKeys { n_parts, number: number_in_file, n_tensors: number("split.tensors.count") })
    }
}

/// Opens the model whose file, or whose first part, is at `path`.
pub(super) fn open(path: &Path) -> Result<Gguf, GgufError> {
    let (header, file) = Gguf::read_file(path)?;
    let Some(split) = SplitKeys::of(&header) else {
        return match claimed_parts(&header, path) {
            Some(n_parts) => Err(PartsError::NoCount { path: path.to_owned(), n_parts }.into()),
            None => Ok(Gguf::of_file(header, file)),
        };
    };
    refuse_joined(&header, &file)?;
    let paths = part_paths(path, split)?;
    let mut known = KnownTensors::default();
    known.add(&header, 1);
    let mut found = vec![header.tensors.len()];
    let mut gguf = Gguf::of_file(header, file);
    for (number, path) in (2..).zip(&paths[1..]) {
        let (mut header, file) = match Gguf::read_file(path) {
            Err(GgufError::NotFound { path }) => {
                return Err(PartsError::Missing { path, number, n_parts: split.n_parts }.into());
            }
            read => read?,
        };
        refuse_joined(&header, &file)?;
        let contradiction = contradiction(&header, SplitKeys { number, ..split });
        if let Some(why) = contradiction.or_else(|| known.contradiction(&header, &gguf)) {
            return Err(PartsError::Foreign { path: file.path, number, n_parts: split.n_parts, why }.into());
        }
        known.add(&header, number);
        found.push(header.tensors.len());
        if found.iter().sum::<usize>() as u64 > MAX_TENSORS {
            let what = format!("its model has more than {MAX_TENSORS} tensors");
            return Err(GgufError::Malformed { path: file.path, what });
        }
        header.tensors.iter_mut().for_each(|tensor| tensor.file_idx = found.len() - 1);
        gguf.tensors.append(&mut header.tensors);
        gguf.files.push(file);
    }
    match split.n_tensors {
        Some(expected) if expected != gguf.tensors.len() as u64 => {
            Err(PartsError::OtherTensors { path: path.to_owned(), found, expected }.into())
        }
        _ => Ok(gguf),
    }
}

/// The number of parts in the name of a file that has the keys of a part and says that it is the only one.
fn claimed_parts(header: &Header, path: &Path) -> Option<u32> {
    header.metadata.get("split.count").and_then(Value::as_u64)?;
    let name = path.file_name().and_then(|name| PartName::parse(name.to_str()?))?;
    (name.n_parts > 1).then_some(name.n_parts)
}

/// The paths of all parts. Errors: `path` is not the first one's.
fn part_paths(path: &Path, SplitKeys { n_parts, number, .. }: SplitKeys) -> Result<Vec<PathBuf>, PartsError> {
    let path = path.to_owned();
    if n_parts > MAX_PARTS {
        return Err(PartsError::TooMany { path, n_parts });
    }
    if number != 1 {
        return Err(PartsError::NotFirst { path, number, n_parts });
    }
    let name = path.file_name().and_then(|name| PartName::parse(name.to_str()?));
    match name {
        Some(name) if name.number == 1 && u64::from(name.n_parts) == n_parts && name.ending == "gguf" => {
            Ok(parts_beside(&path))
        }
        _ => Err(PartsError::WrongName { path, n_parts }),
    }
}

/// Errors: after the tensors another GGUF file begins.
fn refuse_joined(header: &Header, file: &ModelFile) -> Result<(), GgufError> {
    let mut next = [0; MAGIC.len()];
    if file.n_bytes.checked_sub(header.data_end).is_none_or(|left| left < next.len() as u64) {
        return Ok(());
    }
    let read = File::open(&file.path).and_then(|mut opened| {
        opened.seek(SeekFrom::Start(header.data_end))?;
        opened.read_exact(&mut next)
    });
    read.map_err(|source| GgufError::Unreadable { path: file.path.clone(), source })?;
    if next == MAGIC { Err(PartsError::Joined { path: file.path.clone() }.into()) } else { Ok(()) }
}

/// Why a file cannot be this part.
fn contradiction(header: &Header, wanted: SplitKeys) -> Option<String> {
    let Some(found) = SplitKeys::of(header) else { return Some("it is not a part of a split model".to_owned()) };
    if found.n_parts != wanted.n_parts {
        return Some(format!("its model has {} parts", found.n_parts));
    }
    if found.number != wanted.number {
        return Some(format!("it is part {}", found.number));
    }
    match (found.n_tensors, wanted.n_tensors) {
        (Some(theirs), Some(ours)) if theirs != ours => {
            Some(format!("its model has {theirs} tensors, and that of the first part has {ours}"))
        }
        _ => None,
    }
}

/// The names of the tensors of the parts so far, with the numbers of their parts.
#[derive(Default)]
struct KnownTensors(HashMap<String, u64>);

impl KnownTensors {
    fn add(&mut self, header: &Header, number: u64) {
        self.0.extend(header.tensors.iter().map(|tensor| (tensor.name.clone(), number)));
    }

    /// Why a part's tensors are not those of `model`, which the first part describes.
    fn contradiction(&self, header: &Header, model: &Gguf) -> Option<String> {
        let n_embd = model.arch_key("embedding_length").and_then(|key| model.u64(&key));
        header.tensors.iter().find_map(|tensor| {
            let name = &tensor.name;
            if let Some(number) = self.0.get(name) {
                return Some(format!("it has the tensor {name:?}, which part {number} has"));
            }
            // In all architectures a block's first norm is as wide as a token's state.
            let is_norm = name.starts_with("blk.") && name.ends_with(".attn_norm.weight");
            let (found, expected) = (*tensor.dims.first()?, n_embd?);
            let differs = is_norm && found != expected;
            differs.then(|| format!("its tensor {name:?} has {found} values, and the model's have {expected}"))
        })
    }
}
