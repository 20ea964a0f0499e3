//! Tokenizes text as llama.cpp does, in bounded time and memory.
//!
//! For many vocabularies llama.cpp cuts text into words with a regular expression that it matches by recursion. A word
//! of some thousand characters, as in base64 or minified code, overflows the stack and ends the process. A text with
//! such a word is therefore tokenized here, with the same tokens as a result. All other texts go to llama.cpp, after
//! special tokens are cut out of them.

#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use aho_corasick::AhoCorasick;
use baton_model::gguf::Gguf;
use baton_model::vocabulary::byte_pairs::BytePairs;
use baton_model::vocabulary::pre::{PreTokenizer, Stages};
use baton_model::vocabulary::special::{Fragment, SpecialSpelling, SpecialSpellings};
use baton_model::vocabulary::{SHOWN_CONTROL, TextTokenizer, caller_has_gone, cut_spellings};
use baton_schemas::{EngineError, Token};
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token_type::LlamaTokenAttr;
use tokio_util::sync::CancellationToken;

use super::vocabulary::{self, token};
use crate::serving::{LoadError, on_deep_stack};

/// The longest text, and the longest word, that llama.cpp gets on an ordinary thread, bytes. It needs up to 1 KiB of
/// stack for each character, and threads have 2 MiB.
const MAX_SHALLOW_BYTES: usize = 1000;

/// Stack for each byte of a text.
const STACK_BYTES: usize = 1500;

/// The longest text that llama.cpp tokenizes on a deep stack, bytes. The stack takes memory only where it is used.
const MAX_DEEP_BYTES: usize = 256 << 10;

/// A model's tokenizer. Blocking: a megabyte takes up to a second.
pub(super) struct LlamaTokenizer {
    model: Arc<LlamaModel>,
    special: SpecialSpellings,
    /// Finds control tokens that llama.cpp reads in any text.
    shown_control: AhoCorasick,
    long_words: LongWords,
    /// The tokens that llama.cpp adds before a text, if it is asked to.
    before: Vec<Token>,
    /// The tokens that llama.cpp adds after a text, if it is asked to.
    after: Vec<Token>,
}

/// How texts with long words are tokenized.
enum LongWords {
    /// By llama.cpp.
    Native,
    /// By Baton.
    BytePairs(Box<BytePairs>),
    /// By llama.cpp, on a thread with a deep stack. The lock keeps to one text at a time, since a deep stack takes up to
    /// 400 MB.
    DeepStack(Mutex<()>),
}

impl LlamaTokenizer {
    /// Prepares the tokenizer of a model that was loaded from the file at `path`. Blocking: up to a second. Errors: the
    /// special tokens cannot be searched for.
    pub(super) fn new(model: Arc<LlamaModel>, gguf: &Gguf, path: &Path) -> Result<Self, LoadError> {
        let spellings = spellings(&model);
        let failed = |e| LoadError::Config(format!("the special tokens cannot be searched for: {e}"));
        let special = SpecialSpellings::new(special(&model, &spellings)).map_err(failed)?;
        let shown_control = SHOWN_CONTROL.iter().filter(|shown| spellings.iter().any(|known| known == *shown));
        let shown_control = AhoCorasick::new(shown_control).map_err(failed)?;
        let long_words = LongWords::of(&model, &spellings, gguf, path);
        let [plain, whole] = [false, true].map(|add_special| vocabulary::tokenize(&model, SAMPLE, add_special, false));
        let at = whole.windows(plain.len().max(1)).position(|tokens| tokens == plain).unwrap_or(0);
        let before = whole[..at].to_vec();
        let after = whole.get(at + plain.len()..).unwrap_or_default().to_vec();
        Ok(LlamaTokenizer { model, special, shown_control, long_words, before, after })
    }
}

impl TextTokenizer for LlamaTokenizer {
    fn tokenize(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
        is_abandoned: &CancellationToken,
    ) -> Result<Vec<Token>, EngineError> {
        if text.len() <= MAX_SHALLOW_BYTES {
            return Ok(vocabulary::tokenize(&self.model, text, add_special, parse_special));
        }
        let mut tokens = if add_special { self.before.clone() } else { Vec::new() };
        for fragment in self.special.cut(text, parse_special, is_abandoned)? {
            if is_abandoned.is_cancelled() {
                return Err(caller_has_gone());
            }
            match fragment {
                Fragment::Special(special) => tokens.push(special),
                Fragment::Text(text) => tokens.extend(self.long_words.tokenize(&self.model, text, is_abandoned)?),
            }
        }
        if add_special {
            tokens.extend(&self.after);
        }
        Ok(tokens)
    }

    fn tokenize_plain(&self, text: &str, is_abandoned: &CancellationToken) -> Result<Vec<Token>, EngineError> {
        cut_spellings(text, &self.shown_control, is_abandoned, |part| self.tokenize(part, false, false, is_abandoned))
    }
}

