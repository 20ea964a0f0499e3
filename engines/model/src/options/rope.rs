//! How positions are embedded: RoPE's frequencies, and their scaling for contexts longer than the model was trained for.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How RoPE's frequencies are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "lowercase")]
pub enum RopeScaling {
    None,
    Linear,
    Yarn,
}

impl RopeScaling {
    pub const ALL: [RopeScaling; 3] = [RopeScaling::None, RopeScaling::Linear, RopeScaling::Yarn];

    /// The method's name in options and configuration files.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// What the operator changes of the model's own settings. `None` keeps the model's.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RopeOptions {
    pub scaling: Option<RopeScaling>,
    pub freq_base: Option<f32>,
    /// The inverse of the factor by which the context grows.
    pub freq_scale: Option<f32>,
    /// The context that the model was trained for, tokens.
    pub yarn_orig_ctx: Option<u32>,
    pub yarn_ext_factor: Option<f32>,
    pub yarn_attn_factor: Option<f32>,
    pub yarn_beta_slow: Option<f32>,
    pub yarn_beta_fast: Option<f32>,
}

impl RopeOptions {
    /// A text for the fingerprint. It distinguishes the KV from that of the same weights with the model's own settings.
    pub fn changes(self) -> Vec<String> {
        let number = |n: Option<f32>| n.map(|n| n.to_string());
        let changes = [
            ("rope_scaling", self.scaling.map(|scaling| scaling.as_str().to_owned())),
            ("rope_freq_base", number(self.freq_base)),
            ("rope_freq_scale", number(self.freq_scale)),
            ("yarn_orig_ctx", self.yarn_orig_ctx.map(|n| n.to_string())),
            ("yarn_ext_factor", number(self.yarn_ext_factor)),
            ("yarn_attn_factor", number(self.yarn_attn_factor)),
            ("yarn_beta_slow", number(self.yarn_beta_slow)),
            ("yarn_beta_fast", number(self.yarn_beta_fast)),
        ];
        changes.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value?))).collect()
    }
}
