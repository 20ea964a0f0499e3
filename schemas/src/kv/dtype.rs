//! The types of the values in rows and states.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The number of values that share a scale in a quantized type.
const BLOCK_VALUES: usize = 32;

/// The values of `IQ4_NL`'s numbers, before the scale.
const IQ4_NL: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The type of a row's values. The numbers are ggml's; they are part of the wire format and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum Dtype {
    /// 32-bit IEEE float.
    F32 = 0,
    /// 16-bit IEEE float.
    F16 = 1,
    /// Blocks of 32: an F16 scale, and 4 bits a value around 8.
    #[serde(rename = "q4_0")]
    Q4_0 = 2,
    /// Blocks of 32: an F16 scale, an F16 minimum, and 4 bits a value.
    #[serde(rename = "q4_1")]
    Q4_1 = 3,
    /// Blocks of 32: an F16 scale, and 5 bits a value around 16.
    #[serde(rename = "q5_0")]
    Q5_0 = 6,
    /// Blocks of 32: an F16 scale, an F16 minimum, and 5 bits a value.
    #[serde(rename = "q5_1")]
    Q5_1 = 7,
    /// Blocks of 32: an F16 scale, and a signed byte a value.
    #[serde(rename = "q8_0")]
    Q8_0 = 8,
    /// Blocks of 32: an F16 scale, and 4 bits a value, which are indexes of a table.
    Iq4Nl = 20,
    /// 16-bit brain float: the upper half of an f32.
    Bf16 = 30,
}

impl Dtype {
    /// Every type.
    pub const ALL: [Dtype; 9] = [
        Dtype::F32,
        Dtype::F16,
        Dtype::Q4_0,
        Dtype::Q4_1,
        Dtype::Q5_0,
        Dtype::Q5_1,
        Dtype::Q8_0,
        Dtype::Iq4Nl,
        Dtype::Bf16,
    ];

    /// Returns the word of layouts, options and logs.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns the type with this wire number.
    pub fn from_number(number: u32) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| *dtype as u32 == number)
    }

    /// Returns true if values share a scale, so that they only exist in blocks.
    pub fn is_quantized(self) -> bool {
        self.block_values() > 1
    }

    /// Returns the number of values that are stored together: 1, or the size of a quantized type's block.
    pub fn block_values(self) -> usize {
        match self {
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => 1,
            Dtype::Q4_0 | Dtype::Q4_1 | Dtype::Q5_0 | Dtype::Q5_1 | Dtype::Q8_0 | Dtype::Iq4Nl => BLOCK_VALUES,
        }
    }

    /// Returns the number of bytes of [`Dtype::block_values`] values.
    pub fn block_bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::Q4_0 | Dtype::Iq4Nl => 18,
            Dtype::Q4_1 => 20,
            Dtype::Q5_0 => 22,
            Dtype::Q5_1 => 24,
            Dtype::Q8_0 => 34,
        }
    }

    /// Iterates over the values in `bytes`. What is left over after the last whole block is ignored.
    pub fn values(self, bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
        let blocks = bytes.chunks_exact(self.block_bytes());
        blocks.flat_map(move |block| self.block(block).into_iter().take(self.block_values()))
    }

    /// The values of a block. Those of a quantized type are laid out as in ggml's `block_*` structures: the scale, the
    /// minimum, the fifth bits of all values, then a byte of which the lower half belongs to value `i` and the upper half to
    /// value `i + 16`.
    fn block(self, block: &[u8]) -> [f32; BLOCK_VALUES] {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        let nibble = |at: usize, i: usize| block[at + i % 16] >> (i / 16 * 4) & 0xF;
        let fifth = |at: usize, i: usize| nibble(at + 4, i) | (block[at + i / 8] >> (i % 8) & 1) << 4;
        let from = |value: &dyn Fn(usize) -> f32| std::array::from_fn(value);
        match self {
            Dtype::F32 => [f32::from_le_bytes([block[0], block[1], block[2], block[3]]); BLOCK_VALUES],
            Dtype::F16 => [half(0); BLOCK_VALUES],
            Dtype::Bf16 => [bf16::from_le_bytes([block[0], block[1]]).to_f32(); BLOCK_VALUES],
            Dtype::Q4_0 => from(&|i| half(0) * (f32::from(nibble(2, i)) - 8.0)),
            Dtype::Q4_1 => from(&|i| half(0) * f32::from(nibble(4, i)) + half(2)),
            Dtype::Q5_0 => from(&|i| half(0) * (f32::from(fifth(2, i)) - 16.0)),
            Dtype::Q5_1 => from(&|i| half(0) * f32::from(fifth(4, i)) + half(2)),
            Dtype::Q8_0 => from(&|i| half(0) * f32::from(block[2 + i] as i8)),
            Dtype::Iq4Nl => from(&|i| half(0) * f32::from(IQ4_NL[usize::from(nibble(2, i))])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtypes_keep_their_numbers_and_names() {
        assert_eq!(Dtype::ALL.map(|dtype| dtype as u32), [0, 1, 2, 3, 6, 7, 8, 20, 30]);
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::from_number(dtype as u32), Some(dtype));
        }
        assert_eq!(Dtype::from_number(9), None);
        let names = serde_json::to_value(Dtype::ALL).unwrap();
        let wanted = serde_json::json!(["f32", "f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "bf16"]);
        assert_eq!(names, wanted);
    }

    #[test]
    fn a_block_has_the_values_that_ggml_gives_it() {
        let half = |value: f32| f16::from_f32(value).to_le_bytes().to_vec();
        // Value 0 has the number 3 and value 16 the number 12, value 9 the number 5; all others 0.
        let mut nibbles = [0u8; 16];
        nibbles[0] = 0xC3;
        nibbles[9] = 0x05;
        // The fifth bits of the values 9 and 31.
        let fifth = [0, 0b10, 0, 0x80];
        let cases: [(Dtype, Vec<u8>, [f32; 5]); 6] = [
            (Dtype::Q4_0, [half(0.5), nibbles.to_vec()].concat(), [-2.5, 2.0, -1.5, -4.0, -4.0]),
            (Dtype::Q4_1, [half(0.5), half(-1.0), nibbles.to_vec()].concat(), [0.5, 5.0, 1.5, -1.0, -1.0]),
            (Dtype::Q5_0, [half(0.5), fifth.to_vec(), nibbles.to_vec()].concat(), [-6.5, -2.0, 2.5, 0.0, -8.0]),
            (
                Dtype::Q5_1,
                [half(0.5), half(-1.0), fifth.to_vec(), nibbles.to_vec()].concat(),
                [0.5, 5.0, 9.5, 7.0, -1.0],
            ),
            (Dtype::Iq4Nl, [half(0.5), nibbles.to_vec()].concat(), [-32.5, 26.5, -17.5, -63.5, -63.5]),
            (
                Dtype::Q8_0,
                [half(0.5), (0..32).map(|i| (10 - i) as u8).collect()].concat(),
                [5.0, -3.0, 0.5, -10.5, 4.5],
            ),
        ];
        for (dtype, block, wanted) in cases {
            assert_eq!((block.len(), dtype.block_values()), (dtype.block_bytes(), 32), "{dtype:?}");
            let values: Vec<f32> = dtype.values(&block).collect();
            assert_eq!([values[0], values[16], values[9], values[31], values[1]], wanted, "{dtype:?}");
            assert_eq!(values.len(), 32);
        }
        assert_eq!(Dtype::F32.values(&[1.5f32, -2.0].map(f32::to_le_bytes).concat()).collect::<Vec<_>>(), [1.5, -2.0]);
    }
}
