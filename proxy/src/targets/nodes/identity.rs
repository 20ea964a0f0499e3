//! Decides whether two nodes run the same model, so that a sequence may start on one and continue on the other.

use baton_planner::reason::BarReason;
use baton_planner::snapshot::KvSize;
use baton_schemas::kv::{Fingerprint, KvLayout};
use baton_schemas::no_handoff::NoHandoffReason;
use baton_schemas::node::NodeInfo;

/// The properties of a model that determine a sequence's tokens. Names do not count: one file may have different names on
/// two machines, and two quantizations the same name.
#[derive(Debug, Clone)]
pub struct ModelIdentity {
    /// Hashes of vocabulary and weights, and the shape of the KV. Errors: why the model's KV is not handed over.
    kv: Result<(Fingerprint, KvLayout), NoHandoffReason>,
    /// Compared for models without KV to hand over.
    described: WeightsDescription,
}

#[derive(Debug, Clone)]
struct WeightsDescription {
    /// `None` from nodes of older versions.
    fingerprint: Option<Fingerprint>,
    facts: WeightsFacts,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct WeightsFacts {
    architecture: String,
    n_vocab: u32,
    n_params: u64,
    file_bytes: u64,
}

impl ModelIdentity {
    /// The identity of the model that a node runs.
    pub fn of(info: &NodeInfo) -> ModelIdentity {
        ModelIdentity {
            kv: match &info.kv {
                Some(kv) => Ok((kv.fingerprint, kv.layout.clone())),
                None => Err(info.no_handoff.unwrap_or_default()),
            },
            described: WeightsDescription {
                fingerprint: info.fingerprint,
                facts: WeightsFacts {
                    architecture: info.architecture.clone(),
                    n_vocab: info.n_vocab,
                    n_params: info.facts.n_params,
                    file_bytes: info.facts.file_bytes,
                },
            },
        }
    }

    /// Returns true if a sequence gets the same tokens on both.
    pub fn is_same(&self, other: &ModelIdentity) -> bool {
        match (&self.kv, &other.kv) {
            (Ok((one, _)), Ok((other, _))) => one == other,
            (Err(_), Err(_)) => self.described.is_same(&other.described),
            _ => false,
        }
    }

    /// Returns the reason why KV of `other` is not this model's: no KV can be handed over, or it has another vocabulary or
    /// shape. The node that imports the KV decides whether the weights are similar enough.
    pub fn bars_kv_of(&self, other: &ModelIdentity) -> Option<BarReason> {
        match (&self.kv, &other.kv) {
            (Ok((one, shape)), Ok((other, others))) => {
                (one.vocabulary != other.vocabulary || shape != others).then_some(BarReason::OtherModel)
            }
            (Err(reason), _) | (_, Err(reason)) if self.described.is_same(&other.described) => {
                Some(BarReason::NoHandoff(*reason))
            }
            _ => Some(BarReason::OtherModel),
        }
    }
}

/// What a handoff of a node's model moves. Errors: why its KV is not handed over.
pub(super) fn kv_size(info: &NodeInfo) -> Result<KvSize, NoHandoffReason> {
    let kv = info.kv.as_ref().ok_or(info.no_handoff.unwrap_or_default())?;
    let bytes_per_token = u32::try_from(kv.bytes_per_token()).map_err(|_| NoHandoffReason::KvNotDivisible)?;
    Ok(KvSize { bytes_per_token, state_bytes: kv.state_bytes() })
}

impl WeightsDescription {
    fn is_same(&self, other: &WeightsDescription) -> bool {
        let differ = matches!((self.fingerprint, other.fingerprint), (Some(one), Some(other)) if one != other);
        !differ && self.facts == other.facts
    }
}

#[cfg(test)]
mod tests {
    use baton_engines::sim::{SimConfig, SimEngine};
    use baton_link::Engine;

    use super::*;

    #[tokio::test]
    async fn what_a_handoff_moves_is_rows_and_states() {
        let config = SimConfig { kv_bytes_per_token: 512, state_bytes: 4_096, ..SimConfig::default() };
        let hybrid = SimEngine::new(config).info().await.unwrap();
        assert_eq!(kv_size(&hybrid), Ok(KvSize { bytes_per_token: 512, state_bytes: 4_096 }));
        let no_handoff = Some(NoHandoffReason::KvValueType);
        assert_eq!(kv_size(&NodeInfo { kv: None, no_handoff, ..hybrid }), Err(NoHandoffReason::KvValueType));
    }

    async fn info(model: &str, kv_bytes_per_token: u32) -> NodeInfo {
        let config = SimConfig { model: model.into(), kv_bytes_per_token, ..SimConfig::default() };
        SimEngine::new(config).info().await.unwrap()
    }

    #[tokio::test]
    async fn weights_make_a_model_and_names_do_not() {
        let one = info("a", 256).await;
        let mut renamed = info("a", 256).await;
        renamed.model = "another name".into();
        let other_weights = NodeInfo { model: "a".into(), ..info("b", 256).await };
        let [a, renamed, b] = [&one, &renamed, &other_weights].map(ModelIdentity::of);
        assert!(a.is_same(&renamed));
        assert!(!a.is_same(&b), "the same name on other weights");
        assert_eq!(a.bars_kv_of(&b), None, "their KV has the same shape: the canary decides");
        assert_eq!(a.bars_kv_of(&ModelIdentity::of(&info("a", 512).await)), Some(BarReason::OtherModel));
    }

    #[tokio::test]
    async fn a_model_without_kv_to_hand_over_is_known_by_what_it_says_of_itself() {
        let no_handoff = Some(NoHandoffReason::UnknownCache);
        let plain = NodeInfo { kv: None, no_handoff, ..info("a", 256).await };
        let larger = NodeInfo { n_vocab: plain.n_vocab + 1, ..plain.clone() };
        // The same file with an adapter, say.
        let changed = NodeInfo { fingerprint: info("b", 256).await.fingerprint, ..plain.clone() };
        let older = NodeInfo { fingerprint: None, no_handoff: None, ..plain.clone() };
        let [plain, larger, changed, older, handed] =
            [&plain, &larger, &changed, &older, &info("a", 256).await].map(ModelIdentity::of);
        assert!(plain.is_same(&older) && older.is_same(&plain) && !older.is_same(&larger), "a rolling upgrade");
        assert!(plain.is_same(&plain) && !plain.is_same(&larger) && !plain.is_same(&handed));
        assert!(!plain.is_same(&changed));
        assert_eq!(plain.bars_kv_of(&plain), Some(BarReason::NoHandoff(NoHandoffReason::UnknownCache)));
        let unexplained = Some(BarReason::NoHandoff(NoHandoffReason::KvNotDivisible));
        assert_eq!(older.bars_kv_of(&older), unexplained, "an older node does not say why");
        assert_eq!(plain.bars_kv_of(&larger), Some(BarReason::OtherModel));
    }
}
