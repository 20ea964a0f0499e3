//! The options of an engine, as flags of `baton node` and `baton serve` and as keys of the configuration file.

pub mod workers;

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use baton_engines::registry::{EngineKind, EngineOptions};
use baton_engines::sim::{ABORT_VARIABLE, SimAbort, SimMachine};
use baton_model::limits;
use baton_model::options::{
    CacheType, CacheTypes, CpuTensors, FlashAttention, LoraFile, MAX_PATTERNS, RopeOptions, RopeScaling, SplitMode,
    parse_override,
};
use baton_schemas::kv::Codec;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use schemars::JsonSchema;
use serde::Deserialize;

/// Tokens per second that a simulator can be set to; a reply of one token an hour is a mistyped rate.
const SIM_RATES: RangeInclusive<f64> = 0.001..=1e9;

/// Distances beyond this are those of unrelated values; a RoPE order mistake scores 1.4.
const CANARY_DISTANCES: RangeInclusive<f64> = 0.0..=1.0;
const KV_DIVERGENCES: RangeInclusive<f64> = 0.0..=10.0;

/// A larger factor is mistyped: it would stretch a context of 8,192 tokens to 8 million.
const ROPE_SCALES: RangeInclusive<f64> = 0.001..=1000.0;

/// Models have 10,000 to 10 million; some scale contexts by it.
const ROPE_BASES: RangeInclusive<f64> = 1.0..=1e12;

/// YaRN mixes extrapolation and interpolation.
const YARN_MIXES: RangeInclusive<f64> = 0.0..=1.0;

/// YaRN's other factors. 0 would divide by zero.
const YARN_FACTORS: RangeInclusive<f64> = 0.001..=1000.0;

