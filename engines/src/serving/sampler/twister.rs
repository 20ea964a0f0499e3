//! The first number of a Mersenne Twister.

/// The length of the state (MT19937: Matsumoto and Nishimura 1998).
const N: usize = 624;
const M: usize = 397;

/// A number of [0, 1): the first of C++'s `std::uniform_real_distribution<double>(0, 1)` over `std::mt19937(seed)`, which
/// llama.cpp draws with.
pub(super) fn uniform(seed: u32) -> f64 {
    let mut state = [0u32; N];
    state[0] = seed;
    for i in 1..N {
        let before = state[i - 1];
        state[i] = 1_812_433_253u32.wrapping_mul(before ^ (before >> 30)).wrapping_add(i as u32);
    }
    let output = |i: usize| {
        let mixed = (state[i] & 0x8000_0000) | (state[i + 1] & 0x7FFF_FFFF);
        let mut y = state[i + M] ^ (mixed >> 1) ^ if mixed & 1 == 1 { 0x9908_B0DF } else { 0 };
        y ^= y >> 11;
        y ^= (y << 7) & 0x9D2C_5680;
        y ^= (y << 15) & 0xEFC6_0000;
        y ^ (y >> 18)
    };
    // The lower half first. 64 bits can round up to 1.
    let sum = f64::from(output(0)) + f64::from(output(1)) * 4_294_967_296.0;
    (sum / 18_446_744_073_709_551_616.0).min(1.0f64.next_down())
}

#[cfg(test)]
mod tests {
    use super::uniform;

    #[test]
    fn the_first_numbers_are_those_of_cpp() {
        // The first outputs of mt19937(5489) are 3499211612 and 581869302.
        let expected = (3_499_211_612.0 + 581_869_302.0 * 4_294_967_296.0) / 18_446_744_073_709_551_616.0;
        assert_eq!(uniform(5_489), expected);
    }
}
