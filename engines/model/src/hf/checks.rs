//! Checks of the numbers and names in `config.json`.

use std::path::Path;

use serde::Deserialize;

use super::error::FolderError;

/// Larger numbers are mistakes.
pub(super) const MAX_SIZE: u64 = 1 << 24;

/// The kind of layers that attend to all positions.
pub(super) const FULL: &str = "full_attention";

/// The tokens that attend to later ones: all or none, or by name, as in Gemma 4.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Bidirectional {
    All(bool),
    Named(String),
}

impl Bidirectional {
    /// Returns true if tokens of a text do. Those of images are not computed here.
    pub(super) fn is_of_text(&self) -> bool {
        match self {
            Bidirectional::All(all) => *all,
            Bidirectional::Named(name) => name != "vision",
        }
    }
}

/// Checks that a number is in 1 to `max`.
pub(super) fn within(path: &Path, name: &str, n: u64, max: u64) -> Result<usize, FolderError> {
    match n {
        n if (1..=max).contains(&n) => Ok(n as usize),
        n => Err(FolderError::malformed(path, format!("{name} is {n}; 1 to {max} are possible"))),
    }
}
