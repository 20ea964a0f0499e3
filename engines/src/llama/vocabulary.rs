//! A model's vocabulary, read once: the bytes of tokens, and which tokens are control tokens.

use baton_schemas::Token;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::token_type::LlamaTokenAttr;

/// Facts about every token, so that the scheduler's hot path needs no calls into C++.
pub(super) struct Vocabulary {
    pieces: Vec<Box<[u8]>>,
    control: Vec<bool>,
    end_of_generation: Vec<Token>,
}

impl Vocabulary {
    pub(super) fn of(model: &LlamaModel) -> Self {
        let vocab = model.vocab();
        let n_tokens = u32::try_from(vocab.n_tokens()).unwrap_or(0);
        Vocabulary {
            pieces: (0..n_tokens).map(|t| vocab.token_to_piece(token(t), true, None).into()).collect(),
            control: (0..n_tokens).map(|t| vocab.is_control(token(t))).collect(),
            end_of_generation: (0..n_tokens).filter(|&t| vocab.is_eog(token(t))).collect(),
        }
    }

    pub(super) fn n_tokens(&self) -> usize {
        self.pieces.len()
    }

    /// The length of the longest token, bytes.
    pub(super) fn longest_piece(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len()).max().unwrap_or(0)
    }

    /// A token's bytes, control tokens spelled out; empty for a token outside the vocabulary.
    pub(super) fn piece(&self, t: Token) -> Vec<u8> {
        self.pieces.get(t as usize).map_or_else(Vec::new, |piece| piece.to_vec())
    }

    pub(super) fn is_control(&self, t: Token) -> bool {
        self.control.get(t as usize).copied().unwrap_or(false)
    }

    pub(super) fn is_end_of_generation(&self, t: Token) -> bool {
        self.end_of_generation.contains(&t)
    }

    /// All control tokens.
    pub(super) fn control(&self) -> impl Iterator<Item = Token> {
        (0..).zip(&self.control).filter(|(_, is_control)| **is_control).map(|(t, _)| t)
    }

    /// All tokens that end a reply.
    pub(super) fn end_of_generation(&self) -> &[Token] {
        &self.end_of_generation
    }
}

/// Control tokens of gpt-oss. llama.cpp gives them the type of user-defined tokens so that replies show them, and then reads
/// their spellings in any text as these tokens (`llama-vocab.cpp`, "hack for gpt-oss").
pub(super) const SHOWN_CONTROL: [&str; 4] = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

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
