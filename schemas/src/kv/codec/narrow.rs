//! Narrower states: the values of a state in blocks, each with a scale of its own. A value is `scale · q`.
//!
//! | codec | values of a block | `q` | bytes of a whole block |
//! |---|---|---|---|
//! | `state_f16` | 256 | an F16 | 516 of 1,024: its error is 1/4096 of the value, or 2^-38 of the block's largest |
//! | `state_int8` | 32 | a signed byte | 36 of 128: its error is 1/254 of the block's largest value |
//!
//! The scale of `state_f16` is a power of two that brings the block's largest value to 2^14 to 2^15, so that no value leaves the
//! range of an F16. A block with a value that is not finite gets a scale that is not, which every reader refuses.

use super::floats;
use crate::kv::finite::all_finite;
use crate::kv::layout::Dtype;

/// Bytes of a block's scale, an F32.
const SCALE_BYTES: usize = 4;

/// The most values of a block.
const MOST: usize = 256;

/// The type of the integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Narrow {
    F16,
    Int8,
}

impl Narrow {
    /// Values that share a scale; the last block of a state may have fewer.
    fn block(self) -> usize {
        match self {
            Narrow::F16 => MOST,
            Narrow::Int8 => 32,
        }
    }

    /// Bytes of a `q`.
    fn q_bytes(self) -> usize {
        match self {
            Narrow::F16 => 2,
            Narrow::Int8 => 1,
        }
    }

    /// The bytes that so many values become.
    pub(super) fn encoded_bytes(self, n_values: usize) -> usize {
        n_values.div_ceil(self.block()) * SCALE_BYTES + n_values * self.q_bytes()
    }

    /// Encodes the values of a state, F32.
    pub(super) fn encode(self, bytes: &[u8]) -> Vec<u8> {
        let mut encoded = Vec::with_capacity(self.encoded_bytes(bytes.len() / 4));
        for block in bytes.chunks(4 * self.block()) {
            let mut values = [0.0; MOST];
            let values = &mut values[..block.len() / 4];
            floats::load(Dtype::F32, block, values);
            let largest = values.iter().fold(0.0f32, |largest, v| largest.max(v.abs()));
            // `max` ignores NaN.
            let is_finite = all_finite(Dtype::F32, block);
            let scale = if is_finite { self.scale(largest) } else { f32::NAN };
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            values.iter_mut().for_each(|v| *v *= inverse);
            encoded.extend(scale.to_le_bytes());
            match self {
                Narrow::F16 => {
                    let from = encoded.len();
                    encoded.resize(from + 2 * values.len(), 0);
                    floats::store(Dtype::F16, values, &mut encoded[from..]);
                }
                Narrow::Int8 => encoded.extend(values.iter().map(|v| floats::nearest_i8(*v))),
            }
        }
        encoded
    }

    /// The scale of a block whose largest value is finite. 0: all its values become 0.
    fn scale(self, largest: f32) -> f32 {
        let scale = match self {
            // The power of two below `largest`, 14 exponents lower; at least the smallest one whose inverse is exact.
            Narrow::F16 if largest > 0.0 => f32::from_bits(((largest.to_bits() >> 23).max(15) - 14) << 23),
            Narrow::F16 => 0.0,
            Narrow::Int8 => largest / 127.0,
        };
        // The inverse of a smaller one is infinite.
        if scale < f32::MIN_POSITIVE { 0.0 } else { scale }
    }

