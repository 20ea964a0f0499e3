//! Recognises the rules by which `tokenizer.json` cuts a text into words.

use serde_json::Value as Json;

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The words of `o200k`, the vocabulary of gpt-oss. Nothing lies between two matches.
pub(super) const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// llama.cpp's name of the rules that cut a text into words. `None`: they are not known.
pub(super) fn pre(pre_tokenizer: &Json, ignore_merges: bool) -> Option<&'static str> {
    let stages: Vec<&Json> = match pre_tokenizer["type"].as_str()? {
        "Sequence" => pre_tokenizer["pretokenizers"].as_array()?.iter().collect(),
        _ => vec![pre_tokenizer],
    };
    let (bytes, before) = stages.split_last()?;
    if bytes["type"] != "ByteLevel" || bytes["add_prefix_space"] == true {
        return None;
    }
    // tokenizers' default.
    let cuts_like_gpt2 = bytes["use_regex"] != false;
    match before {
        [] if cuts_like_gpt2 && !ignore_merges => Some("gpt-2"),
        [digits] if cuts_like_gpt2 && !ignore_merges => {
            (digits["type"] == "Digits" && digits["individual_digits"] == true).then_some("smollm")
        }
        [split] if !cuts_like_gpt2 && split["type"] == "Split" => {
            let inverted = split["invert"] == true;
            // Matches are words, or what is between the words, which is nothing, goes.
            let is_plain = |pattern: &str| match split["behavior"].as_str() {
                Some("Isolated") => !inverted,
                Some("Removed") => inverted && pattern == O200K,
                _ => false,
            };
            match split["pattern"]["Regex"].as_str().filter(|pattern| is_plain(pattern))? {
                LLAMA3 if ignore_merges => Some("llama-bpe"),
                LLAMA3 => Some("dbrx"),
                QWEN2 if !ignore_merges => Some("qwen2"),
                QWEN35 if !ignore_merges => Some("qwen35"),
                // Files differ in `ignore_merges`. llama.cpp merges always, and its tokens are those that other nodes have.
                O200K => Some("gpt-4o"),
                _ => None,
            }
        }
        _ => None,
    }
}
