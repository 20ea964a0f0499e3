//! How far it is believed that a node, or an upstream, holds the beginning of a prompt: by what it then had of earlier ones.
//!
//! A list that is wrong, by a fault or on purpose, would attract every prompt that it names.

/// Promises of fewer tokens change hardly any route. Many of them that are kept must not hide large ones that are not.
pub const MIN_PROMISED: u32 = 32;

/// Tokens at a prompt's end that a node may compute again although it holds them.
const TOLERATED: u32 = 16;

/// The weight of each promise in the share. After three broken ones a node is not believed, after four kept ones it is again.
const WEIGHT: f64 = 0.25;

/// Shares from here on count as all: a prefix may be evicted between the list and the prompt.
const ALL: f64 = 0.9;

/// Shares below this count as none. Otherwise the smallest one would still make a node faster than its equals.
const NONE: f64 = 0.5;

/// The share of promised tokens that a node had when their prompts came, the latest counting most.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KeptPromises(f64);

impl Default for KeptPromises {
    fn default() -> KeptPromises {
        KeptPromises(1.0)
    }
}

impl KeptPromises {
    /// A prompt came of which the node should have had so many tokens, and had these. Returns true if it is not believed any more.
    pub fn note(&mut self, n_promised: u32, n_had: u32) -> bool {
        if n_promised < MIN_PROMISED {
            return false;
        }
        let kept = f64::from(n_had.saturating_add(TOLERATED).min(n_promised)) / f64::from(n_promised);
        let was_believed = self.belief() > 0.0;
        self.0 += WEIGHT * (kept - self.0);
        was_believed && self.belief() == 0.0
    }

    /// The part of a promise that is counted on, from 0 to 1.
    pub fn belief(self) -> f64 {
        match self.0 {
            share if share >= ALL => 1.0,
            share if share < NONE => 0.0,
            share => share,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_breaks_its_promises_is_not_believed_until_it_keeps_them() {
        let mut promises = KeptPromises::default();
        let mut note = |n_had| (promises.note(1_000, n_had), promises.belief());
        assert_eq!(note(990), (false, 1.0), "the last tokens are computed anyway");
        let (is_lost, after_one) = note(0);
        assert!(!is_lost && (0.7..0.8).contains(&after_one), "{after_one}");
        note(0);
        assert_eq!(note(0), (true, 0.0));
        assert_eq!(note(0), (false, 0.0), "that is said once");
        for _ in 0..3 {
            note(1_000);
        }
        assert!(note(1_000).1 > 0.5);
        for _ in 0..8 {
            note(u32::MAX);
        }
        assert_eq!(note(1_000), (false, 1.0));
    }

    #[test]
    fn small_promises_say_nothing() {
        let mut promises = KeptPromises::default();
        for _ in 0..100 {
            assert!(!promises.note(MIN_PROMISED - 1, 0) && promises.belief() == 1.0);
        }
    }
}
