//! `kvq` and `kvq_fast`: lossy, 3 to 5 bits a value, with an error of the order of the noise between two kernels of one
//! model. `baton-bench codec` measures both.
//!
//! | part | file |
//! |---|---|
//! | K without its rotation | [`rotation`](crate::kv::rotation) |
//! | each channel's step, mean and class | [`history`] |
//! | the code of each class: [`classes`], by [`huffman`] | |
//! | a channel's integers in four [`bits`] streams | [`symbols`] |
//! | which channels are processed together | [`slabs`] |
//! | the whole: [`encode`] and [`decode`] | |
//!
//! The first four positions of a sequence stay as they are: models attend to them far more than to others. Of every
//! other row, K is un-rotated, and each channel becomes integers, `q = round((x - mean) / step)`. One step for a tensor
//! gives all its channels the same error. `docs/kv-frames.md` has the bytes.

mod bits;
mod classes;
mod decode;
mod encode;
mod history;
mod huffman;
mod slabs;
mod symbols;

pub(super) use self::decode::KvqDecoder;
pub(super) use self::encode::KvqEncoder;
pub(in crate::kv) use self::encode::channel_variances;
use super::super::layout::{KvLayout, RopePairing, Rows};
use super::super::rotation::KeyRotation;

/// Positions from the start of a sequence that are not quantized.
pub(in crate::kv) const EXACT_POSITIONS: u32 = 4;

/// The most rows that are quantized together.
const BLOCK_ROWS: usize = 512;

/// The form of an encoded tensor, its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Form {
    /// The rows as they are.
    Plain = 0,
    /// With side information.
    Fresh = 1,
    /// With means and classes from the frames before.
    Continued = 2,
}

/// How far the rows may be from the original.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    /// `kvq`.
    Quality,
    /// `kvq_fast`: fewer bits, a larger error.
    Fast,
}

impl Level {
    /// The step, relative to the spread of the tensor's values around their channels' means.
    fn step(self) -> f32 {
        match self {
            Level::Quality => 0.15,
            Level::Fast => 0.3,
        }
    }

    /// The step, relative to that of a profile.
    fn profiled_step(self) -> f32 {
        match self {
            Level::Quality => 0.195,
            Level::Fast => 0.3,
        }
    }
}

/// Why an encoded tensor is refused, or rows cannot be encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KvqError {
    /// The tensor ends too early.
    #[error("the encoded tensor is too short")]
    Truncated,
    /// There are bytes after the last stream.
    #[error("{0} bytes follow the encoded tensor")]
    Rest(usize),
    /// A byte that says what follows has an unknown value.
    #[error("there is no form {0}")]
    Mode(u8),
    /// A class has an unknown number.
    #[error("there is no class {0}")]
    Class(u8),
    /// The step is not possible.
    #[error("a step of {0}")]
    Step(String),
    /// The tensor refers to frames before, but none had side information.
    #[error("the tensor continues frames that have not come")]
    NothingToContinue,
    /// A stream of bits is longer or shorter than its symbols.
    #[error("a stream of {n_bytes} bytes ends after {n_bits} bits")]
    StreamLength {
        /// Its length.
        n_bytes: usize,
        /// The bits of its symbols.
        n_bits: u64,
    },
    /// Rows to encode have a value that is not finite.
    #[error("a value is not finite")]
    NotFinite,
    /// The layout has fewer tensors.
    #[error("there is no tensor {0}")]
    NoTensor(usize),
}

/// A tensor's place in the layout.
#[derive(Debug, Clone, Copy)]
struct LayoutTensor {
    section: usize,
    is_key: bool,
    rows: Rows,
}

/// The tensors of a layout in canonical order.
fn tensors(layout: &KvLayout) -> Vec<LayoutTensor> {
    let sections = layout.sections.iter().enumerate();
    let layers = sections.flat_map(|(section, shape)| shape.layers.iter().map(move |layer| (section, layer)));
    let tensors = layers.flat_map(|(section, layer)| {
        let key = Some(LayoutTensor { section, is_key: true, rows: layer.k });
        [key, layer.v.map(|rows| LayoutTensor { section, is_key: false, rows })].into_iter().flatten()
    });
    tensors.collect()
}

/// How K is rotated.
#[derive(Debug, Clone)]
struct Rotation {
    pairing: RopePairing,
    /// Not given: K stays rotated.
    keys: Option<KeyRotation>,
}

impl Rotation {
    fn of(&self, tensor: LayoutTensor) -> Option<&super::super::rotation::SectionRotation> {
        let keys = self.keys.as_ref().filter(|_| tensor.is_key)?;
        keys.sections.get(tensor.section)?.as_ref()
    }
}

/// Rows at the start of a tensor that stay as they are.
fn n_exact(start: u32, n_rows: usize) -> usize {
    (EXACT_POSITIONS.saturating_sub(start) as usize).min(n_rows)
}

/// The most bytes that `n_bytes` of rows become.
pub(super) fn max_encoded_bytes(n_bytes: usize) -> usize {
    // Plain, if nothing else is shorter.
    1 + n_bytes
}

#[cfg(test)]
mod tests;
