//! The files beside a model: its projector and its adapter. llama.cpp reads each from one file.

use std::path::Path;

use super::{COMPUTE_RESERVE, Gguf, GgufError, PartsError};

/// What llama.cpp's converter calls the architecture of every projector.
const PROJECTOR: &str = "clip";

impl Gguf {
    /// Reads the header of a projector (mmproj). Blocking, like [`Gguf::open`]. Errors: those of [`Gguf::open`], and
    /// [`GgufError::NotProjector`].
    pub fn open_projector(path: impl AsRef<Path>) -> Result<Gguf, GgufError> {
        let gguf = Gguf::open(&path)?;
        gguf.require_one_file()?;
        match gguf.architecture() {
            Some(PROJECTOR) => Ok(gguf),
            other => {
                let architecture = other.unwrap_or("unknown").to_owned();
                Err(GgufError::NotProjector { path: path.as_ref().to_owned(), architecture })
            }
        }
    }

    /// Estimated memory of the files beside a model, bytes: of its projector, weights and compute buffers, and of its
    /// adapter. Blocking. Errors: those of [`Gguf::open_projector`] and [`Gguf::open_adapter`].
    pub fn companion_bytes(projector: Option<&Path>, adapter: Option<&Path>) -> Result<u64, GgufError> {
        let projector = projector.map(Gguf::open_projector).transpose()?;
        let adapter = adapter.map(Gguf::open_adapter).transpose()?;
        let projector_bytes =
            projector.map_or(0, |projector| projector.files.n_bytes().saturating_add(COMPUTE_RESERVE));
        Ok(projector_bytes.saturating_add(adapter.map_or(0, |adapter| adapter.files.n_bytes())))
    }

    /// For those who read only the first part, as llama.cpp does of what stands beside a model. Errors: there are several.
    pub fn require_one_file(&self) -> Result<(), GgufError> {
        match self.files.all() {
            [first, _, ..] => Err(PartsError::MustBeOne { path: first.path.clone() }.into()),
            _ => Ok(()),
        }
    }
}
