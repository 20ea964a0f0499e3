//! Encodings of a frame's rows. A codec saves time only if the link is slower than the codec.

mod planes;
mod q8_0;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::layout::{KvLayout, Rows};

/// An encoding of rows. It is chosen once per handoff. The numbers are part of the wire format and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Codec {
    /// No encoding: the rows as they are.
    None = 0,
    /// Lossless: groups the values' bytes by significance, then zstd. F16 KV shrinks to 0.83–0.86 of its size.
    PlanesZstd = 1,
    /// Lossy: ggml's `q8_0`, 8 bits per value and a scale per 32 values. F16 KV shrinks to 0.53 of its size.
    #[serde(rename = "q8_0")]
    Q8_0 = 2,
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
    /// A block's scale is not finite.
    #[error("the scale of block {block} is not finite")]
    Scale {
        /// The index of the block in its tensor.
        block: usize,
    },
}

impl Codec {
    /// Every codec.
    pub const ALL: [Codec; 3] = [Codec::None, Codec::PlanesZstd, Codec::Q8_0];

    /// Returns the codec's name in options, configuration files and tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Codec::None => "none",
            Codec::PlanesZstd => "planes_zstd",
            Codec::Q8_0 => "q8_0",
        }
    }

    /// Returns a description for the help of an option.
    pub fn about(self) -> &'static str {
        match self {
            Codec::None => "As it is",
            Codec::PlanesZstd => "Lossless: byte planes and zstd",
            Codec::Q8_0 => "Lossy: 8 bits a value",
        }
    }

    /// Returns typical figures, measured on one core of a server processor with `baton bench handoff --only codecs`.
    pub fn typical_effect(self) -> CodecEffect {
        match self {
            Codec::None => CodecEffect { encode_bps: 1.8e9, ratio: 1.0 },
            Codec::PlanesZstd => CodecEffect { encode_bps: 0.43e9, ratio: 1.08 },
            Codec::Q8_0 => CodecEffect { encode_bps: 1.1e9, ratio: 1.88 },
        }
    }

    /// Returns the codec with this wire number.
    pub fn from_number(number: u8) -> Option<Codec> {
        Codec::ALL.into_iter().find(|codec| *codec as u8 == number)
    }

    /// Checks that the codec can encode every tensor of `layout`.
    pub fn check(self, layout: &KvLayout) -> Result<(), CodecError> {
        match self {
            Codec::None | Codec::PlanesZstd => Ok(()),
            Codec::Q8_0 => layout.tensors().try_for_each(q8_0::check),
        }
    }

    /// Returns the most bytes that `n_bytes` of rows can become.
    pub fn max_encoded_bytes(self, rows: Rows, n_bytes: usize) -> usize {
        match self {
            Codec::None => n_bytes,
            Codec::PlanesZstd => planes::max_encoded_bytes(n_bytes),
            Codec::Q8_0 => q8_0::encoded_bytes(rows, n_bytes),
        }
    }
}

/// Encodes rows. Reuses the codec's working memory for every tensor.
pub(super) enum Encoder {
    Planes(planes::PlanesEncoder),
    Q8_0,
}

impl Encoder {
    /// Creates it. `None` for [`Codec::None`].
    pub(super) fn new(codec: Codec) -> Result<Option<Encoder>, CodecError> {
        Ok(match codec {
            Codec::None => None,
            Codec::PlanesZstd => Some(Encoder::Planes(planes::PlanesEncoder::new()?)),
            Codec::Q8_0 => Some(Encoder::Q8_0),
        })
    }

    /// Encodes one tensor. No rows become no bytes.
    pub(super) fn encode(&mut self, rows: Rows, bytes: &[u8]) -> Result<Vec<u8>, CodecError> {
        match self {
            _ if bytes.is_empty() => Ok(Vec::new()),
            Encoder::Planes(planes) => planes.encode(rows.dtype, bytes),
            Encoder::Q8_0 => q8_0::encode(rows, bytes),
        }
    }
}

/// Decodes rows. Reuses the codec's working memory for every tensor.
pub(super) enum Decoder {
    Planes(planes::PlanesDecoder),
    Q8_0,
}

impl Decoder {
    /// Creates it. `None` for [`Codec::None`].
    pub(super) fn new(codec: Codec) -> Result<Option<Decoder>, CodecError> {
        Ok(match codec {
            Codec::None => None,
            Codec::PlanesZstd => Some(Decoder::Planes(planes::PlanesDecoder::new()?)),
            Codec::Q8_0 => Some(Decoder::Q8_0),
        })
    }

    /// Decodes all of `encoded` into all of `decoded`, whose length follows from the layout.
    pub(super) fn decode(&mut self, rows: Rows, encoded: &[u8], decoded: &mut [u8]) -> Result<(), CodecError> {
        match self {
            _ if decoded.is_empty() => {
                exactly(0, encoded.len(), |expected, found| CodecError::EncodedLength { expected, found })
            }
            Decoder::Planes(planes) => planes.decode(rows.dtype, encoded, decoded),
            Decoder::Q8_0 => q8_0::decode(rows, encoded, decoded),
        }
    }
}

/// Returns the error `wrong(expected, found)` unless both are equal.
fn exactly(expected: usize, found: usize, wrong: fn(usize, usize) -> CodecError) -> Result<(), CodecError> {
    if expected == found { Ok(()) } else { Err(wrong(expected, found)) }
}

#[cfg(test)]
mod tests;
