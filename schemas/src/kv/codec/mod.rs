//! Encodings of a frame's rows, and of states. A codec saves time only if the link is slower than the codec.

mod coders;
mod floats;
pub(super) mod knowledge;
mod kvq;
mod narrow;
mod planes;
mod q8_0;

use std::convert::Infallible;

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(super) use self::coders::Coders;
pub use self::knowledge::{ModelKnowledge, ProfileError, TensorProfile};
pub use self::kvq::KvqError;
pub(super) use self::kvq::{EXACT_POSITIONS, channel_variances};
use self::kvq::{KvqDecoder, KvqEncoder, Level};
use self::narrow::Narrow;
use super::finite::all_finite;
use super::layout::{Dtype, KvLayout, Rows, StateShape};
use super::rotation::KeyRotation;

/// An encoding of rows or of states. One of each is chosen once per handoff. The numbers are part of the wire format and never
/// reused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Codec {
    /// No encoding: rows, or states, as they are.
    #[default]
    None = 0,
    /// Lossless: groups the values' bytes by significance, then zstd. F16 KV shrinks to 0.83–0.86 of its size.
    PlanesZstd = 1,
    /// Lossy: ggml's `q8_0`, 8 bits per value and a scale per 32 values. F16 KV shrinks to 0.53 of its size.
    #[serde(rename = "q8_0")]
    Q8_0 = 2,
    /// Lossy: 4 to 5 bits per value, with an error of the order of the noise between two kernels.
    Kvq = 3,
    /// Lossy: as `kvq`, with fewer bits and more noise.
    KvqFast = 4,
    /// Of states. Lossy: 16-bit floats and a scale per 256 values. F32 states shrink to 0.50 of their size.
    StateF16 = 5,
    /// Of states. Lossy: 8 bits per value and a scale per 32 values. F32 states shrink to 0.28 of their size.
    StateInt8 = 6,
}

/// Speed and compression of a codec.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CodecEffect {
    /// Plain bytes encoded per second, including MACs.
    pub encode_bps: f64,
    /// Plain bytes divided by bytes on the wire.
    pub ratio: f64,
}

/// Why rows cannot be encoded or decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// Encoded rows do not have the length that the codec gives them.
    #[error("{found} encoded bytes; expected {expected}")]
    EncodedLength {
        /// The length that the rows' shape requires.
        expected: usize,
        /// The actual length.
        found: usize,
    },
    /// Decoded rows do not have the length that the layout gives them.
    #[error("{found} decoded bytes; expected {expected}")]
    DecodedLength {
        /// The length that the rows' shape requires.
        expected: usize,
        /// The actual length.
        found: usize,
    },
    /// An error of zstd.
    #[error("zstd: {0}")]
    Zstd(String),
    /// Rows cannot be divided into whole blocks.
    #[error("rows of {n_values} values cannot be divided into blocks of {block}")]
    Blocks {
        /// Values in a row.
        n_values: u32,
        /// Values in a block.
        block: usize,
    },
    /// Rows that are quantized already.
    #[error("rows of {dtype:?} cannot be encoded")]
    Quantized {
        /// Their type.
        dtype: Dtype,
    },
    /// A block's scale is not finite.
    #[error("the scale of block {block} is not finite")]
    Scale {
        /// The index of the block in its tensor.
        block: usize,
    },
    /// A codec of states for rows, or one of rows for states, or no state that it makes narrower.
    #[error("the codec is not made for this part of the KV")]
    OtherPart,
    /// An error of `kvq` or `kvq_fast`.
    #[error("kvq: {0}")]
    Kvq(#[from] KvqError),
}

/// One tensor's rows in a frame.
#[derive(Debug, Clone, Copy)]
pub(super) struct TensorRows {
    /// The tensor's index in canonical order.
    pub(super) index: usize,
    /// The index of the first row: its position, or a number of compressed rows.
    pub(super) start: u32,
    /// The shape of a row.
    pub(super) rows: Rows,
}

impl Codec {
    /// Every codec.
    pub const ALL: [Codec; 7] =
        [Codec::None, Codec::PlanesZstd, Codec::Q8_0, Codec::Kvq, Codec::KvqFast, Codec::StateF16, Codec::StateInt8];

    /// Those of rows.
    pub const OF_ROWS: [Codec; 5] = [Codec::None, Codec::PlanesZstd, Codec::Q8_0, Codec::Kvq, Codec::KvqFast];

    /// Those of states.
    pub const OF_STATES: [Codec; 3] = [Codec::None, Codec::StateF16, Codec::StateInt8];

