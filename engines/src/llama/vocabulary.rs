//! Reads a model's vocabulary from llama.cpp, and tokenizes Baton's own short texts with it.

use baton_model::vocabulary::{SHOWN_CONTROL, TokenFacts, Vocabulary};
use baton_schemas::Token;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::token_type::LlamaTokenAttr;

/// The facts about every token of a model.
pub(crate) fn vocabulary(model: &LlamaModel) -> Vocabulary {
    let vocab = model.vocab();
    let n_tokens = u32::try_from(vocab.n_tokens()).unwrap_or(0);
    Vocabulary::new((0..n_tokens).map(token).map(|t| TokenFacts {
        piece: vocab.token_to_piece(t, true, None),
        is_control: vocab.is_control(t),
        is_end_of_generation: vocab.is_eog(t),
    }))
}

/// The spellings of control tokens. Like llama.cpp, this includes the token for unknown text.
pub(super) fn control_spellings(model: &LlamaModel) -> Vec<String> {
    let vocab = model.vocab();
    let is_control = |t: LlamaToken, spelling: &str| {
        vocab.is_control(t) || vocab.attr(t).contains(LlamaTokenAttr::Unknown) || SHOWN_CONTROL.contains(&spelling)
    };
    let tokens = (0..vocab.n_tokens()).map(LlamaToken);
    let spelled = tokens.filter_map(|t| Some((t, String::from_utf8(vocab.token_to_piece(t, true, None)).ok()?)));
    spelled.filter(|(t, spelling)| is_control(*t, spelling)).map(|(_, spelling)| spelling).collect()
}

/// Tokenizes a short text of Baton's own with llama.cpp, which may overflow the stack on others: those go through the
/// [`super::tokenizer`]. `add_special` adds BOS where the model wants it; `parse_special` reads spellings of control tokens as
/// these tokens.
pub(super) fn tokenize(model: &LlamaModel, text: &str, add_special: bool, parse_special: bool) -> Vec<Token> {
    let tokens = model.vocab().tokenize(text.as_bytes(), add_special, parse_special);
    tokens.into_iter().filter_map(|t| u32::try_from(t.0).ok()).collect()
}

/// A token as llama.cpp's type. The engine has checked it against the vocabulary.
pub(super) fn token(t: Token) -> LlamaToken {
    LlamaToken::new(i32::try_from(t).unwrap_or(i32::MAX))
}
