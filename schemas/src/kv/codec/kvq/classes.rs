//! Classes of channels, and the code of each.
//!
//! A class says how large a channel's integers are, and with it how they are coded. The codes are the same for every
//! model: the integers of a class follow a discrete logistic distribution, within 0.01 bits on the models measured.
//! Every number here comes from additions, multiplications, divisions and square roots of f64, which IEEE 754 defines
//! to the bit, so that all implementations derive the same codes.
//!
//! | class | code |
//! |---|---|
//! | 0 | every integer is 0, nothing is coded |
//! | 1 to 25 | groups of four integers of -1 to 1: 81 symbols and an escape |
//! | 26 to 49 | one integer: `-n` to `n` and an escape |
//! | 50 to 97 | the upper part of an integer as in class 46 to 49, then 1 to 12 bits as they are |

use std::sync::LazyLock;

use super::huffman::{self, Code, MAX_LENGTH};

/// The class whose integers are all 0.
pub(super) const ZEROS: u8 = 0;

/// The last class that codes groups of four.
const LAST_OF_FOURS: u8 = 25;

/// The last class with a code of its own.
const LAST_CODE: u8 = 49;

/// The last class.
pub(super) const LAST: u8 = LAST_CODE + 4 * 12;

/// The code of the integers in a group that is escaped.
pub(super) const ESCAPED_FOURS: u8 = 36;

/// The scale of class `c` is `2^((c - 41) / 4)`.
const SCALE_ONE: i32 = 41;

/// Symbols are listed until the rest is this unlikely.
const ESCAPES: f64 = 1.0 / 1024.0;

/// The most that a listed integer can be. Every class needs fewer.
const MAX_LISTED: usize = 60;

/// Entries of an encoding table, more than any class lists.
const MAX_CODES: usize = 128;

/// A symbol in a decoding table: the code's length in bits 0 to 7, [`Symbol::ESCAPE`], and the value in bits 16 to 31.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Symbol(u32);

impl Symbol {
    const ESCAPE: u32 = 1 << 8;

    fn new(length: u8, value: Option<i16>) -> Symbol {
        let value = value.map_or(Self::ESCAPE, |value| u32::from(value.cast_unsigned()) << 16);
        Symbol(value | u32::from(length))
    }

    #[inline]
    pub(super) fn length(self) -> u32 {
        self.0 & 0xFF
    }

    #[inline]
    pub(super) fn is_escape(self) -> bool {
        self.0 & Self::ESCAPE != 0
    }

    /// The integer, or the index of the group.
    #[inline]
    pub(super) fn value(self) -> i16 {
        ((self.0 >> 16) as u16).cast_signed()
    }
}

/// The decoding table: the symbol that each [`MAX_LENGTH`] next bits start with.
pub(super) type SymbolTable = [Symbol; 1 << MAX_LENGTH];

/// A code of integers, or of groups of four.
pub(super) struct ClassCode {
    /// The largest listed integer. 0 for groups.
    pub(super) n: i32,
    /// The codes of `-n` to `n`, or of the 81 groups; the last one is the escape's.
    pub(super) codes: Vec<Code>,
    /// The same without the escape's, for a faster look. The other entries have no bits.
    listed: Box<[Code; MAX_CODES]>,
    pub(super) symbols: Box<SymbolTable>,
}

impl ClassCode {
    fn new(weights: &[u64], n: i32) -> ClassCode {
        let codes = huffman::codes(weights);
        let mut symbols: Box<SymbolTable> = Box::new([Symbol::default(); 1 << MAX_LENGTH]);
        for (i, code) in codes.iter().enumerate() {
            let value = (i + 1 < codes.len()).then(|| (i as i32 - n) as i16);
            for high in 0..1usize << (MAX_LENGTH - u32::from(code.length)) {
                symbols[usize::from(code.bits) | high << code.length] = Symbol::new(code.length, value);
            }
        }
        let mut listed: Box<[Code; MAX_CODES]> = Box::new([Code::default(); MAX_CODES]);
        if let Some((_, of_symbols)) = codes.split_last() {
            listed.iter_mut().zip(of_symbols).for_each(|(entry, code)| *entry = *code);
        }
        ClassCode { n, codes, listed, symbols }
    }

    /// The code of the symbol number `index`, without bits if there is none.
    #[inline]
    pub(super) fn listed(&self, index: u32) -> Code {
        self.listed[(index as usize).min(MAX_CODES - 1)]
    }

    /// The escape's code.
    pub(super) fn escape(&self) -> Code {
        self.codes.last().copied().unwrap_or_default()
    }
}