    /// Decodes a state of `n_values`, whose encoded length is right. `None`: a scale or a value is not finite.
    pub(super) fn decode(self, n_values: usize, encoded: &[u8]) -> Option<Vec<u8>> {
        let mut decoded = vec![0; 4 * n_values];
        let blocks = encoded.chunks(SCALE_BYTES + self.block() * self.q_bytes());
        for (encoded, block) in blocks.zip(decoded.chunks_mut(4 * self.block())) {
            let (scale, q) = encoded.split_first_chunk::<SCALE_BYTES>()?;
            let scale = f32::from_le_bytes(*scale);
            if !scale.is_finite() || (self == Narrow::F16 && !all_finite(Dtype::F16, q)) {
                return None;
            }
            let mut values = [0.0; MOST];
            let values = &mut values[..block.len() / 4];
            match self {
                Narrow::F16 => floats::load(Dtype::F16, q, values),
                Narrow::Int8 => values.iter_mut().zip(q).for_each(|(v, q)| *v = f32::from(*q as i8)),
            }
            // Rounding may have pushed the largest float out of its range.
            values.iter_mut().for_each(|v| *v = (*v * scale).clamp(f32::MIN, f32::MAX));
            floats::store(Dtype::F32, values, block);
        }
        Some(decoded)
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    fn through(narrow: Narrow, values: &[f32]) -> Option<Vec<f32>> {
        let encoded = narrow.encode(&bytes(values));
        assert_eq!(encoded.len(), narrow.encoded_bytes(values.len()));
        Some(Dtype::F32.values(&narrow.decode(values.len(), &encoded)?).collect())
    }

    #[test]
    fn a_value_comes_back_within_the_error_of_its_block() {
        let values: Vec<f32> =
            (0..1_000u32).map(|i| (i as f32 * 0.37).sin() * 10f32.powi(i as i32 / 100 - 5)).collect();
        for n in [1, 31, 32, 33, 256, 257, 1_000] {
            for (narrow, block, error) in [(Narrow::F16, 256, 0.0), (Narrow::Int8, 32, 1.0 / 253.0)] {
                let found = through(narrow, &values[..n]).unwrap();
                for (wanted, found) in values[..n].chunks(block).zip(found.chunks(block)) {
                    let largest = wanted.iter().fold(0.0f32, |largest, v| largest.max(v.abs()));
                    for (w, f) in wanted.iter().zip(found) {
                        let most = (error * largest).max(w.abs() / 2_048.0).max(largest * 2f32.powi(-38));
                        assert!((w - f).abs() <= most, "{narrow:?} of {n}: {w} became {f}, largest {largest}");
                    }
                }
            }
        }
    }

    #[test]
    fn values_beyond_the_range_of_f16_and_the_smallest_and_largest_floats_stay_finite() {
        for narrow in [Narrow::F16, Narrow::Int8] {
            for value in [65_504.0, 65_520.0, 1e9, -3e38, f32::MAX, f32::MIN, 1e-6, 1e-20] {
                let found = through(narrow, &[value, 0.0, value / 3.0]).unwrap();
                assert!((found[0] / value - 1.0).abs() < 1e-3, "{narrow:?}: {value} became {}", found[0]);
                assert_eq!(found[1], 0.0);
                assert!((found[2] * 3.0 / value - 1.0).abs() < 0.02, "{narrow:?}: {found:?}");
            }
            for tiny in [0.0, -0.0, 1e-40, f32::MIN_POSITIVE, 1.5e-37] {
                let found = through(narrow, &[tiny; 40]).unwrap();
                assert!(found.iter().all(|v| (v - tiny).abs() <= 1e-36), "{narrow:?}: {tiny} became {}", found[0]);
            }
        }
    }

    #[test]
    fn a_value_that_is_not_finite_is_refused_by_the_reader() {
        for narrow in [Narrow::F16, Narrow::Int8] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, 31, 299] {
                    let mut values = vec![1.0; 300];
                    values[at] = bad;
                    assert_eq!(through(narrow, &values), None, "{narrow:?} {bad} at {at}");
                }
            }
        }
        let good = Narrow::F16.encode(&bytes(&[1.0; 3]));
        for bad in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY] {
            let mut lie = good.clone();
            lie[6..8].copy_from_slice(&bad.to_le_bytes());
            assert_eq!(Narrow::F16.decode(3, &lie), None);
        }
        for (narrow, scale) in [(Narrow::F16, f32::INFINITY), (Narrow::Int8, f32::NAN), (Narrow::Int8, f32::INFINITY)] {
            let mut lie = narrow.encode(&bytes(&[0.0; 40]));
            lie[..4].copy_from_slice(&scale.to_le_bytes());
            assert_eq!(narrow.decode(40, &lie), None);
        }
    }
}
