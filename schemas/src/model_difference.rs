//! In which part of their identity the models of two nodes differ, so that one cannot use the other's KV or continue its
//! sequences.

use std::fmt;

use crate::kv::{Dtype, Fingerprint, KvLayout, LayerShape, RopePairing, RowTypes};

/// The part of two models' identities that differs. The first one that matters: what is right behind it is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ModelDifference {
    /// The vocabulary, or the sizes of the KV.
    OtherModel,
    /// The weights, the RoPE options or the adapter. Vocabulary and sizes are equal.
    OtherWeights,
    /// The types in which the KV cache keeps its rows.
    OtherCacheTypes {
        /// The types of this node.
        ours: RowTypes,
        /// The types of the other node.
        theirs: RowTypes,
    },
    /// The order of K's elements, or with equal weights the sizes of the KV: other engines keep it in other forms.
    OtherKvForm,
}

impl ModelDifference {
    /// Why KV of the second model cannot be used by the first one; `None` if its form fits. Its weights may differ: the node
    /// that imports the KV decides whether they are similar enough.
    pub fn of_kv(ours: (&Fingerprint, &KvLayout), theirs: (&Fingerprint, &KvLayout)) -> Option<ModelDifference> {
        let ((one, form), (other, others)) = (ours, theirs);
        if one.vocabulary != other.vocabulary {
            return Some(ModelDifference::OtherModel);
        }
        if form == others {
            return None;
        }
        if sizes(form) != sizes(others) {
            let is_same_file = one.weights == other.weights;
            return Some(if is_same_file { ModelDifference::OtherKvForm } else { ModelDifference::OtherModel });
        }
        // Before rotations, which follow from the types.
        let types = types(form).zip(types(others)).find(|(ours, theirs)| ours != theirs);
        Some(
            types.map_or(ModelDifference::OtherKvForm, |(ours, theirs)| ModelDifference::OtherCacheTypes {
                ours,
                theirs,
            }),
        )
    }

    /// Returns true if the model is the same, and only its KV is kept in another way.
    pub fn is_of_the_cache(self) -> bool {
        match self {
            ModelDifference::OtherModel | ModelDifference::OtherWeights => false,
            ModelDifference::OtherCacheTypes { .. } | ModelDifference::OtherKvForm => true,
        }
    }

    /// The word for metrics, logs, headers and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl fmt::Display for ModelDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModelDifference::OtherModel => f.write_str("the models have other vocabularies or sizes"),
            ModelDifference::OtherWeights => f.write_str("the models have other weights"),
            ModelDifference::OtherCacheTypes { ours, theirs } => {
                write!(f, "the KV cache is {ours} here and {theirs} there: start both with the same --cache-type-k/v")
            }
            ModelDifference::OtherKvForm => f.write_str("the engines keep the KV in other forms"),
        }
    }
}

/// The layout without what is told apart from sizes: the types of rows, and the orders of their elements.
fn sizes(layout: &KvLayout) -> KvLayout {
    let mut sizes = KvLayout { rope: RopePairing::None, ..layout.clone() };
    for section in &mut sizes.sections {
        section.n_rot = [0; 2];
        for layer in &mut section.layers {
            layer.k.dtype = Dtype::F32;
            layer.v.iter_mut().for_each(|v| v.dtype = Dtype::F32);
        }
    }
    sizes
}

fn types(layout: &KvLayout) -> impl Iterator<Item = RowTypes> + '_ {
    layout.sections.iter().flat_map(|section| &section.layers).map(LayerShape::types)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{Rows, Section, StateKind, StateShape};

    fn model(weights: u8) -> Fingerprint {
        Fingerprint { vocabulary: [1; 32], weights: [weights; 32] }
    }

    fn layout(k: Dtype, v: Dtype, n_values: u32) -> KvLayout {
        let rows = |dtype| Rows { dtype, n_values };
        let layer = LayerShape { k: rows(k), v: Some(rows(v)) };
        // As llama.cpp does with quantized caches.
        let n_rot = if k.is_quantized() { [64; 2] } else { [0; 2] };
        let sections = vec![Section { window: None, tokens_per_row: 1, n_rot, layers: vec![layer; 2] }];
        KvLayout { rope: RopePairing::HalfSplit, sections, states: Vec::new() }
    }

    fn check(theirs: (Fingerprint, KvLayout), expected: Option<&str>) {
        let ours = layout(Dtype::F16, Dtype::F16, 64);
        let difference = ModelDifference::of_kv((&model(1), &ours), (&theirs.0, &theirs.1));
        assert_eq!(difference.map(|difference| difference.as_str()), expected, "{theirs:?}");
    }

    #[test]
    fn the_part_that_differs_is_named() {
        let plain = layout(Dtype::F16, Dtype::F16, 64);
        check((model(1), plain.clone()), None);
        check((model(2), plain.clone()), None);
        check((Fingerprint { vocabulary: [2; 32], ..model(1) }, plain.clone()), Some("other_model"));
        check((model(2), layout(Dtype::F16, Dtype::F16, 128)), Some("other_model"));
        check((model(1), layout(Dtype::F16, Dtype::F16, 128)), Some("other_kv_form"));
        check((model(1), KvLayout { rope: RopePairing::Interleaved, ..plain.clone() }), Some("other_kv_form"));
        for (k, v) in [(Dtype::Q8_0, Dtype::Q8_0), (Dtype::Q8_0, Dtype::F16), (Dtype::F16, Dtype::Q4_0)] {
            check((model(1), layout(k, v, 64)), Some("other_cache_types"));
        }
        let values = Rows { dtype: Dtype::F32, n_values: 8 };
        let states = vec![StateShape { kind: StateKind::Recurrence, values }];
        check((model(2), KvLayout { states, ..plain }), Some("other_model"));
    }

    #[test]
    fn cache_types_are_named_on_both_sides() {
        let types = |k, v| RowTypes { k, v };
        let difference = ModelDifference::OtherCacheTypes {
            ours: types(Dtype::Q8_0, Some(Dtype::Q4_0)),
            theirs: types(Dtype::F16, Some(Dtype::F16)),
        };
        let expected =
            "the KV cache is q8_0 (K) and q4_0 (V) here and f16 there: start both with the same --cache-type-k/v";
        assert_eq!(difference.to_string(), expected);
        assert_eq!(types(Dtype::Iq4Nl, None).to_string(), "iq4_nl");
        for dtype in Dtype::ALL {
            assert_eq!(serde_json::to_value(dtype).unwrap(), dtype.as_str());
        }
    }
}
