//! Counts with their noun, for messages.

use std::fmt::Display;

/// Writes `1 token` or `2 tokens`. Only for nouns whose plural ends with an added "s".
pub fn counted<N: Display + PartialEq + From<u8>>(n: N, noun: &str) -> String {
    let ending = if n == N::from(1) { "" } else { "s" };
    format!("{n} {noun}{ending}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_singular() {
        assert_eq!(counted(0_u32, "token"), "0 tokens");
        assert_eq!(counted(1_usize, "token"), "1 token");
        assert_eq!(counted(2_u64, "token"), "2 tokens");
    }
}
