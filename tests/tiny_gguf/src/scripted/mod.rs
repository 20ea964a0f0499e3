//! Models that reply with a script, for tests of what happens to replies of a certain form.
//!
//! The last token of the prompt chooses the reply: each [`Reply`] names the token after which it is given. A chat template
//! is a part of the file, so it can end the prompt of each turn with another control token. The model then plays all turns
//! of an agent. After a prompt without a reply, the model ends the text at once.
//!
//! The weights make the most probable token certain, so the reply is the script at any temperature. Grammars apply as with
//! every model: where one forbids the scripted token, the script is lost.
//! The binary `scripted-gguf` writes them from JSON.

mod chain;
mod code;
mod weights;

use std::path::Path;

use serde::Deserialize;

use self::chain::Chain;
use crate::Draft;
use crate::file::Value;
use crate::tokenizer::{TokenType, add_byte_pairs, add_tokens};

/// A scripted model: its chat template and its replies. As JSON, it is the input of the binary `scripted-gguf`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    #[serde(default)]
    pub tokenizer: Tokenizer,
    /// The chat template.
    pub template: String,
    /// Control tokens. Their text is not part of a reply, except for those that mark calls or reasoning.
    #[serde(default)]
    pub control: Vec<String>,
    /// Tokens with text that prompts are searched for, such as Qwen's `<tool_call>`.
    #[serde(default)]
    pub user_defined: Vec<String>,
    /// The token that begins prompts.
    pub bos: Option<String>,
    /// The token that ends a reply.
    pub end: String,
    #[serde(default = "default_context_length")]
    pub context_length: u32,
    pub replies: Vec<Reply>,
}

fn default_context_length() -> u32 {
    131_072
}

/// The kind of vocabulary. All have a token for each byte, so every prompt can be tokenized.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tokenizer {
    /// GPT-2's kind, with llama.cpp's name for the rules that cut text into words.
    BytePairs { pre: String },
    /// Llama 2's and Gemma's kind.
    SentencePiece,
}

impl Default for Tokenizer {
    fn default() -> Self {
        Tokenizer::BytePairs { pre: "qwen2".to_owned() }
    }
}

/// One scripted reply.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reply {
    /// The last token of the prompt: a control token, which need not be in a list, or a byte such as `\n`.
    pub after: String,
    /// The tokens of the reply. A control or user-defined token is that token. Other text is a token that is used only
    /// once, even if the text occurs again: a byte has any number of tokens. Longer text has one token, so where it occurs
    /// again, its first byte is a token of its own.
    pub pieces: Vec<String>,
}

impl Reply {
    pub fn new<P: Into<String>>(after: &str, pieces: impl IntoIterator<Item = P>) -> Self {
        Reply { after: after.to_owned(), pieces: pieces.into_iter().map(Into::into).collect() }
    }
}

impl Script {
    /// Writes the model. Panics if the script cannot be played: then the message says what to change.
    pub fn write(&self, path: &Path) {
        let chain = Chain::of(self);
        let mut draft = Draft::new(0);
        draft.architecture = "llama";
        draft.set("general.architecture", Value::String("llama".into()));
        draft.set("general.name", Value::String("scripted".into()));
        match &self.tokenizer {
            Tokenizer::BytePairs { pre } => add_byte_pairs(&mut draft, pre, &chain.tokens),
            Tokenizer::SentencePiece => {
                draft.set("tokenizer.ggml.model", Value::String("llama".into()));
                draft.set("tokenizer.ggml.pre", Value::String("default".into()));
                add_tokens(&mut draft, &chain.tokens);
                draft.set("tokenizer.ggml.scores", Value::Array(vec![Value::F32(0.0); chain.tokens.len()]));
                draft.set("tokenizer.ggml.add_space_prefix", Value::Bool(false));
            }
        }
        for (key, spelling) in [("bos", self.bos.as_ref()), ("eos", Some(&self.end))] {
            let id = spelling.map(|spelling| chain.id_of(spelling) as u32);
            id.into_iter().for_each(|id| draft.set(&format!("tokenizer.ggml.{key}_token_id"), Value::U32(id)));
        }
        draft.set("tokenizer.ggml.add_bos_token", Value::Bool(false));
        draft.set("tokenizer.chat_template", Value::String(self.template.clone()));
        draft.numbers(&[("context_length", self.context_length)]);
        weights::add(&mut draft, &chain, chain.id_of(&self.end));
        draft.file.write(path);
    }

    /// The control tokens, including those that only [`Reply::after`] names.
    fn control_tokens(&self) -> impl Iterator<Item = (String, TokenType)> {
        let named = self.replies.iter().map(|reply| &reply.after).filter(|after| after.len() > 1);
        let all = self.control.iter().chain(&self.bos).chain([&self.end]).chain(named);
        all.map(|text| (text.clone(), TokenType::Control))
    }
}

/// Cuts a reply into pieces of `n_chars` characters, with these tokens whole.
pub fn cut(reply: &str, tokens: &[impl AsRef<str>], n_chars: usize) -> Vec<String> {
    let mut pieces: Vec<String> = Vec::new();
    let mut open = 0;
    let mut rest = reply;
    while let Some(first) = rest.chars().next() {
        if let Some(token) = tokens.iter().map(AsRef::as_ref).find(|token| rest.starts_with(token)) {
            pieces.push(token.to_owned());
            open = 0;
            rest = &rest[token.len()..];
            continue;
        }
        match pieces.last_mut() {
            Some(last) if open > 0 => last.push(first),
            _ => pieces.push(first.to_string()),
        }
        open = (open + 1) % n_chars;
        rest = &rest[first.len_utf8()..];
    }
    pieces
}
