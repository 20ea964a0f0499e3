//! Fuzz targets for what comes from other machines and from clients. See docs/fuzzing.md.

pub mod bodies;
pub mod requests;
pub mod sample;
