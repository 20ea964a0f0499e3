//! How RoPE rotated K, so that a codec can undo it.
//!
//! RoPE turns each pair of a head's elements by an angle that grows with the position. Over many positions this gives
//! every channel the same spread and hides its mean. Without the rotation, channels differ and compress better.

use serde::{Deserialize, Serialize};

use super::layout::{KvLayout, RopePairing, Section};

/// The most elements of a head that a codec un-rotates.
pub const MAX_HEAD_SIZE: u32 = 1024;

/// The largest angle per position, radians. Models use at most 1.
const MAX_FREQUENCY: f64 = 7.0;

/// The rotation of K in every section of a layout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct KeyRotation {
    /// One for each section. `None`: K has no rotation, or one that cannot be undone.
    pub sections: Vec<Option<SectionRotation>>,
}

/// The rotation of K in all layers of a section.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SectionRotation {
    /// Elements of a KV head.
    pub head_size: u32,
    /// Radians per position of each pair, with all scaling. The first `2 · len` elements of a head are rotated, the
    /// others are not.
    pub frequencies: Vec<f64>,
}

/// Why a rotation does not fit its layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("K's rotation does not fit the KV layout: {0}")]
pub struct RotationError(pub String);

impl KeyRotation {
    /// Checks a peer's rotation against a checked layout.
    pub fn check(&self, layout: &KvLayout) -> Result<(), RotationError> {
        let wrong = |what: String| Err(RotationError(what));
        if self.sections.len() != layout.sections.len() {
            return wrong(format!("{} sections instead of {}", self.sections.len(), layout.sections.len()));
        }
        let is_paired = matches!(layout.rope, RopePairing::Interleaved | RopePairing::HalfSplit);
        for (rotation, section) in self.sections.iter().zip(&layout.sections) {
            let Some(rotation) = rotation else { continue };
            if !is_paired {
                return wrong(format!("a rotation of {:?} order", layout.rope));
            }
            rotation.check(section)?;
        }
        Ok(())
    }
}

impl SectionRotation {
    fn check(&self, section: &Section) -> Result<(), RotationError> {
        let wrong = |what: String| Err(RotationError(what));
        if section.tokens_per_row != 1 {
            return wrong(format!("rows of {} tokens each", section.tokens_per_row));
        }
        let Self { head_size, frequencies } = self;
        if *head_size == 0 || *head_size > MAX_HEAD_SIZE || 2 * frequencies.len() > *head_size as usize {
            return wrong(format!("{} pairs in heads of {head_size}", frequencies.len()));
        }
        if let Some(layer) = section.layers.iter().find(|layer| !layer.k.n_values.is_multiple_of(*head_size)) {
            return wrong(format!("rows of {} values in heads of {head_size}", layer.k.n_values));
        }
        match frequencies.iter().find(|f| !(0.0..=MAX_FREQUENCY).contains(*f)) {
            Some(frequency) => wrong(format!("a frequency of {frequency}")),
            None => Ok(()),
        }
    }
}

