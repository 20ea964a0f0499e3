//! The distance between two engines' KV of the same tokens.
//!
//! Names and shapes do not show whether two files hold the same base model, or whether two engines order K's elements
//! in the same way. The values do: equal weights on different kernels differ by about 1e-4 of the values' norm, kernels
//! for 4-bit weights by 0.03 to 0.05, and another RoPE order by 1.4.

use baton_schemas::kv::{Chunk, Dtype, KvLayout, LayerRows, Rows, SectionRows, VerifiedState};
use bytes::Bytes;

/// The largest distance of any layer's K or V: relative L2, `‖theirs − ours‖ / ‖ours‖`. Of layers with a sliding window, either
/// may lack the first rows; those that both have are compared. Infinite if the chunks hold different positions or do not fit
/// the layout, if a layer has no row in both, or if the layout has no rows at all: states alone are not compared.
pub fn distance(layout: &KvLayout, ours: &Chunk, theirs: &Chunk) -> f64 {
    if layout.n_tensors() == 0 {
        return f64::INFINITY;
    }
    if ours.check(layout).is_err() || theirs.check(layout).is_err() || (ours.p0, ours.p1) != (theirs.p0, theirs.p1) {
        return f64::INFINITY;
    }
    let p1 = ours.p1;
    let sections = layout.sections.iter().zip(ours.sections.iter().zip(&theirs.sections));
    let distances = sections.flat_map(|(section, (ours, theirs))| {
        let start = ours.start.max(theirs.start);
        let [n_ours, n_theirs] = [ours, theirs].map(|rows| (start - rows.start) as usize);
        // A canary may be too short for a row of many tokens. Its layer has other rows.
        let is_short = section.tokens_per_row > 1 && section.rows_of(start, p1).is_empty();
        let layers = section.layers.iter().zip(ours.layers.iter().zip(&theirs.layers)).filter(move |_| !is_short);
        layers.flat_map(move |(shape, (ours, theirs))| {
            let tensor = move |shape: Rows, ours: &[u8], theirs: &[u8]| {
                relative_l2(shape.dtype, &ours[n_ours * shape.bytes()..], &theirs[n_theirs * shape.bytes()..])
            };
            let v = shape.v.map(|shape| tensor(shape, &ours.v, &theirs.v));
            [tensor(shape.k, &ours.k, &theirs.k), v.unwrap_or(0.0)]
        })
    });
    distances.fold(0.0, f64::max)
}

/// Like [`distance`], for rows in several consecutive chunks on both sides, which may be cut at different positions.
pub fn distance_of_chunks(layout: &KvLayout, ours: &[Chunk], theirs: &[Chunk]) -> f64 {
    joined(ours).zip(joined(theirs)).map_or(f64::INFINITY, |(ours, theirs)| distance(layout, &ours, &theirs))
}

/// The largest distance of any state. Infinite if they belong to different positions or layouts.
pub fn distance_of_states(ours: &VerifiedState, theirs: &VerifiedState) -> f64 {
    if (ours.position(), ours.layout()) != (theirs.position(), theirs.layout()) {
        return f64::INFINITY;
    }
    let pairs = ours.layout().states.iter().zip(ours.tensors().iter().zip(theirs.tensors()));
    pairs.map(|(shape, (ours, theirs))| relative_l2(shape.values.dtype, ours, theirs)).fold(0.0, f64::max)
}

/// Joins consecutive chunks. A section that lacks rows begins after the last ones that it lacks. `None` if there is a gap
/// between two chunks.
fn joined(parts: &[Chunk]) -> Option<Chunk> {
    let first = parts.first()?;
    let last = parts.last()?;
    let follow = parts.windows(2).all(|pair| pair[0].p1 == pair[1].p0);
    let n_sections = first.sections.len();
    if !follow || parts.iter().any(|part| part.sections.len() != n_sections) {
        return None;
    }
    let sections = (0..n_sections).map(|s| {
        let from = parts.iter().rposition(|part| part.sections[s].start > part.p0).unwrap_or(0);
        let parts = &parts[from..];
        let layers = (0..first.sections[s].layers.len()).map(|l| {
            let of = |rows: fn(&LayerRows) -> &Bytes| -> Option<Bytes> {
                let parts = parts.iter().map(|part| part.sections[s].layers.get(l).map(|layer| &rows(layer)[..]));
                Some(parts.collect::<Option<Vec<&[u8]>>>()?.concat().into())
            };
            Some(LayerRows { k: of(|layer| &layer.k)?, v: of(|layer| &layer.v)? })
        });
        Some(SectionRows { start: parts[0].sections[s].start, layers: layers.collect::<Option<_>>()? })
    });
    Some(Chunk { p0: first.p0, p1: last.p1, sections: sections.collect::<Option<_>>()? })
}

