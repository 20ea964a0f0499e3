//! Prompts of real text.

use baton_link::Engine;
use baton_link::remote::RemoteEngine;
use baton_proxy::serve::CommandFailure;
use baton_schemas::node::TokenizeRequest;
use baton_schemas::{EngineError, KeyTag, Token};

/// Ordinary prose, because a codec's compression of KV depends on the text. It never changes, so that figures of different
/// versions can be compared.
pub const TEXT: &str = include_str!("prompt.txt");

/// A source of prompts that share no prefix, so that no cache helps.
pub struct Prompts {
    text: Vec<Token>,
    n_vocab: u32,
    n_made: u32,
}

impl Prompts {
    /// Prompts in the vocabulary of a node's model.
    pub async fn of(engine: &RemoteEngine) -> Result<Prompts, CommandFailure> {
        let n_vocab = engine.info().await?.n_vocab.max(1);
        let tokens_of = async |text: &str| {
            let text = text.into();
            let request = TokenizeRequest { text, add_special: false, parse_special: false, key: KeyTag::NONE };
            engine.tokenize(&request).await
        };
        let text = match tokens_of(TEXT).await {
            // Where a token is a byte, as in models of random weights, the text has more tokens than the context.
            Err(EngineError::ContextOverflow { n_ctx, .. }) => tokens_of(beginning(TEXT, n_ctx as usize)).await?,
            text => text?,
        };
        Ok(Prompts { text, n_vocab, n_made: 0 })
    }

    /// The same of the tokens of [`TEXT`], whatever has made them.
    pub fn new(text: Vec<Token>) -> Prompts {
        let n_vocab = text.iter().max().copied().unwrap_or(0).saturating_add(1);
        Prompts { text, n_vocab, n_made: 0 }
    }

    /// Makes a prompt of `n` tokens with its own first token and its own start in the text.
    pub fn next(&mut self, n: usize) -> Vec<Token> {
        self.n_made += 1;
        let first = self.n_made.wrapping_mul(7919) % self.n_vocab;
        let skipped = 61 * self.n_made as usize % self.text.len().max(1);
        std::iter::once(first).chain(self.text.iter().copied().cycle().skip(skipped)).take(n).collect()
    }
}

/// The beginning of a text, at most so many bytes.
fn beginning(text: &str, n_bytes: usize) -> &str {
    let cuts = text.char_indices().map(|(at, _)| at).chain([text.len()]);
    &text[..cuts.take_while(|at| *at <= n_bytes).last().unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_of_a_text_ends_with_a_whole_character() {
        let of = |n_bytes| beginning("aé—b", n_bytes);
        assert_eq!([0, 1, 2, 3, 5, 6, 7, 99].map(of), ["", "a", "a", "aé", "aé", "aé—", "aé—b", "aé—b"]);
    }

    #[test]
    fn prompts_have_their_length_and_no_common_prefix() {
        let mut prompts = Prompts { text: (0..100).collect(), n_vocab: 49_152, n_made: 0 };
        let made: Vec<_> = (0..50).map(|_| prompts.next(300)).collect();
        assert!(made.iter().all(|prompt| prompt.len() == 300));
        let mut firsts: Vec<_> = made.iter().map(|prompt| prompt[0]).collect();
        firsts.sort_unstable();
        firsts.dedup();
        assert_eq!(firsts.len(), 50);
    }
}
