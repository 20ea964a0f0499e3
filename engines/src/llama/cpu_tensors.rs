//! The patterns of the tensors that stay on the CPU, as llama.cpp takes them.

use std::ffi::CString;

use baton_model::gguf::Gguf;
use baton_model::options::CpuTensors;
use regex::RegexBuilder;

use crate::serving::LoadError;

/// llama-server's pattern for the tensors of experts.
const EXPERTS: &str = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps";

/// A compiled pattern may take this much memory.
const MAX_COMPILED_BYTES: usize = 1 << 20;

/// Patterns in llama.cpp's form. Errors: the model has no tensor that one of the options names.
pub(super) fn patterns(wanted: &CpuTensors, gguf: &Gguf) -> Result<Vec<CString>, LoadError> {
    let wants_experts = [(wanted.all_experts, "--cpu-moe"), (wanted.n_expert_layers > 0, "--n-cpu-moe")];
    for (_, option) in wants_experts.into_iter().filter(|(is_wanted, _)| *is_wanted) {
        if !has_match(EXPERTS, gguf)? {
            return Err(LoadError::Config(format!("{option} is for models with experts, and this one has none")));
        }
    }
    for pattern in &wanted.patterns {
        if !has_match(pattern, gguf)? {
            let message =
                format!("--override-tensor: the pattern {pattern:?} is in the name of no tensor of this model");
            return Err(LoadError::Config(message));
        }
    }
    let of_layers = (0..wanted.n_expert_layers).map(|layer| format!(r"blk\.{layer}{EXPERTS}"));
    let all = wanted.all_experts.then(|| EXPERTS.to_owned());
    let patterns = wanted.patterns.iter().cloned().chain(all).chain(of_layers);
    let no_text = |_| LoadError::Config("--override-tensor: a pattern has a zero byte".to_owned());
    patterns.map(|pattern| CString::new(pattern).map_err(no_text)).collect()
}

/// llama.cpp compiles the pattern itself; if it is malformed, llama.cpp only refuses to load the model.
fn has_match(pattern: &str, gguf: &Gguf) -> Result<bool, LoadError> {
    let compiled = RegexBuilder::new(pattern).size_limit(MAX_COMPILED_BYTES).build().map_err(|error| {
        // The last line of a syntax error says what is wrong.
        let why = error.to_string();
        let why = why.lines().last().unwrap_or_default().trim_start_matches("error: ");
        LoadError::Config(format!("--override-tensor: {pattern:?} is no regular expression: {why}"))
    })?;
    Ok(gguf.tensors.iter().any(|tensor| compiled.is_match(&tensor.name)))
}
