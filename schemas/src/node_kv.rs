//! The KV's identity in a node's description, under a name that only those read who know all of its layout.
//!
//! Nodes and endpoints of earlier versions take `kv` for rows of floats: they would ignore states, and refuse the whole
//! description for a quantized type. For them, a model with either has no KV to hand over.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::kv::messages::format_version;
use crate::node::KvIdentity;

/// The fields, of which at most one exists.
#[derive(Serialize, Deserialize)]
struct KvByVersion<K> {
    /// For a layout of version 1 of the wire format.
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    kv: Option<K>,
    /// For one of version 2.
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    kv_2: Option<K>,
}

fn none<K>() -> Option<K> {
    None
}

pub(crate) fn serialize<S: Serializer>(kv: &Option<KvIdentity>, serializer: S) -> Result<S::Ok, S::Error> {
    let is_of = |version| kv.as_ref().filter(|kv| format_version(&kv.layout) == version);
    KvByVersion { kv: is_of(1), kv_2: is_of(2) }.serialize(serializer)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<KvIdentity>, D::Error> {
    let KvByVersion { kv, kv_2 } = KvByVersion::deserialize(deserializer)?;
    Ok(kv_2.or(kv))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kv::{Dtype, Fingerprint, KvLayout, LayerShape, RopePairing, Rows, Section, StateKind, StateShape};

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Described {
        model: String,
        #[serde(flatten, with = "super")]
        kv: Option<KvIdentity>,
    }

    fn described(dtype: Dtype, states: Vec<StateShape>) -> Described {
        let rows = Rows { dtype, n_values: 32 };
        let sections = vec![Section {
            window: None,
            n_rot: [0; 2],
            tokens_per_row: 1,
            layers: vec![LayerShape { k: rows, v: None }],
        }];
        let layout = KvLayout { rope: RopePairing::None, sections, states };
        let fingerprint = Fingerprint { vocabulary: [1; 32], weights: [2; 32] };
        Described { model: "m".into(), kv: Some(KvIdentity::new(fingerprint, layout, vec![1], None, None)) }
    }

    #[test]
    fn earlier_versions_see_only_kv_that_they_can_hand_over() {
        let values = Rows { dtype: Dtype::F32, n_values: 5 };
        let states = vec![StateShape { kind: StateKind::Recurrence, values }];
        let cases = [
            (described(Dtype::F16, Vec::new()), "kv"),
            (described(Dtype::F16, states), "kv_2"),
            (described(Dtype::Q8_0, Vec::new()), "kv_2"),
        ];
        for (described, name) in cases {
            let json = serde_json::to_value(&described).unwrap();
            assert_eq!(json.as_object().unwrap().len(), 2);
            assert!(json[name].is_object(), "{json}");
            assert_eq!(serde_json::from_value::<Described>(json).unwrap(), described);
        }
        let nothing = serde_json::from_value::<Described>(json!({"model": "m", "kv": null})).unwrap();
        assert_eq!(nothing, Described { model: "m".into(), kv: None });
    }
}