    /// Returns the codec's name in options, configuration files and tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Codec::None => "none",
            Codec::PlanesZstd => "planes_zstd",
            Codec::Q8_0 => "q8_0",
            Codec::Kvq => "kvq",
            Codec::KvqFast => "kvq_fast",
            Codec::StateF16 => "state_f16",
            Codec::StateInt8 => "state_int8",
        }
    }

    /// Returns a description for the help of an option.
    pub fn about(self) -> &'static str {
        match self {
            Codec::None => "As it is",
            Codec::PlanesZstd => "Lossless: byte planes and zstd",
            Codec::Q8_0 => "Lossy: 8 bits a value",
            Codec::Kvq => "Lossy: 4 to 5 bits a value",
            Codec::KvqFast => "Lossy: 3 to 4 bits a value",
            Codec::StateF16 => "States of recurrent layers, lossy: 16 bits a value",
            Codec::StateInt8 => "States of recurrent layers, lossy: 8 bits a value",
        }
    }

    /// Returns typical figures. Rates are those of one core of a server processor, measured with
    /// `baton-bench handoff --only codecs` under `taskset -c 0`. Those of `kvq` and `kvq_fast` are of four
    /// cores: with less they would never be tried on fast links on which they pay.
    pub fn typical_effect(self) -> CodecEffect {
        match self {
            Codec::None => CodecEffect { encode_bps: 1.8e9, ratio: 1.0 },
            Codec::PlanesZstd => CodecEffect { encode_bps: 0.43e9, ratio: 1.08 },
            Codec::Q8_0 => CodecEffect { encode_bps: 1.1e9, ratio: 1.88 },
            Codec::Kvq => CodecEffect { encode_bps: 2.4e9, ratio: 3.4 },
            Codec::KvqFast => CodecEffect { encode_bps: 2.4e9, ratio: 4.2 },
            Codec::StateF16 => CodecEffect { encode_bps: 1.6e9, ratio: 1.98 },
            Codec::StateInt8 => CodecEffect { encode_bps: 1.6e9, ratio: 3.56 },
        }
    }

    /// Returns the codec with this wire number.
    pub fn from_number(number: u8) -> Option<Codec> {
        Codec::ALL.into_iter().find(|codec| *codec as u8 == number)
    }

    /// Returns true if decoded values differ from the encoded ones.
    pub fn is_lossy(self) -> bool {
        match self {
            Codec::None | Codec::PlanesZstd => false,
            Codec::Q8_0 | Codec::Kvq | Codec::KvqFast | Codec::StateF16 | Codec::StateInt8 => true,
        }
    }

    /// Returns true if the codec works better on K without its rotation.
    pub fn undoes_rotation(self) -> bool {
        matches!(self, Codec::Kvq | Codec::KvqFast)
    }

    /// How states become narrower. `None` for a codec that leaves them as they are.
    fn narrow(self) -> Option<Narrow> {
        match self {
            Codec::None | Codec::PlanesZstd | Codec::Q8_0 | Codec::Kvq | Codec::KvqFast => None,
            Codec::StateF16 => Some(Narrow::F16),
            Codec::StateInt8 => Some(Narrow::Int8),
        }
    }

    /// The same for one state: only those of F32 become narrower.
    fn narrow_state(self, state: &StateShape) -> Option<Narrow> {
        self.narrow().filter(|_| state.values.dtype == Dtype::F32)
    }

    /// Checks that the codec can be that of a layout's states.
    pub fn check_states(self, layout: &KvLayout) -> Result<(), CodecError> {
        let fits = self == Codec::None || layout.states.iter().any(|state| self.narrow_state(state).is_some());
        if fits { Ok(()) } else { Err(CodecError::OtherPart) }
    }

    /// Checks that the codec can encode every tensor of rows of `layout`.
    pub fn check(self, layout: &KvLayout) -> Result<(), CodecError> {
        if self == Codec::None {
            return Ok(());
        }
        if self.narrow().is_some() {
            return Err(CodecError::OtherPart);
        }
        if let Some(Rows { dtype, .. }) = layout.tensors().find(|rows| rows.dtype.is_quantized()) {
            return Err(CodecError::Quantized { dtype });
        }
        match self {
            Codec::None | Codec::PlanesZstd | Codec::Kvq | Codec::KvqFast | Codec::StateF16 | Codec::StateInt8 => {
                Ok(())
            }
            Codec::Q8_0 => layout.tensors().try_for_each(q8_0::check),
        }
    }

    /// Returns the most bytes that `n_bytes` of rows can become.
    pub fn max_encoded_bytes(self, rows: Rows, n_bytes: usize) -> usize {
        match self {
            Codec::None | Codec::StateF16 | Codec::StateInt8 => n_bytes,
            Codec::PlanesZstd => planes::max_encoded_bytes(n_bytes),
            Codec::Q8_0 => q8_0::encoded_bytes(rows, n_bytes),
            Codec::Kvq | Codec::KvqFast => kvq::max_encoded_bytes(n_bytes),
        }
    }

    /// Returns the number of bytes that a state's values become.
    pub fn state_bytes(self, state: &StateShape) -> usize {
        let Rows { n_values, .. } = state.values;
        self.narrow_state(state).map_or(state.values.bytes(), |narrow| narrow.encoded_bytes(n_values as usize))
    }

    /// Encodes the values of states.
    pub(super) fn encode_states<'s>(self, states: impl Iterator<Item = (&'s StateShape, &'s Bytes)>) -> Vec<Bytes> {
        let states: Vec<_> = states.collect();
        let n_bytes = states.iter().map(|(_, values)| values.len()).sum();
        let encode = |(state, values): (&StateShape, &Bytes)| {
            let narrow = self.narrow_state(state);
            Ok::<_, Infallible>(narrow.map_or_else(|| values.clone(), |narrow| narrow.encode(values).into()))
        };
        coders::for_each(states, n_bytes, encode).unwrap_or_else(|never| match never {})
    }

    /// Decodes the values of states, whose encoded lengths are right. Errors: the index of a state with a value that is not
    /// finite.
    pub(super) fn decode_states<'s>(
        self,
        states: impl Iterator<Item = (&'s StateShape, Bytes)>,
    ) -> Result<Vec<Bytes>, usize> {
        let states: Vec<_> = states.enumerate().collect();
        let n_bytes = states.iter().map(|(_, (state, _))| state.values.bytes()).sum();
        let decode = |(index, (state, encoded)): (usize, (&StateShape, Bytes))| {
            let Rows { dtype, n_values } = state.values;
            let decoded = match self.narrow_state(state) {
                None => all_finite(dtype, &encoded).then_some(encoded),
                Some(narrow) => narrow.decode(n_values as usize, &encoded).map(Bytes::from),
            };
            decoded.ok_or(index)
        };
        coders::for_each(states, n_bytes, decode)
    }

    /// Returns true for the codec of heads that name none.
    pub(super) fn is_default(&self) -> bool {
        *self == Codec::default()
    }
}

