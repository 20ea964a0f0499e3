//! Tokens that `tokenizer.json` adds to the vocabulary, and their types.

use serde::Deserialize;

/// llama.cpp's numbers of types of tokens.
pub(super) const NORMAL: u32 = 1;
pub(super) const CONTROL: u32 = 3;
pub(super) const USER_DEFINED: u32 = 4;

#[derive(Deserialize)]
pub(super) struct AddedToken {
    pub(super) id: u64,
    pub(super) content: String,
    #[serde(default)]
    pub(super) special: bool,
}

/// Tokens of Gemma 4 that replies show, so that calls and thoughts are found in them.
const SHOWN: [&str; 7] =
    ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|\"|>"];

/// Gives added tokens the types that llama.cpp's converter gives those of Gemma 4 (`conversion/gemma.py`, `set_vocab`).
pub(super) fn retype(added: &[AddedToken], spellings: &mut [String], types: &mut [u32]) {
    for AddedToken { id, content, special } in added {
        let Some(id) = usize::try_from(*id).ok().filter(|id| *id < types.len()) else { continue };
        types[id] = match *special {
            _ if SHOWN.contains(&content.as_str()) => USER_DEFINED,
            true => CONTROL,
            false => NORMAL,
        };
        spellings[id].clone_from(content);
    }
}
