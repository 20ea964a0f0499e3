//! What the dialects' parsers have in common: bytes → a JSON object → typed, range-checked fields.
//!
//! Nothing here knows a dialect. Names that several of them share (llama.cpp's for sampling, say) are read here once,
//! so that each range is checked in one place.

pub mod invalid;

pub(crate) mod fields;
pub(crate) mod history;
pub(crate) mod images;
pub(crate) mod json;
pub(crate) mod off;
pub(crate) mod sampling;
pub(crate) mod stop;
pub(crate) mod tokens;
pub(crate) mod tools;

pub use invalid::InvalidRequest;