/// The cosine and the sine of every pair's angle, for consecutive positions. Reused from tensor to tensor.
#[derive(Default)]
pub(super) struct Angles {
    /// The section, the first position and the number of positions that the tables hold.
    holds: Option<(usize, u32, usize)>,
    n_pairs: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Angles {
    /// Fills the tables for `n` positions from `start`, unless they hold these.
    pub(super) fn prepare(&mut self, section: usize, rotation: &SectionRotation, start: u32, n: usize) {
        if self.holds == Some((section, start, n)) {
            return;
        }
        let n_pairs = rotation.frequencies.len();
        self.cos.clear();
        self.sin.clear();
        let angle = |position: u32| rotation.frequencies.iter().map(move |f| f64::from(position) * f);
        let mut now: Vec<(f64, f64)> = angle(start).map(f64::sin_cos).collect();
        let turn: Vec<(f64, f64)> = angle(1).map(f64::sin_cos).collect();
        for _ in 0..n {
            self.cos.extend(now.iter().map(|(_, cos)| *cos as f32));
            self.sin.extend(now.iter().map(|(sin, _)| *sin as f32));
            for ((sin, cos), (turn_sin, turn_cos)) in now.iter_mut().zip(&turn) {
                (*sin, *cos) = (*sin * turn_cos + *cos * turn_sin, *cos * turn_cos - *sin * turn_sin);
            }
        }
        self.n_pairs = n_pairs;
        self.holds = Some((section, start, n));
    }

    /// The cosines and sines of a row, of which the tables' first has the index 0.
    pub(super) fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let range = row * self.n_pairs..(row + 1) * self.n_pairs;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// Rotates whole heads by the angles of [`Angles::row`], or with `-1.0` as `sense` back.
pub(super) fn rotate(
    pairing: RopePairing,
    head_size: usize,
    values: &mut [f32],
    (cos, sin): (&[f32], &[f32]),
    sense: f32,
) {
    let n_pairs = cos.len();
    for head in values.chunks_exact_mut(head_size) {
        match pairing {
            RopePairing::Interleaved => {
                let pairs = head[..2 * n_pairs].as_chunks_mut::<2>().0;
                for ([a, b], (cos, sin)) in pairs.iter_mut().zip(cos.iter().zip(sin)) {
                    let sin = sin * sense;
                    (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
                }
            }
            RopePairing::HalfSplit => {
                let (first, second) = head[..2 * n_pairs].split_at_mut(n_pairs);
                for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
                    let sin = sin * sense;
                    (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
                }
            }
            RopePairing::None | RopePairing::MultiAxis => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::{Dtype, LayerShape, Rows};
    use super::*;

    fn layout(rope: RopePairing, n_values: u32) -> KvLayout {
        let rows = Rows { dtype: Dtype::F16, n_values };
        KvLayout {
            rope,
            sections: vec![Section {
                window: None,
                n_rot: [0; 2],
                tokens_per_row: 1,
                layers: vec![LayerShape { k: rows, v: None }],
            }],
            states: Vec::new(),
        }
    }

    fn rotation(head_size: u32, frequencies: &[f64]) -> KeyRotation {
        KeyRotation { sections: vec![Some(SectionRotation { head_size, frequencies: frequencies.to_vec() })] }
    }

    #[test]
    fn rotations_that_do_not_fit_are_refused() {
        let layout = |rope| layout(rope, 64);
        let pair = [1.0, 0.5];
        assert_eq!(rotation(32, &pair).check(&layout(RopePairing::Interleaved)), Ok(()));
        assert_eq!(KeyRotation { sections: vec![None] }.check(&layout(RopePairing::None)), Ok(()));
        assert!(rotation(32, &pair).check(&layout(RopePairing::None)).is_err());
        assert!(KeyRotation { sections: vec![] }.check(&layout(RopePairing::HalfSplit)).is_err());
        for (head_size, frequencies) in
            [(0, &pair[..]), (2048, &pair), (3, &pair), (48, &pair), (32, &[f64::NAN]), (32, &[-0.1]), (32, &[8.0])]
        {
            let refused = rotation(head_size, frequencies).check(&layout(RopePairing::HalfSplit));
            assert!(refused.is_err(), "{head_size} {frequencies:?}");
        }
    }

    #[test]
    fn a_rotation_back_undoes_a_rotation_at_every_position() {
        let frequencies: Vec<f64> = (0..6).map(|i| 0.3f64.powi(i)).collect();
        let rotation = SectionRotation { head_size: 16, frequencies };
        let mut angles = Angles::default();
        angles.prepare(0, &rotation, 100_000, 300);
        for pairing in [RopePairing::Interleaved, RopePairing::HalfSplit] {
            let values: Vec<f32> = (0..32).map(|i| i as f32 - 11.0).collect();
            let mut turned = values.clone();
            rotate(pairing, 16, &mut turned, angles.row(299), 1.0);
            // Position 100,299 by hand, of the second pair in the second head.
            let (i, j) = if pairing == RopePairing::Interleaved { (18, 19) } else { (17, 23) };
            let (sin, cos) = (100_299.0f64 * 0.3).sin_cos();
            let by_hand = f64::from(values[i]) * cos - f64::from(values[j]) * sin;
            assert!((f64::from(turned[i]) - by_hand).abs() < 1e-4, "{pairing:?}");
            assert_eq!(turned[12..16], values[12..16], "the rest of a head is not rotated");
            rotate(pairing, 16, &mut turned, angles.row(299), -1.0);
            assert!(turned.iter().zip(&values).all(|(a, b)| (a - b).abs() < 1e-4));
        }
    }
}