fn relative_l2(dtype: Dtype, ours: &[u8], theirs: &[u8]) -> f64 {
    if ours.len() != theirs.len() {
        return f64::INFINITY;
    }
    let mut difference = 0.0;
    let mut norm = 0.0;
    for (a, b) in dtype.values(ours).zip(dtype.values(theirs)) {
        let (a, b) = (f64::from(a), f64::from(b));
        difference += (b - a) * (b - a);
        norm += a * a;
    }
    match norm > 0.0 {
        true => (difference / norm).sqrt(),
        false if difference == 0.0 && !ours.is_empty() => 0.0,
        false => f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::kv::{LayerShape, RopePairing, Section};
    use half::f16;

    use super::*;

    fn chunk(values: &[f32]) -> (KvLayout, Chunk) {
        let rows = Rows { dtype: Dtype::F16, n_values: values.len() as u32 };
        let section = Section {
            window: None,
            n_rot: [0; 2],
            tokens_per_row: 1,
            layers: vec![LayerShape { k: rows, v: Some(rows) }],
        };
        let bytes: Bytes = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
        let layers = vec![LayerRows { k: bytes.clone(), v: bytes }];
        let chunk = Chunk { p0: 0, p1: 1, sections: vec![SectionRows { start: 0, layers }] };
        (KvLayout { rope: RopePairing::Interleaved, sections: vec![section], states: Vec::new() }, chunk)
    }

    #[test]
    fn equal_values_have_distance_zero_and_another_order_is_far() {
        let (layout, ours) = chunk(&[1.0, -2.0, 3.0, -4.0]);
        assert_eq!(distance(&layout, &ours, &ours), 0.0);
        let (_, close) = chunk(&[1.001, -2.0, 3.0, -4.0]);
        assert!(distance(&layout, &ours, &close) < 1e-3);
        let (_, reordered) = chunk(&[1.0, 3.0, -2.0, -4.0]);
        assert!(distance(&layout, &ours, &reordered) > 1.0);
        // In several chunks, as a busy node or one with small batches sends them.
        let second = Chunk { p0: 1, p1: 2, ..ours.clone() };
        let second = Chunk { sections: vec![SectionRows { start: 1, ..ours.sections[0].clone() }], ..second };
        let both = [ours.clone(), second.clone()];
        let joined = [joined(&both).unwrap()];
        assert_eq!(distance_of_chunks(&layout, &joined, &both), 0.0);
        assert_eq!(distance_of_chunks(&layout, &both, &[second, ours.clone()]), f64::INFINITY, "out of order");
        assert_eq!(distance_of_chunks(&layout, &both, &[]), f64::INFINITY);
        let (_, other_size) = chunk(&[1.0]);
        assert_eq!(distance(&layout, &ours, &other_size), f64::INFINITY);
    }

    #[test]
    fn quantized_rows_are_compared_by_their_values() {
        let rows = Rows { dtype: Dtype::Q8_0, n_values: 32 };
        let section =
            Section { window: None, n_rot: [32; 2], tokens_per_row: 1, layers: vec![LayerShape { k: rows, v: None }] };
        let layout = KvLayout { rope: RopePairing::HalfSplit, sections: vec![section], states: Vec::new() };
        let chunk = |scale: f32, first: u8| {
            let values = std::iter::once(first).chain(std::iter::repeat_n(4, 31));
            let block = f16::from_f32(scale).to_le_bytes().into_iter().chain(values);
            let layers = vec![LayerRows { k: block.collect(), v: Bytes::new() }];
            Chunk { p0: 0, p1: 1, sections: vec![SectionRows { start: 0, layers }] }
        };
        assert_eq!(distance(&layout, &chunk(0.5, 4), &chunk(0.25, 8)), (31.0f64 / 32.0).sqrt() / 2.0);
        assert_eq!(distance(&layout, &chunk(0.5, 4), &chunk(0.5, 4)), 0.0);
    }

    #[test]
    fn of_a_window_the_rows_are_compared_that_both_have() {
        let (mut layout, whole) = chunk(&[1.0, 2.0]);
        layout.sections[0].window = Some(2);
        let windowed = |p0: u32, start: u32, rows: &[[f32; 2]]| {
            let bytes: Bytes = rows.iter().flatten().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
            let section = SectionRows { start, layers: vec![LayerRows { k: bytes.clone(), v: bytes }] };
            Chunk { p0, p1: start + rows.len() as u32, sections: vec![section] }
        };
        let ours = [windowed(0, 0, &[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), windowed(3, 3, &[[7.0, 8.0]])];
        let theirs = [windowed(0, 1, &[[9.0, 9.0]]), windowed(2, 2, &[[5.0, 6.0], [7.0, 8.0]])];
        assert!(distance_of_chunks(&layout, &ours, &theirs) > 0.5, "position 1");
        let theirs = [windowed(0, 2, &[]), windowed(2, 2, &[[5.0, 6.0], [7.0, 8.0]])];
        assert_eq!(distance_of_chunks(&layout, &ours, &theirs), 0.0);
        let none = windowed(0, 1, &[]);
        assert_eq!(distance(&layout, &whole, &none), f64::INFINITY, "no row to compare");
        layout.sections[0].window = None;
        assert_eq!(distance_of_chunks(&layout, &ours, &theirs), f64::INFINITY);
    }
}
