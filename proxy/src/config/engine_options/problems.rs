//! What is wrong with an engine's options: values out of range, options that the engine does not have, and options that
//! exclude each other. Each problem is an option's key, and a message that completes `KEY …`.

use std::collections::HashSet;

use baton_engines::engine_options::{DECLARED, DeclaredOption, EngineKind, KvStoreOptions, WrittenOptions};
use baton_model::options::{FlashAttention, LoraFile, MAX_PATTERNS, RopeScaling, parse_override};

use super::super::hint;
use super::workers;

/// An option's key, and what is wrong with it.
type OptionProblem = (&'static str, String);

/// Every option that cannot be used.
pub fn problems(options: &WrittenOptions) -> Vec<OptionProblem> {
    let of_one = options.set().filter_map(|option| problem_of(option, options));
    let no_codec = options.kv_codecs.as_ref().filter(|codecs| codecs.is_empty());
    let no_codec = no_codec.map(|_| ("kv_codecs", "must name at least one codec".to_owned()));
    let no_flash = options.flash_attn.filter(|value| *value == FlashAttention::Off);
    let no_flash = no_flash.map(|_| ("flash_attn", FlashAttention::WHY_NOT_OFF.to_owned()));
    let machine = options.sim_machine.as_ref().and_then(|machine| machine.check().err());
    let machine = machine.map(|message| ("sim_machine", message.to_owned()));
    let all = of_one
        .chain(no_codec)
        .chain(no_flash)
        .chain(machine)
        .chain(rope_problem(options))
        .chain(lora_problem(options))
        .chain(override_problem(options))
        .chain(options.kv_store.as_ref().and_then(KvStoreOptions::problem))
        .chain(workers::problem(options));
    // One for each option: what the engine does not have is wrong anyway.
    let mut named = HashSet::new();
    all.filter(|(key, _)| named.insert(*key)).collect()
}

/// The problem of an option by itself.
fn problem_of(option: &DeclaredOption, options: &WrittenOptions) -> Option<OptionProblem> {
    let kind = options.kind();
    if !option.engines.contains(&kind) {
        return Some((option.key, not_had(option, kind)));
    }
    let range = option.range.as_ref()?;
    let wrong = (option.field.number)(options).filter(|number| !range.contains(number))?;
    Some((option.key, format!("must be between {} and {}, not {wrong}", range.start(), range.end())))
}

/// The message for an option that the engine does not have.
fn not_had(option: &DeclaredOption, kind: EngineKind) -> String {
    let engine = kind.as_str();
    let had = DECLARED.iter().filter(|other| other.engines.contains(&kind) && !other.is_flag_only());
    let near = hint::nearest(option.key, had.map(|other| other.key));
    let near = near.map(|near| format!("; did you mean {near:?}?")).unwrap_or_default();
    let owners = option.engines.iter().copied().filter(|owner| *owner != EngineKind::Sim || option.engines.len() == 1);
    let owners = owners.map(EngineKind::as_str).collect::<Vec<_>>().join(" and ");
    format!("is not an option of the engine {engine}, but of {owners}{near}")
}

fn rope_problem(options: &WrittenOptions) -> Option<OptionProblem> {
    if options.rope_scale.is_some() && options.rope_freq_scale.is_some() {
        return Some(("rope_freq_scale", "must not be set with rope_scale, which is its inverse".to_owned()));
    }
    let scales = options.rope_scale.is_some() || options.rope_freq_scale.is_some();
    (scales && options.rope_scaling == Some(RopeScaling::None))
        .then(|| ("rope_scaling", "must not be none if a scale is set: it would have no effect".to_owned()))
}

fn lora_problem(options: &WrittenOptions) -> Option<OptionProblem> {
    match (&options.lora, &options.lora_scaled) {
        (Some(_), Some(_)) => Some(("lora_scaled", "must not be set with lora: one adapter can be applied".to_owned())),
        (None, Some(scaled)) => Some(("lora_scaled", LoraFile::parse_scaled(scaled).err()?)),
        _ => None,
    }
}

fn override_problem(options: &WrittenOptions) -> Option<OptionProblem> {
    let overrides = options.override_tensor.as_deref().unwrap_or_default();
    let wrong = match overrides.len() {
        0..=MAX_PATTERNS => overrides.iter().find_map(|text| parse_override(text).err()),
        n => Some(format!("may have {MAX_PATTERNS} patterns, not {n}")),
    };
    Some(("override_tensor", wrong?))
}
