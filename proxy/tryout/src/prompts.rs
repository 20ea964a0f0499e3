//! Prompts of real text, in tokens and in words.

use baton_engines::Engine;
use baton_engines::remote::RemoteEngine;
use baton_proxy::serve::CommandFailure;
use baton_schemas::Token;
use baton_schemas::node::TokenizeRequest;

/// Ordinary prose, because a codec's compression of KV depends on the text. It never changes, so that figures of different
/// versions can be compared.
pub(crate) const TEXT: &str = include_str!("prompt.txt");

/// A source of prompts that share no prefix, so that no cache helps.
pub(crate) struct Prompts {
    text: Vec<Token>,
    n_vocab: u32,
    n_made: u32,
}

impl Prompts {
    /// Prompts in the vocabulary of a node's model.
    pub(crate) async fn of(engine: &RemoteEngine) -> Result<Prompts, CommandFailure> {
        let n_vocab = engine.info().await?.n_vocab.max(1);
        let request = TokenizeRequest { text: TEXT.to_owned(), add_special: false, parse_special: false };
        Ok(Prompts { text: engine.tokenize(&request).await?, n_vocab, n_made: 0 })
    }

    /// Makes a prompt of `n` tokens with its own first token and its own start in the text.
    pub(crate) fn next(&mut self, n: usize) -> Vec<Token> {
        self.n_made += 1;
        let first = self.n_made.wrapping_mul(7919) % self.n_vocab;
        let skipped = 61 * self.n_made as usize % self.text.len().max(1);
        std::iter::once(first).chain(self.text.iter().copied().cycle().skip(skipped)).take(n).collect()
    }
}

/// Prompts in words, for servers whose vocabulary is not known. Their JSON needs no escapes.
pub(crate) struct WordPrompts {
    words: Vec<&'static str>,
    /// The start of every prompt.
    prefix: String,
    n_own: usize,
}

impl WordPrompts {
    /// Prompts of `n_words`, of which the first `n_prefix` are the same in all.
    pub(crate) fn new(n_words: usize, n_prefix: usize) -> WordPrompts {
        let is_plain = |word: &&str| !word.contains(['"', '\\']);
        let words: Vec<&str> = TEXT.split_whitespace().filter(is_plain).collect();
        let prefix = words.iter().cycle().take(n_prefix).flat_map(|word| [word, " "]).collect();
        WordPrompts { words, prefix, n_own: n_words.saturating_sub(n_prefix) }
    }

    /// Appends prompt `n`. Another `n` has another word after the prefix, unless the prefix is the whole prompt.
    pub(crate) fn write(&self, n: u64, out: &mut Vec<u8>) {
        out.extend_from_slice(self.prefix.as_bytes());
        if self.n_own > 0 {
            out.extend_from_slice(n.to_string().as_bytes());
        }
        let skipped = (n.wrapping_mul(61) % self.words.len().max(1) as u64) as usize;
        for word in self.words.iter().cycle().skip(skipped).take(self.n_own.saturating_sub(1)) {
            out.push(b' ');
            out.extend_from_slice(word.as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_in_words_share_only_their_prefix() {
        let prompts = WordPrompts::new(40, 10);
        let prompt = |n| {
            let mut out = Vec::new();
            prompts.write(n, &mut out);
            String::from_utf8(out).unwrap()
        };
        let made: Vec<String> = (0..50).map(prompt).collect();
        let words = |prompt: &str| prompt.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let first = words(&made[0]);
        for (i, prompt) in made.iter().enumerate() {
            let words = words(prompt);
            assert_eq!((words.len(), &words[..10]), (40, &first[..10]));
            assert_eq!(words[10], i.to_string());
            assert_eq!(serde_json::to_string(prompt).unwrap(), format!("\"{prompt}\""));
        }
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
