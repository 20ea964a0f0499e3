//! Prompts in words.

use std::ops::RangeInclusive;

use baton_tryout::prompts::TEXT;

/// Prompts in words, for servers whose vocabulary is not known. Their JSON needs no escapes.
pub(crate) struct WordPrompts {
    words: Vec<&'static str>,
    /// The start of every prompt.
    prefix: String,
    n_prefix: usize,
    lengths: RangeInclusive<usize>,
}

/// The fractional parts of its multiples are spread evenly, however many there are.
const GOLDEN_RATIO: f64 = 1.618_033_988_749_895;

impl WordPrompts {
    /// Prompts of `n_words`, of which the first `n_prefix` are the same in all.
    pub(crate) fn new(n_words: usize, n_prefix: usize) -> WordPrompts {
        WordPrompts::of_lengths(n_words..=n_words, n_prefix)
    }

    /// Prompts of different lengths, in words. Each doubling of the length is as likely as another: short prompts are common.
    pub(crate) fn of_lengths(lengths: RangeInclusive<usize>, n_prefix: usize) -> WordPrompts {
        let is_plain = |word: &&str| !word.contains(['"', '\\']);
        let words: Vec<&str> = TEXT.split_whitespace().filter(is_plain).collect();
        let prefix = words.iter().cycle().take(n_prefix).flat_map(|word| [word, " "]).collect();
        WordPrompts { words, prefix, n_prefix, lengths }
    }

    /// The words of prompt `n` after the prefix.
    fn n_own(&self, n: u64) -> usize {
        let (least, most) = (*self.lengths.start() as f64, *self.lengths.end() as f64);
        let position = (n as f64 * GOLDEN_RATIO).fract();
        let n_words = (least * (most / least.max(1.0)).powf(position)).round() as usize;
        n_words.saturating_sub(self.n_prefix)
    }

    /// Appends prompt `n`. Another `n` has another word after the prefix, unless the prefix is the whole prompt.
    pub(crate) fn write(&self, n: u64, out: &mut Vec<u8>) {
        out.extend_from_slice(self.prefix.as_bytes());
        let n_own = self.n_own(n);
        if n_own > 0 {
            out.extend_from_slice(n.to_string().as_bytes());
        }
        let skipped = (n.wrapping_mul(61) % self.words.len().max(1) as u64) as usize;
        for word in self.words.iter().cycle().skip(skipped).take(n_own.saturating_sub(1)) {
            out.push(b' ');
            out.extend_from_slice(word.as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_spread_over_all_doublings() {
        let prompts = WordPrompts::of_lengths(50..=1_600, 0);
        let lengths: Vec<usize> = (1_000..1_064).map(|n| prompts.n_own(n)).collect();
        assert!(lengths.iter().all(|n| (50..=1_600).contains(n)), "{lengths:?}");
        for from in [50, 100, 200, 400, 800] {
            let n_there = lengths.iter().filter(|n| (from..2 * from).contains(*n)).count();
            assert!((10..=16).contains(&n_there), "{n_there} of 64 from {from} words: {lengths:?}");
        }
        let mut out = Vec::new();
        prompts.write(1_000, &mut out);
        assert_eq!(out.split(|byte| *byte == b' ').count(), lengths[0]);
    }

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
