//! How much each channel of K matters: the mean square of what queries multiply it with.
//!
//! A query at a distance from a key meets it turned by that distance's angles. K is therefore looked at without its rotation, and
//! the energy is averaged over distances.

use std::collections::BTreeMap;

use baton_schemas::Token;
use baton_schemas::kv::{KeyRotation, KvLayout, RopePairing, SectionRotation};

use super::queries::{self, Queries};
use crate::engine_options::EngineOptions;
use crate::serving::LoadError;

/// Distances between a query and a key: equally many in each octave up to 1,024.
const N_DISTANCES: u32 = 41;
const DISTANCES_PER_OCTAVE: f64 = 4.0;

/// The least share of the mean energy that every channel gets: one that calibration never needed may matter to other text.
const LEAST: f64 = 1e-3;

/// Why energies cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum NoEnergy {
    #[error(transparent)]
    Load(#[from] LoadError),
    /// llama.cpp computes attention in a way that shows no queries, or only of some layers.
    #[error("llama.cpp showed the queries of {found} of {expected} layers")]
    Layers { expected: usize, found: usize },
    /// Heads of K that do not divide those of Q.
    #[error("layer {0} has queries that do not fit its keys")]
    Heads(usize),
}

/// Sums over the queries of one layer.
#[derive(Default)]
struct LayerSums {
    n_cells: u64,
    n_heads: usize,
    head_size: usize,
    /// `[n_heads][head_size]`: squares without the rotation.
    squares: Vec<f64>,
    /// `[n_heads][n_pairs]`: products of a pair's two elements.
    products: Vec<f64>,
}

/// The energy of each channel of K in every layer, in the layout's canonical order, without a unit. `n_cells` must be more than
/// the window of windowed layers and a batch.
pub fn measure(
    options: &EngineOptions,
    n_cells: u32,
    prompts: &[Vec<Token>],
    layout: &KvLayout,
    rotation: &KeyRotation,
) -> Result<Vec<Vec<f32>>, NoEnergy> {
    let mut layers: BTreeMap<usize, LayerSums> = BTreeMap::new();
    // A window's cache has fewer cells than the other.
    let full = layout.sections.iter().position(|section| section.window.is_none());
    let windowed = layout.sections.iter().position(|section| section.window.is_some());
    let section_of = |found: u64| match (full, windowed) {
        (Some(full), Some(windowed)) => Some(if found < u64::from(n_cells) { windowed } else { full }),
        (Some(only), None) | (None, Some(only)) => Some(only),
        (None, None) => None,
    };
    let mut misfit = None;
    let rotation_of = |section: Option<usize>| section.and_then(|section| rotation.sections.get(section)?.as_ref());
    queries::watch(options, n_cells, prompts, &mut |queries| {
        let rotation = rotation_of(section_of(queries.n_cells));
        // A panic in llama.cpp's callback would end the process, so what does not fit is noted.
        match rotation {
            Some(rotation) if rotation.head_size as usize != queries.head_size => misfit = Some(queries.layer),
            rotation => layers.entry(queries.layer).or_default().add(&queries, layout.rope, rotation),
        }
    })?;
    if let Some(layer) = misfit {
        return Err(NoEnergy::Heads(layer));
    }
    let expected = layout.sections.iter().map(|section| section.layers.len()).sum();
    let mut energies = Vec::new();
    for (index, section) in layout.sections.iter().enumerate() {
        let of_section = layers.iter().filter(|(_, sums)| section_of(sums.n_cells) == Some(index));
        let before = energies.len();
        for ((layer, sums), shape) in of_section.zip(&section.layers) {
            let rotation = rotation_of(Some(index));
            let energy = sums.energy(shape.k.n_values as usize, layout.rope, rotation, section.window);
            energies.push(energy.ok_or(NoEnergy::Heads(*layer))?);
        }
        if energies.len() - before != section.layers.len() {
            return Err(NoEnergy::Layers { expected, found: layers.len() });
        }
    }
    Ok(energies)
}

/// The indices of a pair's elements in a head.
fn pair(rope: RopePairing, n_pairs: usize, i: usize) -> (usize, usize) {
    match rope {
        RopePairing::Interleaved => (2 * i, 2 * i + 1),
        _ => (i, i + n_pairs),
    }
}

impl LayerSums {
    fn add(&mut self, queries: &Queries<'_>, rope: RopePairing, rotation: Option<&SectionRotation>) {
        let Queries { head_size, n_tokens, values, .. } = *queries;
        let frequencies = rotation.map_or(&[][..], |rotation| &rotation.frequencies);
        let n_pairs = frequencies.len();
        self.n_cells = queries.n_cells;
        self.head_size = head_size;
        self.n_heads = values.len() / (n_tokens * head_size);
        self.squares.resize(self.n_heads * head_size, 0.0);
        self.products.resize(self.n_heads * n_pairs, 0.0);
        let mut row = vec![0.0f64; head_size];
        for (i, query) in values.chunks_exact(head_size).enumerate() {
            let (head, position) = (i / n_tokens, f64::from(queries.p0) + (i % n_tokens) as f64);
            row.iter_mut().zip(query).for_each(|(to, from)| *to = f64::from(*from));
            let products = &mut self.products[head * n_pairs..(head + 1) * n_pairs];
            for (i, (frequency, product)) in frequencies.iter().zip(products).enumerate() {
                let (a, b) = pair(rope, n_pairs, i);
                let (sin, cos) = (frequency * position).sin_cos();
                (row[a], row[b]) = (row[a] * cos + row[b] * sin, row[b] * cos - row[a] * sin);
                *product += row[a] * row[b];
            }
            let squares = &mut self.squares[head * head_size..(head + 1) * head_size];
            squares.iter_mut().zip(&row).for_each(|(sum, value)| *sum += value * value);
        }
    }