/// Engine options. Anything absent has the engine's own default.
#[derive(Debug, Clone, Default, PartialEq, Args, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EngineArgs {
    /// Which engine runs the model [default: llama, in a build that has it]
    #[arg(long, value_name = "KIND", value_parser = one_of(EngineKind::ALL, EngineKind::as_str, Some(EngineKind::about)))]
    pub engine: Option<EngineKind>,
    /// Sequences decoded together [default: 4]
    #[arg(long, value_name = "N", value_parser = whole_number)]
    pub slots: Option<u32>,
    /// Tokens one request may hold [default: the model's, as far as the memory allows, up to 131072]
    #[arg(long, value_name = "TOKENS", value_parser = whole_number)]
    pub ctx_size: Option<u32>,
    /// Tokens the KV cache holds for all slots together [default: 4096 a slot]
    #[arg(long, value_name = "TOKENS", value_parser = whole_number)]
    pub kv_cells: Option<u32>,
    /// Tokens of one physical compute batch [default: 512]
    #[arg(long, value_name = "TOKENS", value_parser = whole_number)]
    pub ubatch: Option<u32>,
    /// Compute threads [default: one per core]
    #[arg(long, value_name = "N", value_parser = whole_number)]
    pub threads: Option<u32>,
    /// Layers on the GPU [default: all]
    #[arg(long, value_name = "N", value_parser = whole_number)]
    pub gpu_layers: Option<u32>,
    /// The one device that computes, by its name in `baton doctor`, or cpu [default: every GPU there is]
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// Map the model's file into memory; false reads it whole, for a slow or a network disk [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub mmap: Option<bool>,
    /// The same as --mmap false
    #[arg(long, num_args = 0, default_missing_value = "true", conflicts_with = "mmap")]
    #[serde(skip)]
    pub no_mmap: Option<bool>,
    /// Lock the weights in memory, so that they are not swapped out [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub mlock: Option<bool>,
    /// The type of the KV cache's K. Quantized types take less memory and cannot be handed over [default: f16]
    #[arg(long, value_name = "TYPE", value_parser = one_of(CacheType::ALL, CacheType::as_str, None))]
    pub cache_type_k: Option<CacheType>,
    /// The type of the KV cache's V [default: f16]
    #[arg(long, value_name = "TYPE", value_parser = one_of(CacheType::ALL, CacheType::as_str, None))]
    pub cache_type_v: Option<CacheType>,
    /// How positions are scaled for a context longer than the model was trained for: none, linear, yarn [default: the model's]
    #[arg(long, value_name = "METHOD", value_parser = one_of(RopeScaling::ALL, RopeScaling::as_str, None))]
    pub rope_scaling: Option<RopeScaling>,
    /// The factor by which the context grows
    #[arg(long, value_name = "FACTOR", value_parser = number, allow_negative_numbers = true)]
    pub rope_scale: Option<f64>,
    /// RoPE's base frequency [default: the model's]
    #[arg(long, value_name = "N", value_parser = number, allow_negative_numbers = true)]
    pub rope_freq_base: Option<f64>,
    /// The inverse of --rope-scale
    #[arg(long, value_name = "N", value_parser = number, allow_negative_numbers = true, hide_short_help = true)]
    pub rope_freq_scale: Option<f64>,
    /// YaRN: the context that the model was trained for [default: the model's]
    #[arg(long, value_name = "TOKENS", value_parser = whole_number, hide_short_help = true)]
    pub yarn_orig_ctx: Option<u32>,
    /// YaRN: the extrapolation mix
    #[arg(long, value_name = "N", value_parser = number, allow_negative_numbers = true, hide_short_help = true)]
    pub yarn_ext_factor: Option<f64>,
    /// YaRN: the scale of attention
    #[arg(long, value_name = "N", value_parser = number, allow_negative_numbers = true, hide_short_help = true)]
    pub yarn_attn_factor: Option<f64>,
    /// YaRN: the high correction dimension
    #[arg(long, value_name = "N", value_parser = number, allow_negative_numbers = true, hide_short_help = true)]
    pub yarn_beta_slow: Option<f64>,
    /// YaRN: the low correction dimension
    #[arg(long, value_name = "N", value_parser = number, allow_negative_numbers = true, hide_short_help = true)]
    pub yarn_beta_fast: Option<f64>,
    /// A LoRA adapter, GGUF, applied to the model
    #[arg(long, value_name = "FILE", conflicts_with = "lora_scaled")]
    pub lora: Option<PathBuf>,
    /// A LoRA adapter and its scale
    #[arg(long, value_name = "FILE:SCALE")]
    pub lora_scaled: Option<String>,
    /// How the model is split among GPUs: none, layer, row [default: layer]
    #[arg(long, value_name = "MODE", value_parser = one_of(SplitMode::ALL, SplitMode::as_str, None))]
    pub split_mode: Option<SplitMode>,
    /// Compute the model's layers together with these workers: nodes with the role worker, or `local` for a process of
    /// this machine
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    pub workers: Option<Vec<String>>,
    /// With workers: a share of the layers for each worker, and a last one for this machine's GPUs if it has any, e.g.
    /// 3,1
    #[arg(long, value_name = "SHARES")]
    pub tensor_split: Option<String>,
    /// Keep the experts of all layers on the CPU
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub cpu_moe: Option<bool>,
    /// Keep the experts of the first N layers on the CPU
    #[arg(long, value_name = "N", value_parser = whole_number)]
    pub n_cpu_moe: Option<u32>,
    /// Keep tensors on the CPU whose names match a regular expression; CPU is the only buffer type
    #[arg(long, value_name = "PATTERN=CPU", value_delimiter = ',')]
    pub override_tensor: Option<Vec<String>>,
    /// Flash attention, which is always on: on or auto
    #[arg(long, value_name = "WHEN", value_parser = one_of(FlashAttention::ALL, FlashAttention::as_str, None), hide_short_help = true)]
    pub flash_attn: Option<FlashAttention>,
    /// Prompt tokens per step while streams run [default: what 100 ms allow]
    #[arg(long, value_name = "TOKENS", value_parser = whole_number)]
    pub prefill_budget: Option<u32>,
    /// Requests that may wait for a slot [default: 256]
    #[arg(long, value_name = "N", value_parser = whole_number)]
    pub max_queued: Option<u32>,
    /// Take KV of other weights of the same base model if it differs by at most this much (relative L2, e.g. 0.1)
    #[arg(long, value_name = "DISTANCE", value_parser = number)]
    pub max_canary_distance: Option<f64>,
    /// How KV may travel; each link gets the fastest of these by its measured rates. q8_0, kvq and kvq_fast are lossy [default: none,planes_zstd]
    #[arg(long, value_name = "CODECS", value_parser = one_of(Codec::ALL, Codec::as_str, Some(Codec::about)), value_delimiter = ',')]
    pub kv_codecs: Option<Vec<Codec>>,
    /// Use a lossy codec only if `baton calibrate-codec` measured at most this mean KL divergence of it, nats (e.g. 0.005)
    #[arg(long, value_name = "KL", value_parser = number)]
    pub max_kv_kl: Option<f64>,
    /// A Jinja chat template instead of the model's own
    #[arg(long, value_name = "FILE")]
    pub chat_template_file: Option<PathBuf>,
    /// The GGUF file of the model's projector, for images
    #[arg(long, value_name = "FILE")]
    pub mmproj: Option<PathBuf>,
    /// The Python that has mlx-lm, for the mlx engine [default: what `baton mlx install` installs]
    #[arg(long, value_name = "PATH")]
    pub mlx_python: Option<PathBuf>,
    /// Simulator: prompt tokens per second
    #[arg(long, value_name = "RATE", hide_short_help = true, value_parser = number)]
    pub sim_prefill_tps: Option<f64>,
    /// Simulator: tokens per second of one stream
    #[arg(long, value_name = "RATE", hide_short_help = true, value_parser = number)]
    pub sim_decode_tps: Option<f64>,
    /// Simulator: abort during this work on a text that contains TEXT, for tests
    #[arg(long, value_name = "WORK:TEXT", hide = true, env = ABORT_VARIABLE, value_parser = SimAbort::parse)]
    #[serde(skip)]
    pub sim_abort: Option<SimAbort>,
    /// Simulator: a machine whose speeds and link it has, for `baton demo --simulate`
    #[arg(long, value_name = "JSON", hide = true, value_parser = SimMachine::parse)]
    #[serde(skip)]
    pub sim_machine: Option<SimMachine>,
}