/// How a class codes its integers.
pub(super) enum Coding {
    Zeros,
    /// Groups of four: the index of a group is the sum of `(q + 1) · 3^i`.
    Fours(&'static ClassCode),
    /// One integer, whose lowest bits are written as they are.
    Ones {
        upper: &'static ClassCode,
        n_lower: u32,
    },
}

/// The coding of a class, which is at most [`LAST`].
pub(super) fn coding(class: u8) -> Coding {
    let code = |class: u8| &CLASSES.codes[usize::from(class.clamp(1, LAST_CODE)) - 1];
    match class {
        ZEROS => Coding::Zeros,
        1..=LAST_OF_FOURS => Coding::Fours(code(class)),
        _ => {
            let n_lower = class.saturating_sub(LAST_CODE).div_ceil(4);
            Coding::Ones { upper: code(class - 4 * n_lower), n_lower: n_lower.into() }
        }
    }
}

/// The class from 1 for integers whose magnitudes have this mean, in 1/4096.
pub(super) fn class_of(mean: u64) -> u8 {
    1 + CLASSES.bounds.partition_point(|bound| *bound <= mean) as u8
}

struct Classes {
    /// The codes of the classes from 1.
    codes: Vec<ClassCode>,
    /// The mean magnitudes, in 1/4096, from which on each class from 2 is better than the one before it.
    bounds: Vec<u64>,
}

static CLASSES: LazyLock<Classes> = LazyLock::new(|| {
    let mut codes = Vec::new();
    let mut means = Vec::new();
    for class in 1..=LAST_CODE {
        let p = probabilities(class);
        means.push(2.0 * p.iter().zip(0..).map(|(p, k)| p * f64::from(k)).sum::<f64>());
        codes.push(if class <= LAST_OF_FOURS { fours(&p) } else { ones(&p) });
    }
    for class in LAST_CODE + 1..=LAST {
        means.push(2.0 * means[usize::from(class) - 5]);
    }
    let bounds = means.windows(2).map(|pair| ((pair[0] * pair[1]).sqrt() * 4096.0) as u64).collect();
    Classes { codes, bounds }
});

/// The probabilities of the magnitudes from 0 in a class, of one sign: of a logistic distribution, `r^k / (1 + r^k)²`.
fn probabilities(class: u8) -> Vec<f64> {
    let quarters = i32::from(class) - SCALE_ONE;
    let fourth_root = 2.0f64.sqrt().sqrt();
    let mut scale = 1.0;
    for _ in 0..quarters.abs() {
        scale = if quarters < 0 { scale / fourth_root } else { scale * fourth_root };
    }
    let ratio = scale / (1.0 + scale);
    let mut power = 1.0;
    let mut p = Vec::new();
    let mut sum = 0.0;
    for k in 0..4096 {
        let share = power / ((1.0 + power) * (1.0 + power));
        p.push(share);
        sum += if k == 0 { share } else { 2.0 * share };
        power *= ratio;
    }
    p.iter().map(|share| share / sum).collect()
}

/// A probability as a weight, at least 1.
fn weight(p: f64) -> u64 {
    (p * (1u64 << 40) as f64) as u64 + 1
}

fn ones(p: &[f64]) -> ClassCode {
    let mut rest = 1.0 - p[0];
    let mut n = 0;
    while n < MAX_LISTED && rest > ESCAPES {
        n += 1;
        rest -= 2.0 * p[n];
    }
    let listed = (1..=n).rev().chain(0..=n).map(|k| weight(p[k]));
    ClassCode::new(&listed.chain([weight(rest)]).collect::<Vec<_>>(), n as i32)
}

fn fours(p: &[f64]) -> ClassCode {
    let of_three = [p[1], p[0], p[1]];
    let mut rest = 1.0;
    let mut weights: Vec<u64> = Vec::with_capacity(82);
    for group in 0..81 {
        let p = of_three[group % 3] * of_three[group / 3 % 3] * of_three[group / 9 % 3] * of_three[group / 27];
        rest -= p;
        weights.push(weight(p));
    }
    weights.push(weight(rest));
    ClassCode::new(&weights, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codes_are_the_ones_on_the_wire() {
        // A change here breaks every stored stream and every node of another version.
        let mut hash = blake3::Hasher::new();
        for code in &CLASSES.codes {
            hash.update(&code.n.to_le_bytes());
            code.codes.iter().for_each(|code| _ = hash.update(&[code.length]).update(&code.bits.to_le_bytes()));
        }
        CLASSES.bounds.iter().for_each(|bound| _ = hash.update(&bound.to_le_bytes()));
        assert_eq!(&hash.finalize().to_hex()[..16], "e7b90aa57190d65d");
    }

    #[test]
    fn classes_grow_with_the_integers() {
        assert_eq!(CLASSES.bounds.len(), usize::from(LAST) - 1);
        assert!(CLASSES.bounds.is_sorted_by(|a, b| a < b), "{:?}", CLASSES.bounds);
        assert_eq!((class_of(0), class_of(u64::MAX)), (1, LAST));
        assert!(CLASSES.codes.iter().all(|code| (code.n as usize) < MAX_LISTED));
    }

    #[test]
    fn a_class_costs_little_more_than_its_entropy() {
        for class in 1..=LAST_CODE {
            let p = probabilities(class);
            let signed = || p.iter().skip(1).rev().chain(&p).copied();
            let entropy: f64 = signed().filter(|p| *p > 0.0).map(|p| -p * p.log2()).sum();
            let bits = match coding(class) {
                Coding::Zeros => 0.0,
                Coding::Fours(code) => {
                    let of_three = [p[1], p[0], p[1]];
                    let p = |g: usize| of_three[g % 3] * of_three[g / 3 % 3] * of_three[g / 9 % 3] * of_three[g / 27];
                    let listed: f64 = (0..81).map(|g| p(g) * f64::from(code.codes[g].length)).sum();
                    let rest = 1.0 - (0..81).map(p).sum::<f64>();
                    (listed + rest * (f64::from(code.escape().length) + 8.0)) / 4.0
                }
                Coding::Ones { upper, .. } => {
                    let n = upper.n;
                    let p = |k: i32| p[k.unsigned_abs() as usize];
                    let listed: f64 = (-n..=n).map(|k| p(k) * f64::from(upper.codes[(k + n) as usize].length)).sum();
                    let rest = 1.0 - (-n..=n).map(p).sum::<f64>();
                    listed + rest * (f64::from(upper.escape().length) + 16.0)
                }
            };
            // A code has whole bits, which costs more where integers are rarely other than 0.
            let more = if class < 30 { 0.21 } else { 0.0 };
            assert!(bits < entropy * 1.04 + more, "class {class}: {bits} of {entropy}");
        }
    }
}
