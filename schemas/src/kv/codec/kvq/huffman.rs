//! Huffman codes of limited length, from weights.
//!
//! Both ends derive the same code: the lengths by package-merge, ties broken by the symbols' order, and the codes in
//! canonical order, by length and then by symbol.

/// The longest code, bits.
pub(super) const MAX_LENGTH: u32 = 11;

/// A symbol's code.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Code {
    /// The code's bits, the first one lowest.
    pub(super) bits: u16,
    /// The number of bits, 1 to [`MAX_LENGTH`].
    pub(super) length: u8,
}

/// Returns the code of every symbol. `weights` has 2 to 2^[`MAX_LENGTH`] elements, all at least 1.
pub(super) fn codes(weights: &[u64]) -> Vec<Code> {
    let lengths = lengths(weights);
    let mut in_order: Vec<usize> = (0..weights.len()).collect();
    in_order.sort_by_key(|&symbol| (lengths[symbol], symbol));
    let mut codes = vec![Code::default(); weights.len()];
    let (mut next, mut length) = (0u16, 0u8);
    for symbol in in_order {
        next <<= lengths[symbol] - length;
        length = lengths[symbol];
        codes[symbol] = Code { bits: next.reverse_bits() >> (16 - length), length };
        // Past the last code, which is all ones, it is not used.
        next += 1;
    }
    codes
}

/// The lengths of the best code with at most [`MAX_LENGTH`] bits (Larmore and Hirschberg's package-merge).
fn lengths(weights: &[u64]) -> Vec<u8> {
    // A package is a weight and the symbols in it. A symbol's length is the number of chosen packages that contain it.
    let mut leaves: Vec<(u64, Vec<usize>)> = weights.iter().enumerate().map(|(i, &w)| (w, vec![i])).collect();
    leaves.sort_by_key(|(weight, symbols)| (*weight, symbols[0]));
    let mut packages = leaves.clone();
    for _ in 1..MAX_LENGTH {
        let pairs = packages.as_chunks::<2>().0.iter().map(|[a, b]| (a.0 + b.0, [&a.1[..], &b.1].concat()));
        let mut merged: Vec<(u64, Vec<usize>)> = leaves.iter().cloned().chain(pairs).collect();
        // Stable: of equal weights, leaves come first.
        merged.sort_by_key(|(weight, _)| *weight);
        packages = merged;
    }
    let mut lengths = vec![0; weights.len()];
    for symbol in packages.iter().take(2 * weights.len() - 2).flat_map(|(_, symbols)| symbols) {
        lengths[*symbol] += 1;
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_complete_and_no_code_starts_another() {
        for weights in [vec![1, 1], vec![5, 1, 1, 2], (0..82).map(|i| 1 << (i / 2)).collect(), vec![1; 2048]] {
            let codes = codes(&weights);
            let sum: u32 = codes.iter().map(|code| 1 << (MAX_LENGTH - u32::from(code.length))).sum();
            assert_eq!(sum, 1 << MAX_LENGTH, "complete");
            let mut seen = vec![false; 1 << MAX_LENGTH];
            for code in &codes {
                for high in 0..1usize << (MAX_LENGTH - u32::from(code.length)) {
                    let index = usize::from(code.bits) | high << code.length;
                    assert!(!std::mem::replace(&mut seen[index], true), "{code:?}");
                }
            }
        }
    }

    #[test]
    fn heavier_symbols_have_shorter_codes() {
        let lengths: Vec<u8> = codes(&[8, 4, 2, 1, 1]).iter().map(|code| code.length).collect();
        assert_eq!(lengths, [1, 2, 3, 4, 4]);
    }
}
