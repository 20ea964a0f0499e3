//! Fuzz targets for what comes from other machines. See docs/fuzzing.md.

pub mod bodies;
pub mod sample;
