//! Codes of tokens: 64 signs each, of which any two differ in at least 24, so no two tokens are confused.
//!
//! The code is the extended BCH code (64, 16, 24): Bose and Ray-Chaudhuri, "On a class of error correcting binary group
//! codes" (1960). Products of the codes of different tokens are at most 16, those of equal ones 64.

/// Signs of a code.
pub(super) const N_CODE: usize = 64;

/// Tokens that have a code.
pub(super) const MAX_TOKENS: usize = 1 << 16;

/// The generator of the code's 63 cyclic bits, which has degree 47.
const GENERATOR: u64 = 0o6_331_141_367_235_453;
const DEGREE: u32 = 47;

/// The signs of a token.
pub(super) fn signs(token: usize) -> [f32; N_CODE] {
    assert!(token < MAX_TOKENS, "the script has more than {MAX_TOKENS} tokens");
    let message = (token as u64) << DEGREE;
    let mut remainder = message;
    for bit in (DEGREE..63).rev() {
        if remainder >> bit & 1 == 1 {
            remainder ^= GENERATOR << (bit - DEGREE);
        }
    }
    let cyclic = message | remainder;
    let word = cyclic << 1 | u64::from(cyclic.count_ones() & 1);
    std::array::from_fn(|bit| if word >> bit & 1 == 1 { -1.0 } else { 1.0 })
}

pub(super) fn product(a: &[f32; N_CODE], b: &[f32; N_CODE]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_of_the_first_tokens_are_close() {
        let codes: Vec<_> = (0..1000).map(signs).collect();
        for (at, code) in codes.iter().enumerate() {
            let closest = codes[..at].iter().map(|other| product(code, other)).fold(f32::MIN, f32::max);
            assert!(closest <= 16.0, "{closest}");
        }
    }
}
