//! A model's tokens, and how text becomes tokens: as llama.cpp does it, without llama.cpp.
//!
//! [`Vocabulary`] has the facts about every token that the scheduler needs. The llama engine fills it from llama.cpp and
//! uses [`byte_pairs`] and [`special`] for texts that llama.cpp cannot take. An engine without llama.cpp reads all of it
//! from the model's file or folder (`file.rs`) and tokenizes with [`FileTokenizer`]. The tests compare both.

pub mod byte_pairs;
mod file;
pub mod pre;
mod ranked_pieces;
mod sentence_pieces;
pub mod special;
mod table;
mod tokenizer;

use baton_schemas::{EngineError, Token};
use tokio_util::sync::CancellationToken;

pub use self::file::FileVocabulary;
pub use self::file::VocabularyError;
pub use self::table::TokenFacts;
pub use self::table::Vocabulary;
pub use self::tokenizer::FileTokenizer;

/// Control tokens of gpt-oss. llama.cpp gives them the type of user-defined tokens so that replies show them. Then it reads
/// their spellings in any text as these tokens (`llama-vocab.cpp`, "hack for gpt-oss").
pub const SHOWN_CONTROL: [&str; 4] = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// Turns text into tokens. Blocking: a megabyte takes up to a second.
pub trait TextTokenizer: Send + Sync {
    /// Tokenizes a text. `add_special` adds BOS where the model wants it; `parse_special` reads spellings of control
    /// tokens as these tokens. Errors: the text cannot be tokenized, or its caller has gone.
    fn tokenize(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
        is_abandoned: &CancellationToken,
    ) -> Result<Vec<Token>, EngineError>;

    /// Tokenizes a client's text, whose spellings of control tokens are only text. Errors: as for `tokenize`.
    fn tokenize_plain(&self, text: &str, is_abandoned: &CancellationToken) -> Result<Vec<Token>, EngineError>;
}

/// Cuts a client's text within each spelling that `shown_control` finds, and gives the parts to `tokenize`: in two parts, a
/// spelling is not a token. Errors: those of `tokenize`, or the caller has gone.
pub fn cut_spellings(
    text: &str,
    shown_control: &aho_corasick::AhoCorasick,
    is_abandoned: &CancellationToken,
    tokenize: impl Fn(&str) -> Result<Vec<Token>, EngineError>,
) -> Result<Vec<Token>, EngineError> {
    let mut tokens = Vec::new();
    let mut from = 0;
    for found in shown_control.find_iter(text) {
        if is_abandoned.is_cancelled() {
            return Err(caller_has_gone());
        }
        let first = found.start() + 1;
        tokens.extend(tokenize(&text[from..first])?);
        from = first;
    }
    tokens.extend(tokenize(&text[from..])?);
    Ok(tokens)
}

/// The error for work that nobody waits for.
pub fn caller_has_gone() -> EngineError {
    EngineError::internal("the caller of the tokenizer has gone")
}
