//! The families of models that are read from folders, and what their files leave out.

use baton_schemas::kv::RopePairing;

use crate::gguf::window::{GEMMA_PERIOD, GPT_OSS_PERIOD};

/// The families whose KV is known to be handed over to and from GGUF files of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(super) enum Family {
    Llama,
    Qwen2,
    Qwen3,
    #[strum(serialize = "qwen3moe")]
    Qwen3Moe,
    /// Linear layers, and some with attention.
    Qwen35,
    #[strum(serialize = "qwen35moe")]
    Qwen35Moe,
    Gemma3,
    /// Its layers with a window have other heads than those without, and are listed.
    Gemma4,
    #[strum(serialize = "gpt-oss")]
    GptOss,
}

impl Family {
    /// The values of `model_type` that are read.
    pub(super) const NAMES: [&str; 11] = [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "gemma3_text",
        "gemma4",
        "gemma4_text",
        "gpt_oss",
    ];

    /// By the folder's `model_type`.
    pub(super) fn named(model_type: &str) -> Option<Family> {
        match model_type {
            "llama" | "mistral" => Some(Family::Llama),
            "qwen2" => Some(Family::Qwen2),
            "qwen3" => Some(Family::Qwen3),
            "qwen3_moe" => Some(Family::Qwen3Moe),
            "qwen3_5" => Some(Family::Qwen35),
            "qwen3_5_moe" => Some(Family::Qwen35Moe),
            "gemma3_text" => Some(Family::Gemma3),
            "gemma4" | "gemma4_text" => Some(Family::Gemma4),
            "gpt_oss" => Some(Family::GptOss),
            _ => None,
        }
    }

    /// The GGUF file's `general.architecture`.
    pub(super) fn as_str(self) -> &'static str {
        self.into()
    }

    /// The order of K's elements in GGUF files.
    pub(super) fn pairing(self) -> RopePairing {
        match self {
            // llama.cpp's converter permutes the rows of these models' Q and K.
            Family::Llama => RopePairing::Interleaved,
            // Halves, too: the axes of a text's positions are alike.
            Family::Qwen35 | Family::Qwen35Moe => RopePairing::MultiAxis,
            Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe | Family::Gemma3 | Family::Gemma4 | Family::GptOss => {
                RopePairing::HalfSplit
            }
        }
    }

    /// RoPE's base where the file names none, as in Transformers; mlx-lm's own default differs for Qwen 2.
    pub(super) fn default_rope_base(self) -> f64 {
        match self {
            Family::Llama | Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => 10_000.0,
            // As mlx-lm: the files name one.
            Family::Qwen35 | Family::Qwen35Moe => 100_000.0,
            Family::Gemma3 | Family::Gemma4 => 1_000_000.0,
            Family::GptOss => 150_000.0,
        }
    }

    /// The base in layers with a window where the file names none, if it is another one than in the others.
    pub(super) fn default_windowed_base(self) -> Option<f64> {
        matches!(self, Family::Gemma3 | Family::Gemma4).then_some(10_000.0)
    }

    /// Every so many layers one attends to all positions. `None`: all layers do, or they are listed.
    pub(super) fn period(self) -> Option<u64> {
        match self {
            Family::Llama
            | Family::Qwen2
            | Family::Qwen3
            | Family::Qwen3Moe
            | Family::Qwen35
            | Family::Qwen35Moe
            | Family::Gemma4 => None,
            Family::Gemma3 => Some(GEMMA_PERIOD),
            Family::GptOss => Some(GPT_OSS_PERIOD),
        }
    }

    /// Returns true if the file lists layers that differ.
    pub(super) fn lists_layers(self) -> bool {
        self == Family::Gemma4 || self.attention_interval().is_some()
    }

    /// Every so many layers one has attention and the others keep a state, where the file does not say otherwise. `None`: all
    /// layers have attention.
    pub(super) fn attention_interval(self) -> Option<u64> {
        matches!(self, Family::Qwen35 | Family::Qwen35Moe).then_some(4)
    }
}
