//! The files beside a model: its projector and its adapter, which llama.cpp reads from one file each, and its draft model.

use std::path::Path;

use super::{COMPUTE_RESERVE, CompanionMemory, Gguf, GgufError, PartsError};
use crate::options::CacheTypes;

/// The files beside a model.
#[derive(Debug, Clone, Copy, Default)]
pub struct CompanionFiles<'p> {
    pub projector: Option<&'p Path>,
    pub adapter: Option<&'p Path>,
    /// A smaller model that drafts for it.
    pub draft: Option<&'p Path>,
}

/// What llama.cpp's converter calls the architecture of every projector.
const PROJECTOR: &str = "clip";

/// Why a model cannot guess tokens beside another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnfitDraft {
    #[error("it generates no text")]
    NoText,
    #[error("its vocabulary is not the model's")]
    OtherVocabulary,
    #[error("the model's state cannot be taken back by a token, so no guesses can be verified")]
    NothingVerified,
    #[error("the model's states weigh too much to be kept for each guess")]
    StatesTooLarge,
    /// A draft node computes anew from a checkpoint instead.
    #[error("its own state cannot be taken back by a token, but it can draft as a node (`baton node --role draft`)")]
    HasStates,
}

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

    /// Estimated memory of the files beside a model: of its projector and its draft model, weights and compute buffers, of the draft
    /// model's KV, and of its adapter. Blocking. Errors: those of [`Gguf::open_projector`] and [`Gguf::open_adapter`].
    pub fn companions(files: CompanionFiles<'_>) -> Result<CompanionMemory, GgufError> {
        let projector = files.projector.map(Gguf::open_projector).transpose()?;
        let adapter = files.adapter.map(Gguf::open_adapter).transpose()?;
        let draft = files.draft.map(Gguf::open).transpose()?;
        let computes = |model: &Gguf| model.files.n_bytes().saturating_add(COMPUTE_RESERVE);
        let all = [
            projector.as_ref().map_or(0, computes),
            draft.as_ref().map_or(0, computes),
            adapter.as_ref().map_or(0, |adapter| adapter.files.n_bytes()),
        ];
        let per_cell = draft.as_ref().and_then(|draft| draft.kv_bytes_per_token(CacheTypes::default()));
        Ok(CompanionMemory { fixed: all.into_iter().fold(0, u64::saturating_add), per_cell: per_cell.unwrap_or(0) })
    }

    /// Checks that `draft` can guess tokens for this model, beside it. Errors: why it cannot; [`UnfitDraft::HasStates`] only if a draft
    /// node can.
    pub fn check_draft(&self, draft: &Gguf) -> Result<(), UnfitDraft> {
        if !draft.generates() {
            Err(UnfitDraft::NoText)
        } else if draft.vocabulary_hash() != self.vocabulary_hash() {
            Err(UnfitDraft::OtherVocabulary)
        } else if !self.takes_back() {
            Err(UnfitDraft::NothingVerified)
        } else if draft.has_states() || !draft.takes_back() {
            Err(UnfitDraft::HasStates)
        } else {
            Ok(())
        }
    }

    /// For those who read only the first part, as llama.cpp does of what stands beside a model. Errors: there are several.
    pub fn require_one_file(&self) -> Result<(), GgufError> {
        match self.files.all() {
            [first, _, ..] => Err(PartsError::MustBeOne { path: first.path.clone() }.into()),
            _ => Ok(()),
        }
    }
}
