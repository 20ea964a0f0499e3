//! Speculative decoding: whether steps verify tokens that were guessed.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// When tokens are guessed ahead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "lowercase")]
pub enum Speculation {
    /// Never.
    #[default]
    Off,
    /// Where measured costs and acceptance promise to be faster.
    Auto,
}

impl Speculation {
    pub const ALL: [Speculation; 2] = [Speculation::Off, Speculation::Auto];

    /// The configured value, or the default: who names a draft model wants guesses.
    pub fn of(configured: Option<Speculation>, has_draft: bool) -> Speculation {
        configured.unwrap_or(if has_draft { Speculation::Auto } else { Speculation::Off })
    }

    /// The value's word in options and configuration files.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}
