//! A byte-pair tokenizer with a token for each byte and hardly anything else.

use super::Draft;
use crate::file::Value;

/// All bytes, one merged pair, and the two control tokens.
pub(super) const N_VOCAB: usize = 256 + 1 + 2;

/// llama.cpp's numbers of token types.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;

pub(super) fn add(draft: &mut Draft) {
    let mut tokens: Vec<String> = (0..=255).map(|byte| printable(byte).to_string()).collect();
    // llama.cpp wants a list of merges.
    tokens.push("th".into());
    let mut types = vec![NORMAL; tokens.len()];
    for control in ["<|start|>", "<|end|>"] {
        tokens.push(control.into());
        types.push(CONTROL);
    }
    assert_eq!(tokens.len(), N_VOCAB);
    let end = N_VOCAB as u32 - 1;
    draft.set("tokenizer.ggml.model", Value::String("gpt2".into()));
    draft.set("tokenizer.ggml.pre", Value::String("gpt-2".into()));
    draft.set("tokenizer.ggml.tokens", Value::Array(tokens.into_iter().map(Value::String).collect()));
    draft.set("tokenizer.ggml.token_type", Value::Array(types.into_iter().map(Value::I32).collect()));
    draft.set("tokenizer.ggml.merges", Value::Array(vec![Value::String("t h".into())]));
    draft.set("tokenizer.ggml.bos_token_id", Value::U32(end - 1));
    draft.set("tokenizer.ggml.eos_token_id", Value::U32(end));
    draft.set("tokenizer.ggml.add_bos_token", Value::Bool(false));
}

/// GPT-2's name for a byte: itself where that can be printed, else the next free character from U+0100 on.
fn printable(byte: u8) -> char {
    let prints = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if prints(byte) {
        return byte.into();
    }
    let n_before = (0..byte).filter(|b| !prints(*b)).count() as u32;
    char::from_u32(0x100 + n_before).unwrap()
}
