//! Random weights, in blocks as llama.cpp computes with them.
//!
//! Blocks get one scale and random quants, so no value is ever rounded. The layouts are those of `ggml-common.h`
//! (`block_q4_0`, `block_q8_0`, `block_mxfp4`).

use std::io::{self, Write};

use baton_model::gguf::writer::WrittenType;
use half::f16;

/// Values in a block of every quantized type here.
const BLOCK: u64 = 32;

/// Blocks that are made at once: about a megabyte.
const BATCH: u64 = 32_768;

/// The content of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Content {
    /// Ones, as norms have.
    Ones,
    /// Small random values, as biases have.
    Bias,
    /// Random values of this standard deviation.
    Random(f32),
}

/// Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014). The same on every machine: nodes with
/// the same shape must have the same weights.
pub(super) struct SplitMix64(u64);

impl SplitMix64 {
    pub(super) fn new(seed: u64) -> Self {
        SplitMix64(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_mut(8) {
            word.copy_from_slice(&self.next().to_le_bytes()[..word.len()]);
        }
    }
}

/// Writes `n_values` of a tensor. Quantized types have whole blocks.
pub(super) fn write(
    kind: WrittenType,
    n_values: u64,
    content: Content,
    random: &mut SplitMix64,
    out: &mut dyn Write,
) -> io::Result<()> {
    match (kind, content) {
        (WrittenType::F32, content) => {
            floats(n_values, content, random, &mut |value| out.write_all(&value.to_le_bytes()))
        }
        (WrittenType::F16, content) => {
            floats(n_values, content, random, &mut |value| out.write_all(&f16::from_f32(value).to_le_bytes()))
        }
        (WrittenType::Q4_0, Content::Random(deviation)) => {
            let scale = f16::from_f32(deviation / Q4_0_DEVIATION).to_le_bytes();
            blocks(n_values, BlockForm { scale, n_quants: 16, quant: without_minus_8 }, random, out)
        }
        (WrittenType::Q8_0, Content::Random(deviation)) => {
            let scale = f16::from_f32(deviation / Q8_0_DEVIATION).to_le_bytes();
            blocks(n_values, BlockForm { scale, n_quants: 32, quant: without_minus_128 }, random, out)
        }
        (WrittenType::Mxfp4, Content::Random(deviation)) => {
            // E8M0: a power of two, 127 is one. 255 would be NaN.
            let exponent = (deviation / MXFP4_DEVIATION).log2().round() + 127.0;
            let scale = [exponent.clamp(1.0, 254.0) as u8];
            blocks(n_values, BlockForm { scale, n_quants: 16, quant: |byte| byte }, random, out)
        }
        (kind, content) => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{content:?} is not written as {kind:?}")))
        }
    }
}

fn floats(
    n_values: u64,
    content: Content,
    random: &mut SplitMix64,
    put: &mut dyn FnMut(f32) -> io::Result<()>,
) -> io::Result<()> {
    (0..n_values).try_for_each(|_| match content {
        Content::Ones => put(1.0),
        Content::Bias => put(0.1 * random.uniform()),
        // The variance of a uniform value in -1..1 is a third.
        Content::Random(deviation) => put(3.0f32.sqrt() * deviation * random.uniform()),
    })
}

/// A quantized type's block: a scale, and then `n_quants` random bytes, each passed through `quant`.
struct BlockForm<const N: usize, Q> {
    scale: [u8; N],
    n_quants: usize,
    quant: Q,
}

/// Writes whole blocks.
fn blocks<const N: usize>(
    n_values: u64,
    form: BlockForm<N, impl Fn(u8) -> u8>,
    random: &mut SplitMix64,
    out: &mut dyn Write,
) -> io::Result<()> {
    let BlockForm { scale, n_quants, quant } = form;
    let mut n_left = n_values / BLOCK;
    let block_bytes = N + n_quants;
    let mut batch = vec![0; BATCH.min(n_left) as usize * block_bytes];
    while n_left > 0 {
        let n = n_left.min(BATCH);
        let bytes = &mut batch[..n as usize * block_bytes];
        for block in bytes.chunks_exact_mut(block_bytes) {
            let (head, quants) = block.split_at_mut(N);
            head.copy_from_slice(&scale);
            random.fill(quants);
            quants.iter_mut().for_each(|byte| *byte = quant(*byte));
        }
        out.write_all(bytes)?;
        n_left -= n;
    }
    Ok(())
}

/// A nibble is a value plus 8. Values from -7 to 7 have no mean, which would grow from layer to layer; so nibble 0 becomes 8.
fn without_minus_8(byte: u8) -> u8 {
    let low = if byte & 0x0F == 0 { 0x08 } else { 0 };
    let high = if byte & 0xF0 == 0 { 0x80 } else { 0 };
    byte | low | high
}

