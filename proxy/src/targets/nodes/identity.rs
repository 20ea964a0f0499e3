//! Decides whether two nodes run the same model, so that a sequence may start on one and continue on the other.

use baton_planner::reason::BarReason;
use baton_planner::snapshot::KvSize;
use baton_schemas::kv::{Dtype, Fingerprint, KvLayout, RowTypes};
use baton_schemas::model_difference::ModelDifference;
use baton_schemas::no_handoff::NoHandoffReason;
use baton_schemas::node::NodeInfo;

/// The types of a cache for which the operator has chosen none.
const DEFAULT_TYPES: RowTypes = RowTypes { k: Dtype::F16, v: Some(Dtype::F16) };

/// The properties of a model that determine a sequence's tokens. Names do not count: one file may have different names on
/// two machines, and two quantizations the same name.
#[derive(Debug, Clone)]
pub struct ModelIdentity {
    /// Hashes of vocabulary and weights, and the shape of the KV. Errors: why the model's KV is not handed over.
    kv: Result<(Fingerprint, KvLayout), NoHandoffReason>,
    /// Compared for models without KV to hand over.
    described: WeightsDescription,
    cache_types: RowTypes,
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
            cache_types: info.cache_types.unwrap_or(DEFAULT_TYPES),
        }
    }

    /// Returns true if a sequence gets the same tokens on both.
    pub fn is_same(&self, other: &ModelIdentity) -> bool {
        self.difference(other).is_none()
    }

    /// Why a sequence does not get the same tokens on both; `None` if it does.
    pub fn difference(&self, other: &ModelIdentity) -> Option<ModelDifference> {
        let has_other_weights = match (&self.kv, &other.kv) {
            (Ok((one, _)), Ok((other, _))) => one != other,
            (Err(_), Err(_)) => !self.described.is_same(&other.described),
            _ => return Some(ModelDifference::OtherModel),
        };
        if has_other_weights {
            return Some(self.difference_of_weights(other));
        }
        let (ours, theirs) = (self.cache_types, other.cache_types);
        (ours != theirs).then_some(ModelDifference::OtherCacheTypes { ours, theirs })
    }

    /// Returns the reason why KV of `other` is not this model's: no KV can be handed over, or it has another vocabulary or
    /// form. The node that imports the KV decides whether the weights are similar enough.
    pub fn bars_kv_of(&self, other: &ModelIdentity) -> Option<BarReason> {
        match (&self.kv, &other.kv) {
            (Ok((one, form)), Ok((other, others))) => {
                ModelDifference::of_kv((one, form), (other, others)).map(BarReason::Differs)
            }
            (Err(reason), _) | (_, Err(reason)) => Some(match self.difference_of_weights(other) {
                ModelDifference::OtherModel => BarReason::Differs(ModelDifference::OtherModel),
                // The same weights would not be handed over, either.
                _ => BarReason::NoHandoff(*reason),
            }),
        }
    }

    /// Of two models with other weights: tells a changed model from another one.
    fn difference_of_weights(&self, other: &ModelIdentity) -> ModelDifference {
        let is_changed = match (&self.kv, &other.kv) {
            (Ok((one, form)), Ok((other, others))) => {
                ModelDifference::of_kv((one, form), (other, others)) != Some(ModelDifference::OtherModel)
            }
            _ => self.described.is_changed_in(&other.described),
        };
        if is_changed { ModelDifference::OtherWeights } else { ModelDifference::OtherModel }
    }
}

/// The reason why a decode node refuses the KV of a prefill node whose KV has its form; `None` if it takes it, or its canary
/// decides.
pub fn bars_handoff(prefill: &NodeInfo, decode: &NodeInfo) -> Option<BarReason> {
    let weights = |info: &NodeInfo| Some(info.kv.as_ref()?.fingerprint.weights);
    let has_other_weights = weights(prefill).zip(weights(decode)).is_some_and(|(theirs, ours)| theirs != ours);
    (has_other_weights && !decode.takes_other_weights).then_some(BarReason::Differs(ModelDifference::OtherWeights))
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

    /// Returns true if the other one is this model with other weights: another quantization, adapter or RoPE.
    fn is_changed_in(&self, other: &WeightsDescription) -> bool {
        let vocabularies = self.fingerprint.zip(other.fingerprint);
        let (one, other) = (&self.facts, &other.facts);
        (&one.architecture, one.n_vocab, one.n_params) == (&other.architecture, other.n_vocab, other.n_params)
            && vocabularies.is_none_or(|(one, other)| one.vocabulary == other.vocabulary)
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
        assert_eq!(a.difference(&b), Some(ModelDifference::OtherWeights), "the same name on other weights");
        assert_eq!(a.bars_kv_of(&b), None, "their KV has the same shape: the canary decides");
        let larger = ModelIdentity::of(&info("b", 512).await);
        let another = ModelDifference::OtherModel;
        assert_eq!((a.bars_kv_of(&larger), a.difference(&larger)), (Some(BarReason::Differs(another)), Some(another)));
    }

    #[tokio::test]
    async fn one_model_in_two_types_of_cache_is_told_by_the_types() {
        let plain = info("a", 256).await;
        let mut quantized =
            NodeInfo { cache_types: Some(RowTypes { k: Dtype::Q8_0, v: Some(Dtype::Q8_0) }), ..plain.clone() };
        for layer in quantized.kv.iter_mut().flat_map(|kv| &mut kv.layout.sections[0].layers) {
            layer.k.dtype = Dtype::Q8_0;
            layer.v.iter_mut().for_each(|v| v.dtype = Dtype::Q8_0);
        }
        let states_alone = |info: &NodeInfo| {
            let mut info = NodeInfo { cache_types: None, ..info.clone() };
            info.kv.iter_mut().for_each(|kv| kv.layout.sections.clear());
            info
        };
        let recurrent = [&plain, &quantized].map(|info| ModelIdentity::of(&states_alone(info)));
        let [plain, quantized] = [&plain, &quantized].map(ModelIdentity::of);
        let types = |difference: Option<ModelDifference>| difference.map(|difference| difference.to_string());
        let expected = "the KV cache is f16 here and q8_0 there: start both with the same --cache-type-k/v";
        assert_eq!(types(plain.difference(&quantized)).as_deref(), Some(expected));
        assert_eq!(plain.bars_kv_of(&quantized), plain.difference(&quantized).map(BarReason::Differs));
        assert_eq!((recurrent[0].difference(&recurrent[1]), recurrent[0].bars_kv_of(&recurrent[1])), (None, None));
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
        assert_eq!(plain.difference(&changed), Some(ModelDifference::OtherWeights));
        assert_eq!(plain.bars_kv_of(&plain), Some(BarReason::NoHandoff(NoHandoffReason::UnknownCache)));
        assert_eq!(plain.bars_kv_of(&changed), plain.bars_kv_of(&plain), "nor would the same weights help");
        let unexplained = Some(BarReason::NoHandoff(NoHandoffReason::KvNotDivisible));
        assert_eq!(older.bars_kv_of(&older), unexplained, "an older node does not say why");
        assert_eq!(plain.bars_kv_of(&larger), Some(BarReason::Differs(ModelDifference::OtherModel)));
    }
}
