//! The distance between two engines' KV of the same tokens: of the rows of each layer, and of the states of recurrent layers.
//!
//! Names and shapes do not show whether two files hold the same base model, or whether two engines order K's elements
//! in the same way. The values do: equal weights on different kernels differ by about 1e-4 of the values' norm, kernels
//! for 4-bit weights by 0.03 to 0.05, and another RoPE order by 1.4.

mod distances;
#[cfg(test)]
mod tests;

use baton_schemas::kv::{Chunk, Dtype, KvLayout, LayerNumbers, LayerRows, SectionRows, StatePart};
use bytes::Bytes;

pub use self::distances::{Farthest, KvDistances, KvTensor, TensorDistance};

/// The KV of some tokens, from position 0 on.
#[derive(Debug, Clone, Default)]
pub struct ComputedKv {
    /// The rows, in consecutive chunks, which may be cut anywhere.
    pub chunks: Vec<Chunk>,
    /// All states after the last token. `None`: the model has none, or they did not come.
    pub states: Option<StatePart>,
}

/// Compares every tensor of two engines' KV. Of layers with a sliding window, either may lack the first rows; those that both
/// have are compared, and without any the distance is infinite. `layers` names the layers.
///
/// `None`: the two cannot be compared. They hold different positions, do not fit the layout, or lack states that it has.
pub fn compare(
    layout: &KvLayout,
    layers: &LayerNumbers,
    ours: &ComputedKv,
    theirs: &ComputedKv,
) -> Option<KvDistances> {
    let (our_rows, their_rows) = joined(&ours.chunks).zip(joined(&theirs.chunks))?;
    let rows = rows(layout, layers, &our_rows, &their_rows)?;
    let end = our_rows.p1;
    let states = match layout.states.is_empty() {
        true => Vec::new(),
        false => states(layout, layers, end, (ours.states.as_ref()?, theirs.states.as_ref()?))?,
    };
    Some(KvDistances { rows, states })
}

/// The largest distance of any layer's rows. Infinite if there are none to compare.
pub fn distance_of_chunks(layout: &KvLayout, ours: &[Chunk], theirs: &[Chunk]) -> f64 {
    let both = joined(ours).zip(joined(theirs));
    let rows = both.and_then(|(ours, theirs)| rows(layout, &LayerNumbers::default(), &ours, &theirs));
    rows.and_then(|rows| distances::largest(&rows)).unwrap_or(f64::INFINITY)
}

/// `None`: the chunks hold different positions or do not fit the layout.
fn rows(layout: &KvLayout, layers: &LayerNumbers, ours: &Chunk, theirs: &Chunk) -> Option<Vec<TensorDistance>> {
    if ours.check(layout).is_err() || theirs.check(layout).is_err() || (ours.p0, ours.p1) != (theirs.p0, theirs.p1) {
        return None;
    }
    let p1 = ours.p1;
    let mut indexes = 0..;
    let mut found = Vec::new();
    for (s, (section, (ours, theirs))) in
        layout.sections.iter().zip(ours.sections.iter().zip(&theirs.sections)).enumerate()
    {
        let start = ours.start.max(theirs.start);
        let [n_ours, n_theirs] = [ours, theirs].map(|rows| (start - rows.start) as usize);
        // A canary may be too short for a row of many tokens. Its layer has other rows.
        let is_short = section.tokens_per_row > 1 && section.rows_of(start, p1).is_empty();
        for (l, (shape, (ours, theirs))) in
            section.layers.iter().zip(ours.layers.iter().zip(&theirs.layers)).enumerate()
        {
            let of_v = shape.v.map(|v| (KvTensor::V, v, &ours.v, &theirs.v));
            let tensors = [Some((KvTensor::K, shape.k, &ours.k, &theirs.k)), of_v];
            for (tensor, shape, ours, theirs) in tensors.into_iter().flatten() {
                let index = indexes.next().unwrap_or_default();
                if is_short {
                    continue;
                }
                let [ours, theirs] = [(ours, n_ours), (theirs, n_theirs)].map(|(rows, n)| &rows[n * shape.bytes()..]);
                let distance = relative_l2(shape.dtype, ours, theirs);
                found.push(TensorDistance { layer: layers.of_rows(s, l), index, tensor, distance });
            }
        }
    }
    Some(found)
}

/// `None`: they are not all states of the layout, or not those after `end` tokens.
fn states(
    layout: &KvLayout,
    layers: &LayerNumbers,
    end: u32,
    (ours, theirs): (&StatePart, &StatePart),
) -> Option<Vec<TensorDistance>> {
    let is_whole = |part: &StatePart| {
        (part.position, part.first, part.tensors.len()) == (end, 0, layout.states.len()) && part.check(layout).is_ok()
    };
    if !is_whole(ours) || !is_whole(theirs) {
        return None;
    }
    let pairs = layout.states.iter().zip(ours.tensors.iter().zip(&theirs.tensors)).enumerate();
    let distances = pairs.map(|(i, (shape, (ours, theirs)))| TensorDistance {
        layer: layers.of_state(i),
        index: i as u32,
        tensor: shape.kind.into(),
        distance: relative_l2(shape.values.dtype, ours, theirs),
    });
    Some(distances.collect())
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
