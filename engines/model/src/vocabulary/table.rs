//! A model's vocabulary, read once: the bytes of tokens, and which tokens are control tokens.

use baton_schemas::Token;

/// What is known about a token.
pub struct TokenFacts {
    /// Its bytes; a control token's are its spelling.
    pub piece: Vec<u8>,
    pub is_control: bool,
    /// It ends a reply.
    pub is_end_of_generation: bool,
}

/// Facts about every token, so that the scheduler's hot path needs no calls into an engine's library.
pub struct Vocabulary {
    pieces: Vec<Box<[u8]>>,
    control: Vec<bool>,
    end_of_generation: Vec<Token>,
}

impl Vocabulary {
    /// `tokens` are in the order of their numbers.
    pub fn new(tokens: impl IntoIterator<Item = TokenFacts>) -> Self {
        let mut vocabulary = Vocabulary { pieces: Vec::new(), control: Vec::new(), end_of_generation: Vec::new() };
        for (id, token) in (0..).zip(tokens) {
            vocabulary.pieces.push(token.piece.into());
            vocabulary.control.push(token.is_control);
            vocabulary.end_of_generation.extend(token.is_end_of_generation.then_some(id));
        }
        vocabulary
    }

    pub fn n_tokens(&self) -> usize {
        self.pieces.len()
    }

    /// The length of the longest token, bytes.
    pub fn longest_piece(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len()).max().unwrap_or(0)
    }

    /// A token's bytes, control tokens spelled out; empty for a token outside the vocabulary.
    pub fn piece(&self, t: Token) -> Vec<u8> {
        self.pieces.get(t as usize).map_or_else(Vec::new, |piece| piece.to_vec())
    }

    /// A token's spelling as text; empty for no token.
    pub fn text(&self, t: Option<Token>) -> String {
        t.map_or_else(String::new, |t| String::from_utf8_lossy(&self.piece(t)).into_owned())
    }

    pub fn is_control(&self, t: Token) -> bool {
        self.control.get(t as usize).copied().unwrap_or(false)
    }

    pub fn is_end_of_generation(&self, t: Token) -> bool {
        self.end_of_generation.contains(&t)
    }

    /// All control tokens.
    pub fn control(&self) -> impl Iterator<Item = Token> {
        (0..).zip(&self.control).filter(|(_, is_control)| **is_control).map(|(t, _)| t)
    }

    /// All tokens that end a reply.
    pub fn end_of_generation(&self) -> &[Token] {
        &self.end_of_generation
    }
}
