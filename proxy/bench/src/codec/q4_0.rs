//! What ggml's `q4_0` makes of rows: 32 values share a scale, and each has 4 bits. Only for comparison.

use baton_schemas::kv::{Chunk, Dtype, LayerRows, SectionRows};
use bytes::Bytes;
use half::f16;

/// Values that share a scale.
const BLOCK: usize = 32;

/// Bytes of values for each byte of `q4_0`: 64 for 18.
pub(super) const RATIO: f64 = 64.0 / 18.0;

/// The chunk after `q4_0`. Only F16 rows change.
pub(super) fn pass(chunk: &Chunk, dtypes: impl Iterator<Item = Dtype>) -> Chunk {
    let mut tensors = chunk.tensors().zip(dtypes).map(|(rows, dtype)| match dtype {
        Dtype::F16 => Bytes::from(rows.chunks(2 * BLOCK).flat_map(block).collect::<Vec<u8>>()),
        _ => rows.clone(),
    });
    let sections = chunk.sections.iter().map(|section| {
        let layers = section.layers.iter().map(|_| {
            let k = tensors.next().unwrap_or_default();
            LayerRows { k, v: tensors.next().unwrap_or_default() }
        });
        SectionRows { start: section.start, layers: layers.collect() }
    });
    Chunk { p0: chunk.p0, p1: chunk.p1, sections: sections.collect() }
}

fn block(bytes: &[u8]) -> Vec<u8> {
    let values = || bytes.as_chunks::<2>().0.iter().map(|pair| f16::from_le_bytes(*pair).to_f32());
    // ggml takes the value with the largest magnitude, with its sign, as -8.
    let extreme = values().fold(0.0f32, |a, b| if b.abs() > a.abs() { b } else { a });
    let scale = f16::from_f32(extreme / -8.0).to_f32();
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let rounded = values().map(|v| ((v * inverse + 8.5).floor().clamp(0.0, 15.0) - 8.0) * scale);
    rounded.flat_map(|v| f16::from_f32(v).to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_a_block_become_sixteen_levels() {
        let values: Vec<f32> = (0..32).map(|i| i as f32 / 4.0 - 4.0).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
        let passed = block(&bytes);
        let passed: Vec<f32> = passed.as_chunks::<2>().0.iter().map(|p| f16::from_le_bytes(*p).to_f32()).collect();
        // The scale is a half: -4 is -8 of them, and 3.75 would be 7.5.
        assert_eq!((passed[0], passed[16], passed[18], passed[31]), (-4.0, 0.0, 0.5, 3.5));
    }
}
