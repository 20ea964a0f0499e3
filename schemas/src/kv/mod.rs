//! The KV wire format: what a prompt's KV cache looks like outside of any engine, and how it travels.
//!
//! [`layout`] describes a model's cache, [`chunk`] holds the values of a range of positions. Neither knows a
//! framework: K is stored after RoPE, V as it is multiplied, one row per position and layer, little-endian.

pub mod chunk;
pub mod finite;
pub mod layout;

pub use chunk::{Chunk, ChunkError, LayerRows, SectionRows};
pub use finite::all_finite;
pub use layout::{Dtype, KvLayout, LayerShape, LayoutError, RopePairing, Rows, Section};
