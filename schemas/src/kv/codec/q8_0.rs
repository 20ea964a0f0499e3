//! ggml's `q8_0`: a block of 32 values is one F16 scale `d` and 32 signed bytes `q`; each value is `d · q`.
//!
//! The error is at most half a scale, which is 1/254 of the block's largest value, plus the rounding of the layout's
//! type. It is larger only if the largest value is below 0.008, where F16 scales lose precision. Decoding converts the
//! values to the layout's type; a value that rounding pushed out of its range becomes the type's largest value.

use half::f16;

use super::{CodecError, exactly, floats};
use crate::kv::layout::Rows;

/// The number of values that share a scale.
const BLOCK: usize = 32;

/// The number of bytes of an encoded block.
const BLOCK_BYTES: usize = 2 + BLOCK;

/// Checks that a row consists of whole blocks.
pub(super) fn check(rows: Rows) -> Result<(), CodecError> {
    if (rows.n_values as usize).is_multiple_of(BLOCK) {
        Ok(())
    } else {
        Err(CodecError::Blocks { n_values: rows.n_values, block: BLOCK })
    }
}

pub(super) fn encoded_bytes(rows: Rows, n_bytes: usize) -> usize {
    n_bytes / rows.dtype.block_bytes() / BLOCK * BLOCK_BYTES
}

pub(super) fn encode(rows: Rows, bytes: &[u8]) -> Result<Vec<u8>, CodecError> {
    check(rows)?;
    let mut encoded = Vec::with_capacity(encoded_bytes(rows, bytes.len()));
    for (block, bytes) in bytes.chunks_exact(BLOCK * rows.dtype.block_bytes()).enumerate() {
        let mut values = [0.0f32; BLOCK];
        floats::load(rows.dtype, bytes, &mut values);
        let largest = values.iter().fold(0.0f32, |largest, v| largest.max(v.abs()));
        let scale = f16::from_f32(largest / 127.0);
        // Check the values, too: `max` ignores NaN.
        if !scale.is_finite() || !values.iter().fold(true, |finite, v| finite & v.is_finite()) {
            return Err(CodecError::Scale { block });
        }
        let inverse = if scale == f16::ZERO { 0.0 } else { 1.0 / scale.to_f32() };
        encoded.extend(scale.to_le_bytes());
        encoded.extend(values.map(|v| floats::nearest_i8(v * inverse)));
    }
    Ok(encoded)
}

pub(super) fn decode(rows: Rows, encoded: &[u8], decoded: &mut [u8]) -> Result<(), CodecError> {
    check(rows)?;
    let wrong = |expected, found| CodecError::EncodedLength { expected, found };
    exactly(encoded_bytes(rows, decoded.len()), encoded.len(), wrong)?;
    let blocks = encoded.as_chunks::<BLOCK_BYTES>().0.iter();
    for (block, ([d0, d1, quants @ ..], out)) in
        blocks.zip(decoded.chunks_exact_mut(BLOCK * rows.dtype.block_bytes())).enumerate()
    {
        let scale = f16::from_le_bytes([*d0, *d1]);
        if !scale.is_finite() {
            return Err(CodecError::Scale { block });
        }
        let scale = scale.to_f32();
        let quants: &[u8; BLOCK] = quants;
        floats::store(rows.dtype, &quants.map(|q| f32::from(q as i8) * scale), out);
    }
    Ok(())
}
