//! A byte-pair tokenizer with a token for each byte and hardly anything else.

use baton_model::gguf::byte_level::spelled;

use super::Draft;
use crate::file::Value;

/// All bytes, one merged pair, and the two control tokens.
pub(super) const N_VOCAB: usize = 256 + 1 + 2;

/// llama.cpp's number of a type of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenType {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Byte = 6,
}

pub(super) fn add(draft: &mut Draft) {
    let mut tokens = byte_pair_tokens();
    tokens.extend(["<|start|>", "<|end|>"].map(|control| (control.to_owned(), TokenType::Control)));
    assert_eq!(tokens.len(), N_VOCAB);
    let end = N_VOCAB as u32 - 1;
    add_byte_pairs(draft, "gpt-2", &tokens);
    draft.set("tokenizer.ggml.bos_token_id", Value::U32(end - 1));
    draft.set("tokenizer.ggml.eos_token_id", Value::U32(end));
    draft.set("tokenizer.ggml.add_bos_token", Value::Bool(false));
}

/// Gemma 4's kind of vocabulary: tokens of characters, merged pairs, and of the bytes of all other characters.
#[cfg(feature = "llama")]
pub(super) fn add_ranked_pieces(draft: &mut Draft) {
    let control = ["<pad>", "<eos>", "<bos>", "<unk>"].map(|text| (text.to_owned(), TokenType::Control));
    let bytes = (0..=255).map(|byte: u8| (format!("<0x{byte:02X}>"), TokenType::Byte));
    let pieces = ["\u{2581}", "t", "h", "e", "a", "\n", "\n\n", "th", "\u{2581}th", "\u{2581}\u{2581}"];
    let pieces = pieces.map(|text| (text.to_owned(), TokenType::Normal));
    let shown = ("<|channel>".to_owned(), TokenType::UserDefined);
    let tokens: Vec<_> = control.into_iter().chain(bytes).chain(pieces).chain([shown]).collect();
    draft.set("tokenizer.ggml.model", Value::String("gemma4".into()));
    add_tokens(draft, &tokens);
    let merges = ["t h", "\u{2581} \u{2581}", "\u{2581} th", "\n \n"].map(|merge| Value::String(merge.into()));
    draft.set("tokenizer.ggml.merges", Value::Array(merges.into()));
    for (key, id) in [("padding", 0), ("eos", 1), ("bos", 2), ("unknown", 3)] {
        draft.set(&format!("tokenizer.ggml.{key}_token_id"), Value::U32(id));
    }
    draft.set("tokenizer.ggml.add_bos_token", Value::Bool(true));
    draft.set("tokenizer.ggml.add_space_prefix", Value::Bool(false));
}

/// The tokens of all bytes in their order, and the only merged pair, because llama.cpp requires a list of merges.
pub(super) fn byte_pair_tokens() -> Vec<(String, TokenType)> {
    let bytes = (0..=255).map(|byte| spelled(byte).to_string());
    bytes.chain(["th".to_owned()]).map(|text| (text, TokenType::Normal)).collect()
}

/// Writes a byte-pair vocabulary whose first tokens are [`byte_pair_tokens`]. `pre` names its rules for words.
pub(super) fn add_byte_pairs(draft: &mut Draft, pre: &str, tokens: &[(String, TokenType)]) {
    draft.set("tokenizer.ggml.model", Value::String("gpt2".into()));
    draft.set("tokenizer.ggml.pre", Value::String(pre.into()));
    add_tokens(draft, tokens);
    draft.set("tokenizer.ggml.merges", Value::Array(vec![Value::String("t h".into())]));
}

pub(super) fn add_tokens(draft: &mut Draft, tokens: &[(String, TokenType)]) {
    let (texts, types): (Vec<Value>, Vec<Value>) =
        tokens.iter().map(|(text, kind)| (Value::String(text.clone()), Value::I32(*kind as i32))).unzip();
    draft.set("tokenizer.ggml.tokens", Value::Array(texts));
    draft.set("tokenizer.ggml.token_type", Value::Array(types));
}
