//! Prompts of real text.

use baton_link::Engine;
use baton_link::remote::RemoteEngine;
use baton_proxy::serve::CommandFailure;
use baton_schemas::node::TokenizeRequest;
use baton_schemas::{KeyTag, Token};

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
        let request =
            TokenizeRequest { text: TEXT.into(), add_special: false, parse_special: false, key: KeyTag::NONE };
        Ok(Prompts { text: engine.tokenize(&request).await?, n_vocab, n_made: 0 })
    }

    /// Makes a prompt of `n` tokens with its own first token and its own start in the text.
    pub fn next(&mut self, n: usize) -> Vec<Token> {
        self.n_made += 1;
        let first = self.n_made.wrapping_mul(7919) % self.n_vocab;
        let skipped = 61 * self.n_made as usize % self.text.len().max(1);
        std::iter::once(first).chain(self.text.iter().copied().cycle().skip(skipped)).take(n).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
