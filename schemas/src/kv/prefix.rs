//! The hash that binds a frame to its prompt: KV depends on every token before it.

use crate::token::Token;

/// The number of tokens that are converted to bytes at a time.
const BLOCK: usize = 1024;

/// Computes BLAKE3 of a sequence's first tokens, each as a little-endian u32.
#[derive(Debug, Clone, Default)]
pub struct PrefixHasher {
    hasher: blake3::Hasher,
}

impl PrefixHasher {
    /// Creates a hasher without tokens.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the next tokens.
    pub fn extend(&mut self, tokens: &[Token]) {
        let mut bytes = [0; BLOCK * 4];
        for block in tokens.chunks(BLOCK) {
            for (bytes, token) in bytes.chunks_exact_mut(4).zip(block) {
                bytes.copy_from_slice(&token.to_le_bytes());
            }
            self.hasher.update(&bytes[..block.len() * 4]);
        }
    }

    /// Returns the hash of all tokens so far.
    pub fn hash(&self) -> [u8; 32] {
        *self.hasher.finalize().as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_that_of_the_whole_however_it_was_extended() {
        let tokens: Vec<Token> = (0..3000).map(|t| t * 7919).collect();
        let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        for cut in [0, 1, 1023, 1024, 1025, 3000] {
            let mut prefix = PrefixHasher::new();
            prefix.extend(&tokens[..cut]);
            prefix.extend(&tokens[cut..]);
            assert_eq!(prefix.hash(), *blake3::hash(&bytes).as_bytes(), "cut at {cut}");
        }
    }
}
