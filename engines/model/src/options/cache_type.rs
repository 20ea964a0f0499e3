//! The types in which the KV cache stores K and V.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A type of the KV cache's values; those that llama-server has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "lowercase")]
pub enum CacheType {
    F32,
    #[default]
    F16,
    Bf16,
    #[serde(rename = "q8_0")]
    Q8_0,
    #[serde(rename = "q5_1")]
    Q5_1,
    #[serde(rename = "q5_0")]
    Q5_0,
    #[serde(rename = "q4_1")]
    Q4_1,
    #[serde(rename = "q4_0")]
    Q4_0,
    #[serde(rename = "iq4_nl")]
    Iq4Nl,
}

impl CacheType {
    pub const ALL: [CacheType; 9] = [
        CacheType::F32,
        CacheType::F16,
        CacheType::Bf16,
        CacheType::Q8_0,
        CacheType::Q5_1,
        CacheType::Q5_0,
        CacheType::Q4_1,
        CacheType::Q4_0,
        CacheType::Iq4Nl,
    ];

    /// The type's name in options and configuration files.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// ggml's number of the type.
    pub fn ggml_type(self) -> u32 {
        match self {
            CacheType::F32 => 0,
            CacheType::F16 => 1,
            CacheType::Q4_0 => 2,
            CacheType::Q4_1 => 3,
            CacheType::Q5_0 => 6,
            CacheType::Q5_1 => 7,
            CacheType::Q8_0 => 8,
            CacheType::Iq4Nl => 20,
            CacheType::Bf16 => 30,
        }
    }
}

/// The types of a cache's K and V.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheTypes {
    pub k: CacheType,
    pub v: CacheType,
}

impl CacheTypes {
    /// Both in f32.
    pub const F32: CacheTypes = CacheTypes { k: CacheType::F32, v: CacheType::F32 };

    /// A text for the fingerprint. It distinguishes the KV from that of the same weights with default types.
    pub fn changes(self) -> Vec<String> {
        let changed = [("cache_type_k", self.k), ("cache_type_v", self.v)].into_iter();
        let changed = changed.filter(|(_, cache_type)| *cache_type != CacheType::default());
        changed.map(|(key, cache_type)| format!("{key}={}", cache_type.as_str())).collect()
    }
}
