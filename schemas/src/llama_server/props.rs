//! `GET /props` and `GET /slots`.

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
    /// Sequences decoded together.
    pub total_slots: u32,
    /// The public name.
    pub model_alias: String,
    /// The public name too: no path leaves this server.
    pub model_path: String,
    /// The Jinja source in use; empty without one.
    pub chat_template: String,
    /// Empty without one.
    pub bos_token: String,
    /// Empty without one.
    pub eos_token: String,
    /// What can be sent beside text.
    pub modalities: Modalities,
    /// Which build answers.
    pub build_info: String,
    /// It is not in memory, and the next request loads it.
    pub is_sleeping: bool,
}

/// See [`Props::default_generation_settings`].
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct GenerationSettings {
    /// How tokens are drawn.
    pub params: Params,
    /// Tokens one sequence may hold.
    pub n_ctx: u32,
}

/// Sampling, with llama-server's names.
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
    /// −1: until the context ends.
    pub n_predict: i32,
}

/// See [`Props::modalities`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Modalities {
    /// Images.
    pub vision: bool,
    /// Sound.
    pub audio: bool,
}

impl Props {
    /// The properties of a model under its public name, with its own defaults.
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
    /// From 0.
    pub id: u32,
    /// Tokens it may hold.
    pub n_ctx: u32,
    /// Always false.
    pub speculative: bool,
    /// A sequence runs in it.
    pub is_processing: bool,
}

/// The slots of a node. It says how many are taken and not which: the first ones stand for them.
pub fn slots(info: &NodeInfo, load: &NodeLoad) -> Vec<SlotInfo> {
    let slot = |id| SlotInfo { id, n_ctx: info.n_ctx, speculative: false, is_processing: id < load.active_slots };
    (0..info.n_slots).map(slot).collect()
}
