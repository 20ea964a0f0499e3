//! Rows' bytes to f32 and back. Rows of quantized values do not come here: [`Codec::check`](super::Codec::check) refuses them.

use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};

use crate::kv::layout::Dtype;

/// The number of values that are converted at a time, without memory on the heap.
const PIECE: usize = 64;

/// Reads values of type `dtype`, as many as `values` has.
pub(super) fn load(dtype: Dtype, bytes: &[u8], values: &mut [f32]) {
    let pieces = bytes.chunks(PIECE * dtype.block_bytes()).zip(values.chunks_mut(PIECE));
    match dtype {
        Dtype::F32 => {
            for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        Dtype::F16 => pieces.for_each(|(bytes, values)| {
            let mut halves = [f16::ZERO; PIECE];
            let pairs = bytes.as_chunks::<2>().0;
            halves.iter_mut().zip(pairs).for_each(|(half, pair)| *half = f16::from_le_bytes(*pair));
            halves[..values.len()].convert_to_f32_slice(values);
        }),
        Dtype::Bf16 => pieces.for_each(|(bytes, values)| {
            let mut halves = [bf16::ZERO; PIECE];
            let pairs = bytes.as_chunks::<2>().0;
            halves.iter_mut().zip(pairs).for_each(|(half, pair)| *half = bf16::from_le_bytes(*pair));
            halves[..values.len()].convert_to_f32_slice(values);
        }),
        Dtype::Q4_0 | Dtype::Q4_1 | Dtype::Q5_0 | Dtype::Q5_1 | Dtype::Q8_0 | Dtype::Iq4Nl => {}
    }
}

/// Writes all `values` as `dtype`. Values beyond the type's range become its largest.
pub(super) fn store(dtype: Dtype, values: &[f32], bytes: &mut [u8]) {
    let pieces = values.chunks(PIECE).zip(bytes.chunks_mut(PIECE * dtype.block_bytes()));
    match dtype {
        Dtype::F32 => {
            for (out, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *out = value.to_le_bytes();
            }
        }
        Dtype::F16 => pieces.for_each(|(values, out)| {
            let largest = f16::MAX.to_f32();
            let mut clamped = [0.0; PIECE];
            clamped.iter_mut().zip(values).for_each(|(to, value)| *to = value.clamp(-largest, largest));
            let mut halves = [f16::ZERO; PIECE];
            halves[..values.len()].convert_from_f32_slice(&clamped[..values.len()]);
            let pairs = out.as_chunks_mut::<2>().0;
            pairs.iter_mut().zip(halves).for_each(|(pair, half)| *pair = half.to_le_bytes());
        }),
        Dtype::Bf16 => pieces.for_each(|(values, out)| {
            let largest = bf16::MAX.to_f32();
            let mut clamped = [0.0; PIECE];
            clamped.iter_mut().zip(values).for_each(|(to, value)| *to = value.clamp(-largest, largest));
            let mut halves = [bf16::ZERO; PIECE];
            halves[..values.len()].convert_from_f32_slice(&clamped[..values.len()]);
            let pairs = out.as_chunks_mut::<2>().0;
            pairs.iter_mut().zip(halves).for_each(|(pair, half)| *pair = half.to_le_bytes());
        }),
        Dtype::Q4_0 | Dtype::Q4_1 | Dtype::Q5_0 | Dtype::Q5_1 | Dtype::Q8_0 | Dtype::Iq4Nl => {}
    }
}

/// Rounds to the nearest integer from -127 to 127 and returns the byte of the i8. As in ggml, -128 is unused. Adding
/// 1.5 · 2^23 leaves a float no bits for a fraction, and its lowest bits are the integer. Unlike `round`, the compiler
/// can vectorize this.
pub(super) fn nearest_i8(value: f32) -> u8 {
    (value.clamp(-127.0, 127.0) + 12_582_912.0).to_bits() as u8
}