/// Encodes rows. Reuses the codec's working memory for every tensor.
pub(super) enum Encoder {
    Planes(planes::PlanesEncoder),
    Q8_0,
    Kvq(Box<KvqEncoder>),
}

impl Encoder {
    /// Creates it. `None` for [`Codec::None`]. Errors: the codec cannot encode every tensor of `layout`.
    pub(super) fn new(
        codec: Codec,
        layout: &KvLayout,
        known: ModelKnowledge<'_>,
    ) -> Result<Option<Encoder>, CodecError> {
        codec.check(layout)?;
        let kvq = |level| Some(Encoder::Kvq(Box::new(KvqEncoder::new(layout, known, level))));
        Ok(match codec {
            Codec::None | Codec::StateF16 | Codec::StateInt8 => None,
            Codec::PlanesZstd => Some(Encoder::Planes(planes::PlanesEncoder::new()?)),
            Codec::Q8_0 => Some(Encoder::Q8_0),
            Codec::Kvq => kvq(Level::Quality),
            Codec::KvqFast => kvq(Level::Fast),
        })
    }

    /// Encodes one tensor's rows in the next frame. No rows become no bytes.
    pub(super) fn encode(&mut self, tensor: TensorRows, bytes: &[u8]) -> Result<Vec<u8>, CodecError> {
        let TensorRows { index, start, rows } = tensor;
        match self {
            _ if bytes.is_empty() => Ok(Vec::new()),
            Encoder::Planes(planes) => planes.encode(rows.dtype, bytes),
            Encoder::Q8_0 => q8_0::encode(rows, bytes),
            Encoder::Kvq(kvq) => Ok(kvq.encode(index, start, bytes)?),
        }
    }
}

/// Decodes rows. Reuses the codec's working memory for every tensor.
pub(super) enum Decoder {
    Planes(planes::PlanesDecoder),
    Q8_0,
    Kvq(Box<KvqDecoder>),
}

impl Decoder {
    /// Creates it. `None` for [`Codec::None`]. Errors: the codec cannot encode every tensor of `layout`.
    pub(super) fn new(
        codec: Codec,
        layout: &KvLayout,
        rotation: Option<&KeyRotation>,
    ) -> Result<Option<Decoder>, CodecError> {
        codec.check(layout)?;
        Ok(match codec {
            Codec::None | Codec::StateF16 | Codec::StateInt8 => None,
            Codec::PlanesZstd => Some(Decoder::Planes(planes::PlanesDecoder::new()?)),
            Codec::Q8_0 => Some(Decoder::Q8_0),
            Codec::Kvq | Codec::KvqFast => Some(Decoder::Kvq(Box::new(KvqDecoder::new(layout, rotation.cloned())))),
        })
    }

    /// Decodes all of `encoded` into all of `decoded`, whose length follows from the layout.
    pub(super) fn decode(&mut self, tensor: TensorRows, encoded: &[u8], decoded: &mut [u8]) -> Result<(), CodecError> {
        let TensorRows { index, start, rows } = tensor;
        match self {
            _ if decoded.is_empty() => {
                exactly(0, encoded.len(), |expected, found| CodecError::EncodedLength { expected, found })
            }
            Decoder::Planes(planes) => planes.decode(rows.dtype, encoded, decoded),
            Decoder::Q8_0 => q8_0::decode(rows, encoded, decoded),
            Decoder::Kvq(kvq) => Ok(kvq.decode(index, start, encoded, decoded)?),
        }
    }
}

/// Returns the error `wrong(expected, found)` unless both are equal.
fn exactly(expected: usize, found: usize, wrong: fn(usize, usize) -> CodecError) -> Result<(), CodecError> {
    if expected == found { Ok(()) } else { Err(wrong(expected, found)) }
}

#[cfg(test)]
mod tests;
