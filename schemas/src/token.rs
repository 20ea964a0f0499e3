//! Token ids.

/// An index into a model's vocabulary.
pub type Token = u32;
