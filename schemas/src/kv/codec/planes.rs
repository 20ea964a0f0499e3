//! Byte planes and zstd.
//!
//! Signs and exponents of neighbouring floats are similar, fractions are not. So the bytes are regrouped: the first
//! (least significant) byte of every value, then the second byte of every value, and so on. zstd compresses the planes
//! with the exponents well. On SmolLM2's F16 KV this saves 14–17 %; zstd alone saves 8–10 %.

use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe;

use super::{CodecError, exactly};
use crate::kv::layout::Dtype;

/// zstd's fastest regular level. Higher levels cost time and save little more.
const LEVEL: i32 = 1;

pub(super) fn max_encoded_bytes(n_bytes: usize) -> usize {
    zstd_safe::compress_bound(n_bytes)
}

pub(in crate::kv) struct PlanesEncoder {
    zstd: Compressor<'static>,
    planes: Vec<u8>,
}

impl PlanesEncoder {
    pub(super) fn new() -> Result<Self, CodecError> {
        Ok(PlanesEncoder { zstd: Compressor::new(LEVEL).map_err(complaint)?, planes: Vec::new() })
    }

    pub(super) fn encode(&mut self, dtype: Dtype, bytes: &[u8]) -> Result<Vec<u8>, CodecError> {
        self.planes.resize(bytes.len(), 0);
        match dtype {
            Dtype::F16 | Dtype::Bf16 => split::<2>(bytes, &mut self.planes),
            Dtype::F32 => split::<4>(bytes, &mut self.planes),
            // Refused by `Codec::check`.
            Dtype::Q4_0 | Dtype::Q4_1 | Dtype::Q5_0 | Dtype::Q5_1 | Dtype::Q8_0 | Dtype::Iq4Nl => {}
        }
        self.zstd.compress(&self.planes).map_err(complaint)
    }
}

pub(in crate::kv) struct PlanesDecoder {
    zstd: Decompressor<'static>,
    planes: Vec<u8>,
}

impl PlanesDecoder {
    pub(super) fn new() -> Result<Self, CodecError> {
        Ok(PlanesDecoder { zstd: Decompressor::new().map_err(complaint)?, planes: Vec::new() })
    }

    pub(super) fn decode(&mut self, dtype: Dtype, encoded: &[u8], decoded: &mut [u8]) -> Result<(), CodecError> {
        let wrong = |expected, found| CodecError::EncodedLength { expected, found };
        // zstd itself would continue with a second frame, or skip a skippable frame with arbitrary content.
        let n_frame = zstd_safe::find_frame_compressed_size(encoded)
            .map_err(|code| CodecError::Zstd(zstd_safe::get_error_name(code).into()))?;
        exactly(n_frame, encoded.len(), wrong)?;
        self.planes.resize(decoded.len(), 0);
        // Decompress into a slice: its length limits what is written, whatever size the frame claims.
        let n_decoded = self.zstd.decompress_to_buffer(encoded, &mut self.planes[..]).map_err(complaint)?;
        let wrong = |expected, found| CodecError::DecodedLength { expected, found };
        exactly(decoded.len(), n_decoded, wrong)?;
        match dtype {
            Dtype::F16 | Dtype::Bf16 => join::<2>(&self.planes, decoded),
            Dtype::F32 => join::<4>(&self.planes, decoded),
            // Refused by `Codec::check`.
            Dtype::Q4_0 | Dtype::Q4_1 | Dtype::Q5_0 | Dtype::Q5_1 | Dtype::Q8_0 | Dtype::Iq4Nl => {}
        }
        Ok(())
    }
}

/// Splits values of `N` bytes into `N` planes.
fn split<const N: usize>(values: &[u8], planes: &mut [u8]) {
    let values = values.as_chunks::<N>().0;
    for (byte, plane) in planes.chunks_exact_mut(values.len()).enumerate() {
        for (out, value) in plane.iter_mut().zip(values) {
            *out = value[byte];
        }
    }
}

/// Joins `N` planes to values of `N` bytes.
fn join<const N: usize>(planes: &[u8], values: &mut [u8]) {
    let values = values.as_chunks_mut::<N>().0;
    let n_values = values.len();
    // Read all planes at once: each value is written once, and the compiler vectorizes the loop.
    let planes: [&[u8]; N] = std::array::from_fn(|byte| &planes[byte * n_values..][..n_values]);
    for (i, value) in values.iter_mut().enumerate() {
        *value = std::array::from_fn(|byte| planes[byte][i]);
    }
}

fn complaint(error: std::io::Error) -> CodecError {
    CodecError::Zstd(error.to_string())
}
