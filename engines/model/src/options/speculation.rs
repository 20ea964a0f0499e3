//! Speculative decoding: whether steps verify tokens that were guessed.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// When tokens are guessed ahead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "lowercase")]
pub enum Speculation {
    /// Never.
    Off,
    /// Where measured costs and acceptance promise to be faster, but for requests with a seed of the client's.
    #[default]
    Auto,
}

impl Speculation {
    pub const ALL: [Speculation; 2] = [Speculation::Off, Speculation::Auto];

    /// The same for models whose states take memory to be taken back: only if the operator wants guesses, who then names it or a
    /// draft model.
    pub fn of_states(configured: Option<Speculation>, has_draft: bool) -> Speculation {
        configured.unwrap_or(if has_draft { Speculation::Auto } else { Speculation::Off })
    }

    /// The value's word in options and configuration files.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}
