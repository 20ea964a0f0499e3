//! Values that several written options make together.

use std::path::PathBuf;

use baton_model::options::{CacheTypes, CpuTensors, LoraFile, RopeOptions, Speculation, parse_override};

use super::kind::EngineKind;
use super::table::{DECLARED, DeclaredOption, WrittenOptions};

impl WrittenOptions {
    /// Which engine runs the model.
    pub fn kind(&self) -> EngineKind {
        self.engine.unwrap_or_default()
    }

    /// The options that have a value.
    pub fn set(&self) -> impl Iterator<Item = &'static DeclaredOption> {
        DECLARED.iter().filter(|option| (option.field.is_set)(self))
    }

    /// The options that people may see: those of the configuration, and files and addresses only with `with_locations`.
    pub fn shown(&self, with_locations: bool) -> WrittenOptions {
        let mut shown = self.clone();
        let hidden = |option: &&DeclaredOption| option.is_flag_only() || option.shows_locations() && !with_locations;
        DECLARED.iter().filter(hidden).for_each(|option| (option.field.clear)(&mut shown));
        shown
    }

    /// The types of the KV cache.
    pub fn cache_types(&self) -> CacheTypes {
        CacheTypes { k: self.cache_type_k.unwrap_or_default(), v: self.cache_type_v.unwrap_or_default() }
    }

    /// The changes of the position embedding.
    pub fn rope(&self) -> RopeOptions {
        let number = |n: Option<f64>| n.map(|n| n as f32);
        RopeOptions {
            scaling: self.rope_scaling,
            freq_base: number(self.rope_freq_base),
            freq_scale: number(self.rope_freq_scale.or(self.rope_scale.map(|scale| 1.0 / scale))),
            yarn_orig_ctx: self.yarn_orig_ctx,
            yarn_ext_factor: number(self.yarn_ext_factor),
            yarn_attn_factor: number(self.yarn_attn_factor),
            yarn_beta_slow: number(self.yarn_beta_slow),
            yarn_beta_fast: number(self.yarn_beta_fast),
        }
    }

    /// The adapter, if there is one in the right form.
    pub fn lora_file(&self) -> Option<LoraFile> {
        let scaled = self.lora_scaled.as_deref().and_then(|scaled| LoraFile::parse_scaled(scaled).ok());
        self.lora.clone().map(LoraFile::unscaled).or(scaled)
    }

    /// The draft model, unless nothing is to be guessed.
    pub fn draft_file(&self) -> Option<PathBuf> {
        self.draft.clone().filter(|_| self.speculation != Some(Speculation::Off))
    }

    /// When tokens are guessed for a model with states.
    pub fn speculation_with_states(&self) -> Speculation {
        Speculation::of_states(self.speculation, self.draft.is_some())
    }

    /// Returns true if a model's own head may guess. A configured draft model guesses in its place, and workers show no hidden rows.
    pub fn may_use_head(&self) -> bool {
        self.speculation_with_states() == Speculation::Auto && self.draft.is_none() && self.workers.is_none()
    }

    /// Tensors that stay with the processor. An override in a wrong form is left out.
    pub fn cpu_tensors(&self) -> CpuTensors {
        let overrides = self.override_tensor.iter().flatten();
        CpuTensors {
            all_experts: self.cpu_moe.unwrap_or(false),
            n_expert_layers: self.n_cpu_moe.unwrap_or(0),
            patterns: overrides.filter_map(|text| parse_override(text).ok()).collect(),
        }
    }
}
