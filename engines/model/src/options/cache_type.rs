//! The types in which the KV cache stores K and V.

use baton_schemas::kv::{Dtype, RowTypes};
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

    /// The type in layouts.
    fn dtype(self) -> Dtype {
        match self {
            CacheType::F32 => Dtype::F32,
            CacheType::F16 => Dtype::F16,
            CacheType::Bf16 => Dtype::Bf16,
            CacheType::Q8_0 => Dtype::Q8_0,
            CacheType::Q5_1 => Dtype::Q5_1,
            CacheType::Q5_0 => Dtype::Q5_0,
            CacheType::Q4_1 => Dtype::Q4_1,
            CacheType::Q4_0 => Dtype::Q4_0,
            CacheType::Iq4Nl => Dtype::Iq4Nl,
        }
    }

    /// ggml's number of the type.
    pub fn ggml_type(self) -> u32 {
        self.dtype() as u32
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

    /// What a node says of its types: nothing of the default ones.
    pub fn changed(self) -> Option<RowTypes> {
        let types = RowTypes { k: self.k.dtype(), v: Some(self.v.dtype()) };
        (self != CacheTypes::default()).then_some(types)
    }
}
