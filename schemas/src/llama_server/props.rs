//! The replies to `GET /props` and `GET /slots`.

use schemars::JsonSchema;
use serde::Serialize;

use crate::node::{NodeInfo, NodeLoad};
use crate::sampling::Sampling;
use crate::sampling_fields::SamplingFields;

/// The reply to `GET /props`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Props {
    /// The defaults of a request.
    pub default_generation_settings: GenerationSettings,
    /// The number of slots.
    pub total_slots: u32,
    /// The model's public name.
    pub model_alias: String,
    /// The public name again: file paths are not shown to clients.
    pub model_path: String,
    /// The chat template in use, in Jinja; empty if there is none.
    pub chat_template: String,
    /// The spelling of the token that begins a prompt; empty if there is none.
    pub bos_token: String,
    /// The spelling of the token that ends a text; empty if there is none.
    pub eos_token: String,
    /// The kinds of input that the model accepts in addition to text.
    pub modalities: Modalities,
    /// The build that answers.
    pub build_info: String,
    /// The model is not in memory. The next request loads it.
    pub is_sleeping: bool,
}

/// The defaults of a request.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct GenerationSettings {
    /// How tokens are sampled.
    pub params: Params,
    /// Tokens that one sequence can hold.
    pub n_ctx: u32,
}

/// Sampling parameters, with llama-server's names.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[allow(missing_docs, reason = "the fields of `Sampling`")]
pub struct Params {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub repeat_last_n: i32,
    pub repeat_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// The most tokens in a reply; −1: until the context ends.
    pub n_predict: i32,
}

/// The kinds of input that a model accepts in addition to text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Modalities {
    /// Images.
    pub vision: bool,
    /// Sound.
    pub audio: bool,
}

impl Props {
    /// Describes a model under its public name, with its own sampling defaults.
    pub fn new(name: &str, info: &NodeInfo, defaults: &SamplingFields, build_info: &str) -> Self {
        let mut sampling = Sampling::default();
        defaults.apply(&mut sampling);
        let params = Params {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            repeat_last_n: sampling.repeat_last_n,
            repeat_penalty: sampling.repeat_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            n_predict: -1,
        };
        Props {
            default_generation_settings: GenerationSettings { params, n_ctx: info.n_ctx },
            total_slots: info.n_slots,
            model_alias: name.to_owned(),
            model_path: name.to_owned(),
            chat_template: info.facts.chat_template.clone(),
            bos_token: info.facts.bos_token.clone(),
            eos_token: info.facts.eos_token.clone(),
            modalities: Modalities { vision: info.projector.is_some(), audio: false },
            build_info: build_info.to_owned(),
            is_sleeping: false,
        }
    }
}

/// One slot in the reply to `GET /slots`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "Slot")]
pub struct SlotInfo {
    /// The slot's number, from 0.
    pub id: u32,
    /// Tokens that the slot can hold.
    pub n_ctx: u32,
    /// Always false.
    pub speculative: bool,
    /// A sequence runs in the slot.
    pub is_processing: bool,
}

/// Describes the slots of a node. A node reports only how many are in use, so the first ones are shown as in use.
pub fn slots(info: &NodeInfo, load: &NodeLoad) -> Vec<SlotInfo> {
    let slot = |id| SlotInfo { id, n_ctx: info.n_ctx, speculative: false, is_processing: id < load.active_slots };
    (0..info.n_slots).map(slot).collect()
}
