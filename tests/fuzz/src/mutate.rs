//! Random changes of inputs, for a run without libFuzzer.

use rand::RngExt as _;
use rand::rngs::StdRng;

/// Values at which arithmetic tends to fail.
const EDGES: [u32; 8] = [0, 1, 0x7F, 0x80, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, u32::MAX];

/// Draws an input. Of three the shortest: a few long ones, such as what once became gigabytes, would take most of the time.
fn drawn<'a>(inputs: &'a [Vec<u8>], random: &mut StdRng) -> &'a [u8] {
    let [one, two, three] = [(); 3].map(|()| &inputs[random.random_range(0..inputs.len())]);
    [one, two, three].into_iter().min_by_key(|input| input.len()).unwrap_or(one)
}

/// Returns an input with up to eight changes.
pub fn mutated(inputs: &[Vec<u8>], random: &mut StdRng) -> Vec<u8> {
    let mut input = drawn(inputs, random).to_vec();
    for _ in 0..random.random_range(1..=8) {
        let at = random.random_range(0..=input.len());
        let end = (at + random.random_range(1..=16)).min(input.len());
        match random.random_range(0..6) {
            0 if at < input.len() => input[at] ^= 1 << random.random_range(0..8),
            1 if at < input.len() => input[at] = random.random(),
            2 => {
                let edge = EDGES[random.random_range(0..EDGES.len())].to_le_bytes();
                input[at..end].iter_mut().zip(edge).for_each(|(byte, edge)| *byte = edge);
            }
            3 => drop(input.drain(at..end)),
            4 => {
                let repeated = input[at..end].to_vec();
                input.splice(at..at, repeated);
            }
            _ => {
                let other = drawn(inputs, random);
                let from = random.random_range(0..=other.len());
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
        }
    }
    input
}
