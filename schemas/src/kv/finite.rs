//! Are all values numbers?

use super::Dtype;

/// Whether no value is NaN or infinite. `rows` is little-endian values of `dtype`; bytes that are no whole value do
/// not count as finite.
///
/// One NaN in a cache that sequences share reaches all of them: attention multiplies masked values by zero, and zero
/// times NaN is NaN.
pub fn all_finite(dtype: Dtype, rows: &[u8]) -> bool {
    if !rows.len().is_multiple_of(dtype.bytes()) {
        return false;
    }
    // An exponent of all ones is infinity or NaN, in each of these formats (IEEE 754; bfloat16 is f32's upper half).
    match dtype {
        Dtype::F32 => rows.chunks(BLOCK).all(|block| {
            let blocks = block.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            !blocks.fold(false, |found, bits| found | (bits & 0x7F80_0000 == 0x7F80_0000))
        }),
        Dtype::F16 => halves_are_finite(rows, 0x7C00),
        Dtype::Bf16 => halves_are_finite(rows, 0x7F80),
    }
}

/// Bytes looked at before the answer is: long enough that the compiler's vector loop pays, short enough to end early.
const BLOCK: usize = 4096;

fn halves_are_finite(rows: &[u8], exponent: u16) -> bool {
    rows.chunks(BLOCK).all(|block| {
        let halves = block.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        !halves.fold(false, |found, bits| found | (bits & exponent == exponent))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bad_value_anywhere_is_found() {
        let bad = [
            (Dtype::F32, f32::NAN.to_le_bytes().to_vec()),
            (Dtype::F32, f32::NEG_INFINITY.to_le_bytes().to_vec()),
            (Dtype::F16, 0x7C00u16.to_le_bytes().to_vec()),
            (Dtype::F16, 0xFE01u16.to_le_bytes().to_vec()),
            (Dtype::Bf16, 0x7F80u16.to_le_bytes().to_vec()),
            (Dtype::Bf16, 0xFFC0u16.to_le_bytes().to_vec()),
        ];
        for (dtype, value) in bad {
            let n = 3 * BLOCK / value.len() + 1;
            let mut rows = vec![0; n * value.len()];
            assert!(all_finite(dtype, &rows));
            for place in [0, 1, n / 2, n - 1] {
                let at = place * value.len();
                rows[at..at + value.len()].copy_from_slice(&value);
                assert!(!all_finite(dtype, &rows), "{dtype:?} at {place}");
                rows[at..at + value.len()].fill(0);
            }
        }
    }

    #[test]
    fn the_largest_numbers_are_numbers() {
        assert!(all_finite(Dtype::F32, &f32::MAX.to_le_bytes()));
        assert!(all_finite(Dtype::F16, &0x7BFFu16.to_le_bytes()));
        assert!(all_finite(Dtype::Bf16, &0x7F7Fu16.to_le_bytes()));
        assert!(all_finite(Dtype::F16, &[]));
        assert!(!all_finite(Dtype::F16, &[0]));
    }
}
