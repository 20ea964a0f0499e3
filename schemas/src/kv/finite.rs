//! Finds NaN and infinity in KV. One such value in an engine's unified cache corrupts every sequence in it.
//!
//! A float is finite if its exponent bits are not all ones (IEEE 754). The bits are checked as integers, in loops
//! without branches, which the compiler vectorizes.

use super::layout::Dtype;

/// The number of values that are checked between two branches.
const BLOCK: usize = 1024;

/// Returns true if every value in `bytes` is finite. `bytes` must have a whole number of values.
pub fn all_finite(dtype: Dtype, bytes: &[u8]) -> bool {
    match dtype {
        Dtype::F16 => all16::<0x7C00>(bytes),
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
}
