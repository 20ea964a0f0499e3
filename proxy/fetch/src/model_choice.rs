//! A model of a repository that could be fetched, and what its file's name tells.

/// A model that could be fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelChoice {
    /// As `baton pull` takes it.
    pub name: String,
    /// As its file's name says, such as `Q4_K_M`.
    pub quantization: Option<String>,
    /// Bytes of all its files; `None`: the hub does not say.
    pub n_bytes: Option<u64>,
    /// Its weights have 16 or 32 bits.
    pub is_unquantized: bool,
    /// It has the quantization that a pull chooses by itself.
    pub is_preferred: bool,
}

/// The choice among several matching files: the usual balance of size and quality.
pub(super) const PREFERRED_QUANTIZATION: &str = "Q4_K_M";

/// Types that are no quantizations.
const UNQUANTIZED: [&str; 3] = ["F16", "BF16", "F32"];

impl ModelChoice {
    /// A model by the path of its first file.
    pub(super) fn of_file(name: String, path: &str, n_bytes: Option<u64>) -> ModelChoice {
        let quantization = quantization_in(path);
        let is_one_of = |words: &[&str]| quantization.as_deref().is_some_and(|word| words.contains(&word));
        ModelChoice {
            is_unquantized: is_one_of(&UNQUANTIZED),
            is_preferred: is_one_of(&[PREFERRED_QUANTIZATION]),
            name,
            n_bytes,
            quantization,
        }
    }
}

/// The word of a file's name that names a quantization, in capitals.
pub fn quantization_in(path: &str) -> Option<String> {
    let name = path.rsplit('/').next()?.strip_suffix(".gguf")?.to_ascii_uppercase();
    let is_one = |word: &&str| {
        let digits = word.trim_start_matches('I').trim_start_matches('T').strip_prefix('Q');
        let is_quantized = digits.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
        is_quantized || *word == "MXFP4" || UNQUANTIZED.contains(word)
    };
    name.split(['-', '.']).rfind(is_one).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_name_tells_its_quantization() {
        for (path, expected) in [
            ("SmolLM2-135M-Instruct.Q4_1.gguf", Some("Q4_1")),
            ("gemma-3-270m-q4_k_m.gguf", Some("Q4_K_M")),
            ("q/Qwen3-30B-IQ2_XXS-00001-of-00002.gguf", Some("IQ2_XXS")),
            ("gpt-oss-20b-mxfp4.gguf", Some("MXFP4")),
            ("Qwen3-8B-F16.gguf", Some("F16")),
            ("Qwen3-8B.gguf", None),
            ("model.safetensors", None),
        ] {
            assert_eq!(quantization_in(path).as_deref(), expected, "{path}");
        }
    }
}