    /// The energy of each of `n_values` channels of K. `None`: its heads do not fit.
    fn energy(
        &self,
        n_values: usize,
        rope: RopePairing,
        rotation: Option<&SectionRotation>,
        window: Option<u32>,
    ) -> Option<Vec<f32>> {
        let n_kv_heads = n_values.checked_div(self.head_size).filter(|n| *n > 0)?;
        let fits = n_values.is_multiple_of(self.head_size) && self.n_heads.is_multiple_of(n_kv_heads);
        if !fits || self.n_heads == 0 {
            return None;
        }
        let group = self.n_heads / n_kv_heads;
        let frequencies = rotation.map_or(&[][..], |rotation| &rotation.frequencies);
        let n_pairs = frequencies.len();
        let mut energies = Vec::with_capacity(n_values);
        for heads in (0..n_kv_heads).map(|kv_head| kv_head * group..(kv_head + 1) * group) {
            let sum =
                |sums: &[f64], width: usize, i: usize| heads.clone().map(|head| sums[head * width + i]).sum::<f64>();
            let mut energy: Vec<f64> = (0..self.head_size).map(|i| sum(&self.squares, self.head_size, i)).collect();
            for (i, frequency) in frequencies.iter().enumerate() {
                let (a, b) = pair(rope, n_pairs, i);
                let (aa, bb, ab) = (energy[a], energy[b], sum(&self.products, n_pairs, i));
                (energy[a], energy[b]) = over_distances(*frequency, window, (aa, bb, ab));
            }
            let mean = energy.iter().sum::<f64>() / energy.len() as f64;
            // All queries 0: every channel is as good as any other.
            let least = if mean > 0.0 { LEAST * mean } else { 1.0 };
            energies.extend(energy.iter().map(|energy| (energy + least) as f32));
        }
        Some(energies)
    }
}

/// The mean squares of a pair's two elements, turned by the angles of all distances.
fn over_distances(frequency: f64, window: Option<u32>, (aa, bb, ab): (f64, f64, f64)) -> (f64, f64) {
    let distances = (0..N_DISTANCES).map(|i| (f64::from(i) / DISTANCES_PER_OCTAVE).exp2());
    let reached = distances.filter(|distance| window.is_none_or(|window| *distance <= f64::from(window)));
    let mut n = 0.0;
    let (mut first, mut second) = (0.0, 0.0);
    for distance in reached {
        let (sin, cos) = (frequency * distance).sin_cos();
        first += cos * cos * aa + sin * sin * bb - 2.0 * sin * cos * ab;
        second += sin * sin * aa + cos * cos * bb + 2.0 * sin * cos * ab;
        n += 1.0;
    }
    (first / n, second / n)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A query (3, 1) without its rotation, of one head with one pair, seen at position 5.
    fn sums(rope: RopePairing, rotation: &SectionRotation) -> LayerSums {
        let (sin, cos) = (5.0 * rotation.frequencies[0]).sin_cos();
        let values = [3.0 * cos - sin, 3.0 * sin + cos].map(|value| value as f32);
        let queries = Queries { layer: 0, n_cells: 256, p0: 5, n_tokens: 1, head_size: 2, values: &values };
        let mut sums = LayerSums::default();
        sums.add(&queries, rope, Some(rotation));
        sums
    }

    #[test]
    fn slow_pairs_keep_their_energy_and_fast_ones_share_it() {
        for rope in [RopePairing::HalfSplit, RopePairing::Interleaved] {
            let slow = SectionRotation { head_size: 2, frequencies: vec![1e-9] };
            let energy = sums(rope, &slow).energy(2, rope, Some(&slow), None).unwrap();
            assert!((energy[0] - 9.005).abs() < 1e-3 && (energy[1] - 1.005).abs() < 1e-3, "{energy:?}");
            let fast = SectionRotation { head_size: 2, frequencies: vec![1.0] };
            let energy = sums(rope, &fast).energy(2, rope, Some(&fast), None).unwrap();
            assert!(energy.iter().all(|energy| (4.0..6.5).contains(energy)), "{energy:?}");
            assert!((energy.iter().sum::<f32>() - 10.01).abs() < 1e-3, "a rotation keeps the sum: {energy:?}");
        }
    }

    #[test]
    fn heads_that_do_not_fit_are_refused() {
        let slow = SectionRotation { head_size: 2, frequencies: vec![1e-9] };
        let sums = sums(RopePairing::HalfSplit, &slow);
        assert_eq!(sums.energy(4, RopePairing::HalfSplit, Some(&slow), None), None, "two heads of K for one of Q");
        assert_eq!(sums.energy(3, RopePairing::HalfSplit, Some(&slow), None), None);
        assert_eq!(sums.energy(0, RopePairing::HalfSplit, Some(&slow), None), None);
    }
}
