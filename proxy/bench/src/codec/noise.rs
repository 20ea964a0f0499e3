//! Noise on one tensor, to see what a layer's K or V contributes to predictions.

use baton_schemas::kv::{Chunk, Dtype, EXACT_POSITIONS, KvLayout, SectionRows};
use bytes::Bytes;
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// Adds `size` with a random sign to every value of tensor number `index` of a chunk that fits the layout.
pub(super) fn add(chunk: &Chunk, layout: &KvLayout, index: usize, size: f32, seed: u64) -> Chunk {
    let mut at = 0;
    let sections = chunk.sections.iter().zip(&layout.sections).map(|(section, shape)| {
        let layers = section.layers.iter().zip(&shape.layers).map(|(rows, shape)| {
            let mut changed = rows.clone();
            let exact = |bytes: usize| (EXACT_POSITIONS.saturating_sub(section.start) as usize) * bytes;
            if at == index {
                changed.k = noisy(&rows.k, exact(shape.k.bytes()), shape.k.dtype, size, seed);
            }
            at += 1;
            if let Some(v) = shape.v {
                if at == index {
                    changed.v = noisy(&rows.v, exact(v.bytes()), v.dtype, size, seed);
                }
                at += 1;
            }
            changed
        });
        SectionRows { start: section.start, layers: layers.collect() }
    });
    Chunk { p0: chunk.p0, p1: chunk.p1, sections: sections.collect() }
}

fn noisy(rows: &Bytes, n_exact: usize, dtype: Dtype, size: f32, seed: u64) -> Bytes {
    let mut random = StdRng::seed_from_u64(seed);
    let mut noise = || if random.random::<bool>() { size } else { -size };
    let mut out = rows.to_vec();
    let n_exact = n_exact.min(out.len());
    match dtype {
        Dtype::F32 => {
            for value in out[n_exact..].as_chunks_mut::<4>().0 {
                *value = (f32::from_le_bytes(*value) + noise()).to_le_bytes();
            }
        }
        Dtype::F16 => {
            for value in out[n_exact..].as_chunks_mut::<2>().0 {
                *value = f16::from_f32(f16::from_le_bytes(*value).to_f32() + noise()).to_le_bytes();
            }
        }
        Dtype::Bf16 => {
            for value in out[n_exact..].as_chunks_mut::<2>().0 {
                *value = bf16::from_f32(bf16::from_le_bytes(*value).to_f32() + noise()).to_le_bytes();
            }
        }
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use baton_schemas::kv::{LayerRows, LayerShape, RopePairing, Rows, Section};

    use super::*;

    #[test]
    fn noise_reaches_one_tensor_after_the_exact_positions() {
        let rows = Rows { dtype: Dtype::F16, n_values: 2 };
        let layers = vec![LayerShape { k: rows, v: Some(rows) }; 2];
        let layout = KvLayout { rope: RopePairing::None, sections: vec![Section { window: None, layers }] };
        let zeros = LayerRows { k: Bytes::from(vec![0; 24]), v: Bytes::from(vec![0; 24]) };
        let sections = vec![SectionRows { start: 0, layers: vec![zeros; 2] }];
        let chunk = Chunk { p0: 0, p1: 6, sections };
        let noisy = add(&chunk, &layout, 3, 0.5, 1);
        assert_eq!(noisy.check(&layout), Ok(()));
        let changed: Vec<bool> = noisy.tensors().map(|rows| rows.iter().any(|byte| *byte != 0)).collect();
        assert_eq!(changed, [false, false, false, true]);
        let rows = noisy.tensors().nth(3).unwrap();
        assert!(rows[..16].iter().all(|byte| *byte == 0), "positions 0 to 3 stay");
        let values = rows[16..].as_chunks::<2>().0.iter().map(|value| f16::from_le_bytes(*value).to_f32().abs());
        assert_eq!(values.collect::<Vec<_>>(), [0.5; 4]);
    }
}
