//! Prompts in words.

use baton_tryout::prompts::TEXT;

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
}
