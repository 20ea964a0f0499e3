//! The names of all engines, and what each reads of a model before it starts.

use std::path::Path;

use baton_model::gguf::{Gguf, GgufError};
use baton_model::hf::{self, FolderError, ModelFolder};
use baton_model::options::CacheTypes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which engine runs a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// llama.cpp, for GGUF models.
    Llama,
    /// candle, for GGUF models of some families: in Rust alone, slower than llama.cpp.
    Candle,
    /// mlx-lm, for folders of safetensors as it has them: mostly on Macs, whose GPU it uses.
    Mlx,
    /// A simulator: deterministic text at configured speeds, for load tests and trials without a model.
    Sim,
}

impl Default for EngineKind {
    /// llama.cpp, unless this build has only candle.
    fn default() -> Self {
        if cfg!(all(feature = "candle", not(feature = "llama"))) { EngineKind::Candle } else { EngineKind::Llama }
    }
}

impl EngineKind {
    pub const ALL: [EngineKind; 4] = [EngineKind::Llama, EngineKind::Candle, EngineKind::Mlx, EngineKind::Sim];

    /// The engine's name in options and configuration files.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The description in an option's help.
    pub fn about(self) -> &'static str {
        match self {
            EngineKind::Llama => "llama.cpp, for GGUF models",
            EngineKind::Candle => "candle, for GGUF models of some families: in Rust alone, slower than llama.cpp",
            EngineKind::Mlx => "mlx-lm, for folders of safetensors as it has them: mostly on Macs, whose GPU it uses",
            EngineKind::Sim => {
                "A simulator: deterministic text at configured speeds, for load tests and trials without a model"
            }
        }
    }

    /// Returns true if an engine of this name, as a node reports it, is a simulator: its figures are made up.
    pub fn is_simulated(name: &str) -> bool {
        EngineKind::ALL.into_iter().find(|kind| kind.as_str() == name) == Some(EngineKind::Sim)
    }

    /// The types of K and V in the engine's memory for a model, with the types that are configured for its cache.
    pub fn cache_types(self, configured: CacheTypes, model: &Gguf) -> CacheTypes {
        match self {
            EngineKind::Candle => CacheTypes::F32,
            // It keeps them in the type in which it computes.
            EngineKind::Mlx => hf::cache_types(model),
            EngineKind::Llama | EngineKind::Sim => configured,
        }
    }

    /// Returns true if the engine runs a model from a file.
    pub fn needs_file(self) -> bool {
        self != EngineKind::Sim
    }

    /// Returns true if the engine's models are folders and not files.
    pub fn runs_folders(self) -> bool {
        self == EngineKind::Mlx
    }

    /// Reads what a model's file or folder says about it. Blocking. Errors: it is none that this engine runs.
    pub fn header(self, path: &Path) -> Result<Gguf, HeaderError> {
        Ok(if self.runs_folders() { ModelFolder::open(path)?.header } else { Gguf::open(path)? })
    }
}

/// Why a model, in a file or in a folder, cannot be described.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    #[error(transparent)]
    File(#[from] GgufError),
    #[error(transparent)]
    Folder(#[from] FolderError),
}