/// The tokens that llama.cpp cuts out of texts, of all tokens with these spellings.
fn special<'v>(model: &'v LlamaModel, spellings: &'v [String]) -> impl Iterator<Item = SpecialSpelling<'v>> {
    let vocab = model.vocab();
    (0..).zip(spellings).filter_map(move |(id, spelling)| {
        let attr = vocab.attr(token(id));
        let is_control = attr.intersects(LlamaTokenAttr::Control | LlamaTokenAttr::Unknown);
        (is_control || attr.contains(LlamaTokenAttr::UserDefined)).then(|| SpecialSpelling {
            token: id,
            spelling,
            is_control,
            strips_left: attr.contains(LlamaTokenAttr::LStrip),
            strips_right: attr.contains(LlamaTokenAttr::RStrip),
        })
    })
}

/// The vocabularies of byte pairs, by their names in `tokenizer.ggml.model`. llama.cpp cuts their texts into words with
/// regular expressions.
const BYTE_PAIR_VOCABULARIES: [&str; 4] = ["gpt2", "gemma4", "hybriddna", "whitespace"];

impl LongWords {
    fn of(model: &LlamaModel, spellings: &[String], gguf: &Gguf, path: &Path) -> Self {
        if !gguf.str("tokenizer.ggml.model").is_some_and(|name| BYTE_PAIR_VOCABULARIES.contains(&name)) {
            return LongWords::Native;
        }
        let pre = gguf.str("tokenizer.ggml.pre").filter(|name| !name.is_empty());
        let problem = match PreTokenizer::named(pre) {
            Ok(PreTokenizer::Loop(_)) => return LongWords::Native,
            Ok(PreTokenizer::Recursive(stages)) => match byte_pairs(model, spellings, stages, path) {
                Ok(pairs) => return LongWords::BytePairs(Box::new(pairs)),
                Err(problem) => problem,
            },
            Ok(PreTokenizer::Unknown) => "Baton does not know its words".to_owned(),
            Err(error) => error.to_string(),
        };
        tracing::warn!(
            pre,
            problem,
            "texts of more than {MAX_DEEP_BYTES} bytes are refused, because this vocabulary is read by llama.cpp's recursion"
        );
        LongWords::DeepStack(Mutex::default())
    }

    /// Tokenizes a text without special tokens.
    fn tokenize(
        &self,
        model: &LlamaModel,
        text: &str,
        is_abandoned: &CancellationToken,
    ) -> Result<Vec<Token>, EngineError> {
        let native = || vocabulary::tokenize(model, text, false, false);
        match self {
            _ if text.len() <= MAX_SHALLOW_BYTES => Ok(native()),
            LongWords::Native => Ok(native()),
            LongWords::BytePairs(pairs) => {
                Ok(pairs.tokenize_long_words(text, MAX_SHALLOW_BYTES, is_abandoned)?.unwrap_or_else(native))
            }
            LongWords::DeepStack(_) if text.len() > MAX_DEEP_BYTES => {
                let message = format!(
                    "this model's tokenizer reads at most {MAX_DEEP_BYTES} bytes of text at once, and got {}",
                    text.len()
                );
                Err(EngineError::invalid(message))
            }
            LongWords::DeepStack(one_at_a_time) => {
                // The wait is bounded: few texts are worked on at once (`text_work`).
                let _turn = one_at_a_time.lock().unwrap_or_else(PoisonError::into_inner);
                on_deep_stack(text.len() * STACK_BYTES + (1 << 20), native)
            }
        }
    }
}

/// The spelling of each token in the file.
fn spellings(model: &LlamaModel) -> Vec<String> {
    let vocab = model.vocab();
    let n_tokens = u32::try_from(vocab.n_tokens()).unwrap_or(0);
    let text = |t| vocab.text(token(t)).and_then(|text| text.to_str().ok()).unwrap_or_default().to_owned();
    (0..n_tokens).map(text).collect()
}

/// Reads the vocabulary, and compares what it makes of a text with llama.cpp's tokens. Errors: why it cannot be used.
fn byte_pairs(model: &LlamaModel, spellings: &[String], stages: Stages, path: &Path) -> Result<BytePairs, String> {
    let merges = Gguf::strings(path, "tokenizer.ggml.merges").map_err(|e| e.to_string())?;
    let pairs = BytePairs::new(spellings, stages, &merges.unwrap_or_default())?;
    let tokens = pairs.tokenize(SAMPLE, &CancellationToken::new()).map_err(|e| e.to_string())?;
    if tokens != vocabulary::tokenize(model, SAMPLE, false, false) {
        return Err("Baton's tokens of a sample differ from llama.cpp's".to_owned());
    }
    Ok(pairs)
}

/// Text with words of many kinds, by which the two tokenizers are compared when a model is loaded.
const SAMPLE: &str = "The cable's first message, in 1851, cost $3,000.50; they'll've sent it TWICE!\n\n  if (x <= 10) {\r\n\t\treturn a[i]+b;  }\n\
    aGVsbG8gd29ybGQh+/==  https://example.com/?q=1&r=%20  don't DON'T O'Neil's ÉCOLE naïve Straße ΑΒΓ где? 東京タワー 한국어 हिन्दी ไทย \
    👩‍💻🎉 ①²½ ٣٤٥ 12345678\u{a0}\u{3000}x\u{200b}y \u{e000} ... --- ***\n\n\n   \t \n end   ";
