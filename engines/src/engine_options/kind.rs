//! The list of all engines, and what each reads of a model before it starts.

use std::path::Path;

use baton_model::gguf::{FoundHead, Gguf, GgufError, Sequences, UnusedHead};
use baton_model::hf::{self, FolderError, ModelFolder};
use baton_model::options::{CacheTypes, Speculation};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Gives the rows of all engines but the simulator to a macro. To add an engine, add its row: its name, the feature that
/// builds it, its type in its module, what its models are, and the types of K and V in its memory.
macro_rules! engines {
    ($rows:ident) => {
        $rows! {
            /// llama.cpp, for GGUF models.
            Llama: "llama" => llama::Llama, Files, as_configured;
            /// candle, for GGUF models of some families: in Rust alone, slower than llama.cpp.
            Candle: "candle" => candle::Candle, Files, always_f32;
            /// mlx-lm, for folders of safetensors as it has them: mostly on Macs, whose GPU it uses.
            Mlx: "mlx" => mlx::Mlx, Folders, as_in_weights;
        }
    };
}
pub(crate) use engines;

macro_rules! kinds {
    ($(#[doc = $about:literal] $kind:ident: $feature:literal => $module:ident::$library:ident, $form:ident, $kv:ident;)*) => {
        /// Which engine runs a model.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr)]
        #[strum(serialize_all = "snake_case")]
        #[serde(rename_all = "lowercase")]
        pub enum EngineKind {
            $(#[doc = $about] $kind,)*
            /// A simulator: deterministic text at configured speeds, for load tests and trials without a model.
            Sim,
        }

        impl EngineKind {
            pub const ALL: [EngineKind; [$($feature),*].len() + 1] = [$(EngineKind::$kind,)* EngineKind::Sim];

            /// The description in an option's help.
            pub fn about(self) -> &'static str {
                match self {
                    $(EngineKind::$kind => $about.trim().trim_end_matches('.'),)*
                    EngineKind::Sim => {
                        "A simulator: deterministic text at configured speeds, for load tests and trials without a model"
                    }
                }
            }

            /// The Cargo feature with which it is built. `None`: it is always there.
            pub fn feature(self) -> Option<&'static str> {
                match self {
                    $(EngineKind::$kind => Some($feature),)*
                    EngineKind::Sim => None,
                }
            }

            /// Returns true if this build has it.
            pub fn is_built(self) -> bool {
                match self {
                    $(EngineKind::$kind => cfg!(feature = $feature),)*
                    EngineKind::Sim => true,
                }
            }

            /// What its models are. `None`: it needs none.
            fn form(self) -> Option<OnDisk> {
                match self {
                    $(EngineKind::$kind => Some(OnDisk::$form),)*
                    EngineKind::Sim => None,
                }
            }

            /// The types of K and V in the engine's memory for a model, with the types that are configured for its cache.
            pub fn cache_types(self, configured: CacheTypes, model: &Gguf) -> CacheTypes {
                match self {
                    $(EngineKind::$kind => $kv(configured, model),)*
                    EngineKind::Sim => configured,
                }
            }
        }
    };
}
engines!(kinds);

/// The form of a model on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnDisk {
    /// A GGUF file, or several parts.
    Files,
    /// A folder of safetensors.
    Folders,
}

fn as_configured(configured: CacheTypes, _: &Gguf) -> CacheTypes {
    configured
}

fn always_f32(_: CacheTypes, _: &Gguf) -> CacheTypes {
    CacheTypes::F32
}

/// The type in which the model is computed.
fn as_in_weights(_: CacheTypes, model: &Gguf) -> CacheTypes {
    hf::cache_types(model)
}

impl Default for EngineKind {
    /// The first engine of this build that runs files, else the first one.
    fn default() -> Self {
        let runs_files = |kind: &EngineKind| kind.is_built() && kind.form() == Some(OnDisk::Files);
        EngineKind::ALL.into_iter().find(runs_files).unwrap_or(EngineKind::ALL[0])
    }
}

/// llama.cpp's sequences in addition to the slots': KV is exported and imported through a scratch sequence, and a chunk is freed
/// of its states through another one, which is always empty.
///
/// In a unified full cache a sequence costs only some bits. A sliding-window cache has `n_swa` cells for each sequence
/// (7.5 MiB on Gemma 3 270M, 3 MiB on a 20B gpt-oss). An import needs them while its slot's older cells are still in
/// use. Recurrent layers have a state for each sequence.
///
/// Where each sequence has a `separate` cache, nothing can be shared with a scratch sequence, and there is none.
pub(crate) const fn scratch_sequences(has_states: bool, separate: bool) -> u32 {
    match (separate, has_states) {
        (true, _) => 0,
        (false, true) => 2,
        (false, false) => 1,
    }
}

impl EngineKind {
    /// The sequences that share an engine's memory, of which `n_slots` are decoded together.
    pub fn sequences(self, n_slots: u32, n_ubatch: u32, speculation: Speculation, model: &Gguf) -> Sequences {
        match self {
            EngineKind::Llama => {
                let separate = model.kv_shape().is_some_and(|shape| shape.separate);
                let n_scratch = scratch_sequences(model.has_states(), separate);
                let n = n_slots.saturating_add(n_scratch);
                let n_rollback = match speculation {
                    Speculation::Off => 0,
                    Speculation::Auto => model.n_rollback(n, n_ubatch),
                };
                Sequences { n, n_ubatch: Some(n_ubatch), n_rollback }
            }
            EngineKind::Candle | EngineKind::Mlx | EngineKind::Sim => {
                Sequences { n: n_slots, n_ubatch: None, n_rollback: 0 }
            }
        }
    }

    /// The head with which an engine with these sequences can guess for a model. Errors: why it has none.
    pub fn head(self, sequences: Sequences, types: CacheTypes, model: &Gguf) -> Result<FoundHead, UnusedHead> {
        match self {
            EngineKind::Llama => model.usable_head(types, sequences),
            EngineKind::Candle | EngineKind::Mlx | EngineKind::Sim => Err(UnusedHead::NotComputed),
        }
    }

    /// The engine's name in options and configuration files.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns true if an engine of this name, as a node reports it, is a simulator: its figures are made up.
    pub fn is_simulated(name: &str) -> bool {
        EngineKind::ALL.into_iter().find(|kind| kind.as_str() == name) == Some(EngineKind::Sim)
    }

    /// Returns true if the engine runs a model from a file.
    pub fn needs_file(self) -> bool {
        self.form().is_some()
    }

    /// Returns true if the engine's models are folders and not files.
    pub fn runs_folders(self) -> bool {
        self.form() == Some(OnDisk::Folders)
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
