//! Finds NaN and infinity in KV. One such value in an engine's unified cache corrupts every sequence in it.
//!
//! A float is finite if its exponent bits are not all ones (IEEE 754). The bits are checked as integers, in loops
//! without branches, which the compiler vectorizes. The values of a quantized block are finite if its scale and its minimum
//! are: both are F16, and far from the range of an F32.

use super::layout::Dtype;

/// The number of values, or of quantized blocks, that are checked between two branches.
const BLOCK: usize = 1024;

/// Returns true if every value in `bytes` is finite. `bytes` must have a whole number of values, or of quantized blocks.
pub fn all_finite(dtype: Dtype, bytes: &[u8]) -> bool {
    match dtype {
        Dtype::F16 => all16::<0x7C00>(bytes),
        Dtype::Q4_0 | Dtype::Iq4Nl => all_scales::<18, 1>(bytes),
        Dtype::Q4_1 => all_scales::<20, 2>(bytes),
        Dtype::Q5_0 => all_scales::<22, 1>(bytes),
        Dtype::Q5_1 => all_scales::<24, 2>(bytes),
        Dtype::Q8_0 => all_scales::<34, 1>(bytes),
        Dtype::Bf16 => all16::<0x7F80>(bytes),
        Dtype::F32 => all32::<0x7F80_0000>(bytes),
    }
}

fn all16<const EXPONENT: u16>(bytes: &[u8]) -> bool {
    let bad = |value: &[u8; 2]| u16::from_le_bytes(*value) & EXPONENT == EXPONENT;
    bytes.as_chunks::<2>().0.chunks(BLOCK).all(|block| !block.iter().fold(false, |any, value| any | bad(value)))
}

fn all32<const EXPONENT: u32>(bytes: &[u8]) -> bool {
    let bad = |value: &[u8; 4]| u32::from_le_bytes(*value) & EXPONENT == EXPONENT;
    bytes.as_chunks::<4>().0.chunks(BLOCK).all(|block| !block.iter().fold(false, |any, value| any | bad(value)))
}

/// Checks the first `N_SCALES` F16s of each block of `BYTES` bytes.
fn all_scales<const BYTES: usize, const N_SCALES: usize>(bytes: &[u8]) -> bool {
    let bad = |block: &[u8; BYTES]| {
        let scales = block.as_chunks::<2>().0.iter().take(N_SCALES);
        scales.fold(false, |any, scale| any | (u16::from_le_bytes(*scale) & 0x7C00 == 0x7C00))
    };
    bytes.as_chunks::<BYTES>().0.chunks(BLOCK).all(|blocks| !blocks.iter().fold(false, |any, block| any | bad(block)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_and_bf16_is_judged_as_the_standard_says() {
        for bits in 0..=u16::MAX {
            let bytes = bits.to_le_bytes();
            assert_eq!(all_finite(Dtype::F16, &bytes), half::f16::from_bits(bits).is_finite(), "{bits:#x}");
            assert_eq!(all_finite(Dtype::Bf16, &bytes), half::bf16::from_bits(bits).is_finite(), "{bits:#x}");
        }
    }

    #[test]
    fn one_bad_value_is_found_wherever_it_is() {
        for i in [0, 1, 1023, 1024, 2999] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut values = vec![f32::MAX; 3000];
                assert!(all_finite(Dtype::F32, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>()));
                values[i] = bad;
                assert!(!all_finite(Dtype::F32, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>()));
            }
        }
    }
    #[test]
    fn every_scale_of_every_block_is_checked_and_no_other_byte() {
        for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.is_quantized()) {
            let n_scales = if matches!(dtype, Dtype::Q4_1 | Dtype::Q5_1) { 2 } else { 1 };
            let mut blocks = vec![0xFF; dtype.block_bytes() * 2500];
            for block in blocks.chunks_mut(dtype.block_bytes()) {
                block[..2 * n_scales].fill(0x7B);
            }
            assert!(all_finite(dtype, &blocks), "{dtype:?}");
            for (block, scale) in [(0, 0), (1023, 0), (1024, n_scales - 1), (2499, n_scales - 1)] {
                let at = block * dtype.block_bytes() + 2 * scale;
                for bad in [half::f16::NAN, half::f16::INFINITY, half::f16::NEG_INFINITY] {
                    blocks[at..at + 2].copy_from_slice(&bad.to_le_bytes());
                    assert!(!all_finite(dtype, &blocks), "{dtype:?}: block {block}");
                    assert!(dtype.values(&blocks).any(|value| !value.is_finite()));
                }
                blocks[at..at + 2].fill(0x7B);
            }
        }
    }
}
