//! Where a model's tensors lie: which of them stay on the CPU, and how the others are split among GPUs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a model is split among GPUs. llama.cpp's experimental `tensor` is not one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "lowercase")]
pub enum SplitMode {
    /// One GPU has the whole model.
    None,
    /// Each GPU has some layers.
    Layer,
    /// Each GPU has some rows of each tensor.
    Row,
}

impl SplitMode {
    pub const ALL: [SplitMode; 3] = [SplitMode::None, SplitMode::Layer, SplitMode::Row];

    /// The mode's name in options and configuration files.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Tensors that stay on the CPU, whatever `--gpu-layers` says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuTensors {
    /// The experts of all layers.
    pub all_experts: bool,
    /// The experts of the first layers.
    pub n_expert_layers: u32,
    /// Regular expressions, each found in a tensor's name.
    pub patterns: Vec<String>,
}

/// Longer patterns are no names of tensors, which have up to 64 bytes.
const MAX_PATTERN_BYTES: usize = 256;

/// More than a pattern for each tensor that a layer has.
pub const MAX_PATTERNS: usize = 64;

/// Reads `PATTERN=CPU`, the form of `--override-tensor`, and returns the pattern. Errors: what is wrong, to follow the
/// option's name.
pub fn parse_override(text: &str) -> Result<String, String> {
    let (pattern, buffer) =
        text.rsplit_once('=').ok_or_else(|| format!("must be PATTERN=CPU, e.g. exps=CPU, not {text:?}"))?;
    if !buffer.eq_ignore_ascii_case("cpu") {
        return Err(format!("can move tensors to CPU only, not to {buffer:?}: that is what llama-cpp-2 passes on"));
    }
    if pattern.is_empty() || pattern.len() > MAX_PATTERN_BYTES {
        return Err(format!("must have a pattern of 1 to {MAX_PATTERN_BYTES} bytes before =CPU"));
    }
    // A comma separates overrides. llama.cpp matches by ECMAScript's rules, which know none of the other groups and classes.
    let has_foreign =
        pattern.contains([',', '\0']) || pattern.replace("(?:", "").contains("(?") || pattern.contains(r"\p");
    if !pattern.is_ascii() || has_foreign {
        return Err(format!("must have a plain regular expression in ASCII, without commas and (?…), not {pattern:?}"));
    }
    Ok(pattern.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_override_names_a_pattern_and_the_processor() {
        assert_eq!(parse_override(r"blk\.(?:1|2)\.ffn_.*_exps=CPU").unwrap(), r"blk\.(?:1|2)\.ffn_.*_exps");
        assert_eq!(parse_override("exps=cpu").unwrap(), "exps");
        for (wrong, expected) in [
            ("exps", "PATTERN=CPU"),
            ("exps=CUDA0", "to CPU only, not to \"CUDA0\""),
            ("=CPU", "1 to 256 bytes"),
            ("a{1,2}=CPU", "without commas"),
            ("(?=a)=CPU", "without commas"),
            ("é=CPU", "ASCII"),
            (&format!("{}=CPU", "a".repeat(257)), "1 to 256 bytes"),
        ] {
            let error = parse_override(wrong).unwrap_err();
            assert!(error.contains(expected), "{wrong}: {error}");
        }
    }
}