/// The same for bytes: -128 becomes 0.
fn without_minus_128(byte: u8) -> u8 {
    if byte == 0x80 { 0 } else { byte }
}

/// Standard deviations of random quants of scale 1: of -7..=7 with 0 twice, of -127..=127 with 0 twice, and of E2M1's values
/// 0, 0.5, 1, 1.5, 2, 3, 4, 6 with both signs.
const Q4_0_DEVIATION: f32 = 4.183_3;
const Q8_0_DEVIATION: f32 = 73.467_6;
const MXFP4_DEVIATION: f32 = 2.926_2;

#[cfg(test)]
mod tests {
    use super::*;

    /// E2M1's values, doubled (`kvalues_fp4` in `ggml-common.h`).
    const E2M1: [f32; 16] = [0., 1., 2., 3., 4., 6., 8., 12., 0., -1., -2., -3., -4., -6., -8., -12.];

    fn half(bytes: &[u8]) -> f32 {
        f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
    }

    fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> + '_ {
        bytes.iter().flat_map(|byte| [byte & 15, byte >> 4])
    }

    /// The values of blocks, as `ggml-quants.c` dequantizes them, in another order.
    fn values(kind: WrittenType, bytes: &[u8]) -> Vec<f32> {
        match kind {
            WrittenType::Q4_0 => {
                let block = |b: &[u8]| nibbles(&b[2..]).map(|q| half(b) * (f32::from(q) - 8.0)).collect::<Vec<_>>();
                bytes.chunks_exact(18).flat_map(block).collect()
            }
            WrittenType::Q8_0 => {
                let block = |b: &[u8]| b[2..].iter().map(|&q| half(b) * f32::from(q as i8)).collect::<Vec<_>>();
                bytes.chunks_exact(34).flat_map(block).collect()
            }
            WrittenType::Mxfp4 => {
                let scale = |e: u8| 2.0f32.powi(i32::from(e) - 128);
                let block = |b: &[u8]| nibbles(&b[1..]).map(|q| scale(b[0]) * E2M1[usize::from(q)]).collect::<Vec<_>>();
                bytes.chunks_exact(17).flat_map(block).collect()
            }
            WrittenType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            WrittenType::F16 => bytes.chunks_exact(2).map(half).collect(),
        }
    }

    fn written(kind: WrittenType, n: u64, content: Content) -> Vec<f32> {
        let mut out = Vec::new();
        write(kind, n, content, &mut SplitMix64::new(7), &mut out).unwrap();
        values(kind, &out)
    }

    #[test]
    fn every_type_has_the_wanted_deviation_and_no_mean() {
        let n = 64 * BLOCK * 1000;
        for kind in [WrittenType::F32, WrittenType::F16, WrittenType::Q4_0, WrittenType::Q8_0, WrittenType::Mxfp4] {
            for deviation in [1.0f32, 1.0 / 64.0] {
                let values = written(kind, n, Content::Random(deviation));
                assert_eq!(values.len() as u64, n);
                let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n as f64;
                let square = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n as f64;
                let ratio = square.sqrt() / f64::from(deviation);
                // A power of two is off by half of one at most.
                let range = if kind == WrittenType::Mxfp4 { 0.70..1.42 } else { 0.99..1.01 };
                assert!(range.contains(&ratio), "{kind:?}: {ratio}");
                assert!(mean.abs() < 5e-3 * f64::from(deviation), "{kind:?}: {mean}");
            }
        }
    }

    #[test]
    fn norms_are_ones_and_are_not_quantized() {
        assert_eq!(written(WrittenType::F32, 3, Content::Ones), [1.0; 3]);
        assert!(written(WrittenType::F32, 100, Content::Bias).iter().all(|v| v.abs() <= 0.1));
        let refused = write(WrittenType::Q8_0, 32, Content::Ones, &mut SplitMix64::new(1), &mut Vec::new());
        assert!(refused.unwrap_err().to_string().contains("Q8_0"));
    }

    #[test]
    fn the_weights_are_the_same_everywhere() {
        let mut out = Vec::new();
        write(WrittenType::Q4_0, 32, Content::Random(1.0), &mut SplitMix64::new(0), &mut out).unwrap();
        // The first number of SplitMix64 with the seed 0 is 0xE220A8397B1DCDAF.
        assert_eq!(out[2..10], 0xE220_A839_7B1D_CDAF_u64.to_le_bytes().map(without_minus_8));
    }
}