/// A value that is one of some words, each with a description for the long help.
fn one_of<T: Copy + Send + Sync + 'static, const N: usize>(
    all: [T; N],
    name: fn(T) -> &'static str,
    about: Option<fn(T) -> &'static str>,
) -> impl TypedValueParser<Value = T> {
    let values = all.map(|one| match about {
        Some(about) => PossibleValue::new(name(one)).help(about(one)),
        None => PossibleValue::new(name(one)),
    });
    let of_name = move |word: String| all.into_iter().find(|one| name(*one) == word);
    PossibleValuesParser::new(values).try_map(move |word| of_name(word).ok_or("unknown value"))
}

/// clap's own messages are those of Rust's parser: "invalid digit found in string".
fn whole_number(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("must be a whole number from 0 to {}", u32::MAX))
}

fn number(text: &str) -> Result<f64, &'static str> {
    text.parse().map_err(|_| "must be a number")
}

impl EngineArgs {
    /// Every option that is out of range: its key in the configuration file, and what is wrong with it.
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let numbers = [
            ("slots", self.slots, limits::SLOTS),
            ("ctx_size", self.ctx_size, limits::CONTEXT),
            ("kv_cells", self.kv_cells, limits::CONTEXT),
            ("ubatch", self.ubatch, limits::UBATCH),
            ("threads", self.threads, limits::THREADS),
            ("prefill_budget", self.prefill_budget, limits::UBATCH),
            ("max_queued", self.max_queued, limits::QUEUED),
            ("yarn_orig_ctx", self.yarn_orig_ctx, limits::CONTEXT),
            ("n_cpu_moe", self.n_cpu_moe, limits::LAYERS),
        ];
        let numbers = numbers.into_iter().filter_map(|(key, value, range)| {
            let wrong = value.filter(|value| !range.contains(value))?;
            Some((key, format!("must be between {} and {}, not {wrong}", range.start(), range.end())))
        });
        let fractions = [
            ("max_canary_distance", self.max_canary_distance, CANARY_DISTANCES),
            ("max_kv_kl", self.max_kv_kl, KV_DIVERGENCES),
            ("rope_scale", self.rope_scale, ROPE_SCALES),
            ("rope_freq_base", self.rope_freq_base, ROPE_BASES),
            ("rope_freq_scale", self.rope_freq_scale, ROPE_SCALES),
            ("yarn_ext_factor", self.yarn_ext_factor, YARN_MIXES),
            ("yarn_attn_factor", self.yarn_attn_factor, YARN_FACTORS),
            ("yarn_beta_slow", self.yarn_beta_slow, YARN_FACTORS),
            ("yarn_beta_fast", self.yarn_beta_fast, YARN_FACTORS),
            ("sim_prefill_tps", self.sim_prefill_tps, SIM_RATES),
            ("sim_decode_tps", self.sim_decode_tps, SIM_RATES),
        ];
        let fractions = fractions.into_iter().filter_map(|(key, value, range)| {
            let wrong = value.filter(|value| !range.contains(value))?;
            Some((key, format!("must be between {} and {}, not {wrong}", range.start(), range.end())))
        });
        let no_codec = self.kv_codecs.as_ref().filter(|codecs| codecs.is_empty());
        let no_codec = no_codec.map(|_| ("kv_codecs", "must name at least one codec".to_owned()));
        let no_flash = self.flash_attn.filter(|value| *value == FlashAttention::Off);
        let no_flash = no_flash.map(|_| ("flash_attn", FlashAttention::WHY_NOT_OFF.to_owned()));
        numbers
            .chain(fractions)
            .chain(no_codec)
            .chain(no_flash)
            .chain(self.rope_problem())
            .chain(self.lora_problem())
            .chain(self.placement_problems())
            .collect()
    }

    fn rope_problem(&self) -> Option<(&'static str, String)> {
        if self.rope_scale.is_some() && self.rope_freq_scale.is_some() {
            return Some(("rope_freq_scale", "must not be set with rope_scale, which is its inverse".to_owned()));
        }
        let scales = self.rope_scale.is_some() || self.rope_freq_scale.is_some();
        (scales && self.rope_scaling == Some(RopeScaling::None))
            .then(|| ("rope_scaling", "must not be none if a scale is set: it would have no effect".to_owned()))
    }

    fn placement_problems(&self) -> impl Iterator<Item = (&'static str, String)> {
        let overrides = self.override_tensor.as_deref().unwrap_or_default();
        let wrong = match overrides.len() {
            0..=MAX_PATTERNS => overrides.iter().find_map(|text| parse_override(text).err()),
            n => Some(format!("may have {MAX_PATTERNS} patterns, not {n}")),
        };
        wrong.map(|message| ("override_tensor", message)).into_iter().chain(self.worker_problem())
    }

    /// Tensors that stay on the CPU. Overrides in a wrong form are among [`EngineArgs::problems`].
    fn cpu_tensors(&self) -> CpuTensors {
        let overrides = self.override_tensor.iter().flatten();
        CpuTensors {
            all_experts: self.cpu_moe.unwrap_or(false),
            n_expert_layers: self.n_cpu_moe.unwrap_or(0),
            patterns: overrides.filter_map(|text| parse_override(text).ok()).collect(),
        }
    }

    fn lora_problem(&self) -> Option<(&'static str, String)> {
        match (&self.lora, &self.lora_scaled) {
            (Some(_), Some(_)) => {
                Some(("lora_scaled", "must not be set with lora: one adapter can be applied".to_owned()))
            }
            (None, Some(scaled)) => Some(("lora_scaled", LoraFile::parse_scaled(scaled).err()?)),
            _ => None,
        }
    }

    /// The adapter, if there is one. An adapter in the wrong form is one of [`EngineArgs::problems`].
    pub fn lora_file(&self) -> Option<LoraFile> {
        let scaled = self.lora_scaled.as_deref().and_then(|scaled| LoraFile::parse_scaled(scaled).ok());
        self.lora.clone().map(LoraFile::unscaled).or(scaled)
    }

    /// Takes the relative path of a scaled adapter from this folder.
    pub(super) fn resolve_scaled_lora(&mut self, folder: &Path) {
        let Some(scaled) = &mut self.lora_scaled else { return };
        if let Ok(file) = LoraFile::parse_scaled(scaled) {
            *scaled = LoraFile { path: folder.join(file.path), ..file }.to_scaled();
        }
    }

    /// The changes of the position embedding.
    fn rope(&self) -> RopeOptions {
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

    /// What is wrong with these options for an engine that takes part in handoffs: the option's key, and the message.
    pub fn handoff_problem(&self) -> Option<(&'static str, String)> {
        let types = [("cache_type_k", self.cache_type_k), ("cache_type_v", self.cache_type_v)];
        let (key, quantized) = types.into_iter().find(|(_, of)| of.is_some_and(CacheType::is_quantized))?;
        let name = quantized?.as_str();
        Some((
            key,
            format!(
                "must be f16, bf16 or f32 if prefill nodes are used, not {name}: a quantized cache cannot be handed over"
            ),
        ))
    }

    /// The types of the KV cache.
    pub fn cache_types(&self) -> CacheTypes {
        CacheTypes { k: self.cache_type_k.unwrap_or_default(), v: self.cache_type_v.unwrap_or_default() }
    }

    /// The options that are set, by their keys in the configuration file.
    pub fn keys(&self) -> Vec<String> {
        let flags = self.to_args().into_iter().step_by(2);
        flags.map(|flag| flag.to_string_lossy().trim_start_matches('-').replace('-', "_")).collect()
    }

    /// The same options as arguments for a child, each a flag and its value.
    pub fn to_args(&self) -> Vec<OsString> {
        let number = |n: Option<u32>| n.map(|n| n.to_string().into());
        let rate = |n: Option<f64>| n.map(|n| n.to_string().into());
        let flag = |value: Option<bool>| value.map(|value| value.to_string().into());
        let codecs =
            self.kv_codecs.as_ref().map(|codecs| codecs.iter().map(|c| c.as_str()).collect::<Vec<_>>().join(","));
        let overrides = self.override_tensor.as_ref().filter(|all| !all.is_empty());
        let options: [(&str, Option<OsString>); 42] = [
            ("--engine", self.engine.map(|kind| kind.as_str().into())),
            ("--slots", number(self.slots)),
            ("--ctx-size", number(self.ctx_size)),
            ("--kv-cells", number(self.kv_cells)),
            ("--ubatch", number(self.ubatch)),
            ("--threads", number(self.threads)),
            ("--gpu-layers", number(self.gpu_layers)),
            ("--device", self.device.as_ref().map(Into::into)),
            ("--mmap", flag(self.no_mmap.map(|no| !no).or(self.mmap))),
            ("--mlock", flag(self.mlock)),
            ("--cache-type-k", self.cache_type_k.map(|of| of.as_str().into())),
            ("--cache-type-v", self.cache_type_v.map(|of| of.as_str().into())),
            ("--rope-scaling", self.rope_scaling.map(|scaling| scaling.as_str().into())),
            ("--rope-scale", rate(self.rope_scale)),
            ("--rope-freq-base", rate(self.rope_freq_base)),
            ("--rope-freq-scale", rate(self.rope_freq_scale)),
            ("--yarn-orig-ctx", number(self.yarn_orig_ctx)),
            ("--yarn-ext-factor", rate(self.yarn_ext_factor)),
            ("--yarn-attn-factor", rate(self.yarn_attn_factor)),
            ("--yarn-beta-slow", rate(self.yarn_beta_slow)),
            ("--yarn-beta-fast", rate(self.yarn_beta_fast)),
            ("--lora", self.lora.clone().map(Into::into)),
            ("--lora-scaled", self.lora_scaled.clone().map(Into::into)),
            ("--split-mode", self.split_mode.map(|mode| mode.as_str().into())),
            ("--workers", self.workers.as_ref().filter(|all| !all.is_empty()).map(|all| all.join(",").into())),
            ("--tensor-split", self.tensor_split.clone().map(Into::into)),
            ("--cpu-moe", flag(self.cpu_moe)),
            ("--n-cpu-moe", number(self.n_cpu_moe)),
            ("--override-tensor", overrides.map(|all| all.join(",").into())),
            ("--flash-attn", self.flash_attn.map(|value| value.as_str().into())),
            ("--prefill-budget", number(self.prefill_budget)),
            ("--max-queued", number(self.max_queued)),
            ("--max-canary-distance", rate(self.max_canary_distance)),
            ("--kv-codecs", codecs.map(Into::into)),
            ("--max-kv-kl", rate(self.max_kv_kl)),
            ("--chat-template-file", self.chat_template_file.clone().map(Into::into)),
            ("--mmproj", self.mmproj.clone().map(Into::into)),
            ("--mlx-python", self.mlx_python.clone().map(Into::into)),
            ("--sim-prefill-tps", rate(self.sim_prefill_tps)),
            ("--sim-decode-tps", rate(self.sim_decode_tps)),
            ("--sim-abort", self.sim_abort.as_ref().map(|fault| fault.to_value().into())),
            ("--sim-machine", self.sim_machine.as_ref().map(|machine| machine.to_value().into())),
        ];
        options.into_iter().filter_map(|(name, value)| Some([name.into(), value?])).flatten().collect()
    }

    /// The engine's options. The caller finds the model's file and reads the chat template.
    pub fn into_options(
        self,
        model: Option<PathBuf>,
        name: Option<String>,
        chat_template: Option<String>,
    ) -> EngineOptions {
        let cache_types = self.cache_types();
        let rope = self.rope();
        let lora = self.lora_file();
        let cpu_tensors = self.cpu_tensors();
        let EngineArgs {
            engine,
            slots,
            ctx_size,
            kv_cells,
            ubatch,
            threads,
            gpu_layers,
            device,
            mmap,
            no_mmap,
            mlock,
            // They are in `cache_types`, `rope` and `lora_file`.
            cache_type_k: _,
            cache_type_v: _,
            rope_scaling: _,
            rope_scale: _,
            rope_freq_base: _,
            rope_freq_scale: _,
            yarn_orig_ctx: _,
            yarn_ext_factor: _,
            yarn_attn_factor: _,
            yarn_beta_slow: _,
            yarn_beta_fast: _,
            lora: _,
            lora_scaled: _,
            // They are in `cpu_tensors`.
            cpu_moe: _,
            n_cpu_moe: _,
            override_tensor: _,
            split_mode,
            // The caller connects to them and divides the layers.
            workers: _,
            tensor_split: _,
            // It is always on.
            flash_attn: _,
            prefill_budget,
            max_queued,
            // For the client that fetches KV.
            max_canary_distance: _,
            kv_codecs: _,
            max_kv_kl: _,
            // `chat_template` is its text.
            chat_template_file: _,
            mmproj,
            mlx_python,
            sim_prefill_tps,
            sim_decode_tps,
            sim_abort,
            sim_machine,
        } = self;
        EngineOptions {
            kind: engine.unwrap_or_default(),
            model,
            name,
            n_slots: slots,
            n_ctx: ctx_size,
            n_cells: kv_cells,
            n_ubatch: ubatch,
            n_threads: threads,
            n_gpu_layers: gpu_layers,
            device,
            mmap: no_mmap.map(|no| !no).or(mmap),
            mlock,
            cache_types,
            rope,
            lora,
            split_mode,
            cpu_tensors,
            prefill_budget,
            max_queued,
            chat_template,
            projector: mmproj,
            workers: Vec::new(),
            mlx_python,
            sim_prefill_tps,
            sim_decode_tps,
            sim_abort,
            sim_machine,
        }
    }
}

/// The message for an operator who names a model for an engine that runs none.
pub fn unused_model(is_named: bool, engine: &EngineArgs) -> Option<String> {
    let kind = engine.engine.filter(|kind| is_named && !kind.needs_file())?;
    Some(format!("the model that --model or source names is not used: the engine {} needs no file", kind.as_str()))
}

/// The flag of an option, by its key in the configuration file.
pub fn flag(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

#[cfg(test)]
mod tests;
