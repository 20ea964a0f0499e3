//! Runs the fuzz targets' bodies on stable Rust: their seeds, and random mutations of them for a bounded time. The
//! sequence of mutations is always the same. `BATON_FUZZ_SECONDS` is the time for all targets together.
#![cfg(test)]

#[allow(unreachable_pub, dead_code, reason = "a module of the fuzz project too")]
#[path = "../../tests/fuzz/src/bodies.rs"]
mod bodies;
#[allow(unreachable_pub, dead_code, reason = "a module of the fuzz project too")]
#[path = "../../tests/fuzz/src/requests.rs"]
mod requests;
#[allow(unreachable_pub, dead_code, reason = "a module of the fuzz project too")]
#[path = "../../tests/fuzz/src/sample.rs"]
mod sample;

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// The default time in seconds.
const DEFAULT_SECONDS: f64 = 10.0;

/// Values at which arithmetic tends to fail.
const EDGES: [u32; 8] = [0, 1, 0x7F, 0x80, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, u32::MAX];

#[test]
fn no_input_breaks_a_promise() {
    let seconds = match std::env::var("BATON_FUZZ_SECONDS") {
        Ok(seconds) => seconds.parse().expect("BATON_FUZZ_SECONDS is a number of seconds"),
        Err(_) => DEFAULT_SECONDS,
    };
    let each = Duration::from_secs_f64(seconds) / bodies::TARGETS.len() as u32;
    for target in bodies::TARGETS {
        let seeds = (target.seeds)();
        let mut random = StdRng::seed_from_u64(1);
        let since = Instant::now();
        let mut n_inputs = 0;
        while since.elapsed() < each {
            let input = mutated(&seeds, &mut random);
            // Print the input that failed.
            if std::panic::catch_unwind(|| (target.body)(&input)).is_err() {
                panic!("{}: input {n_inputs} breaks a promise: {input:02x?}", target.name);
            }
            n_inputs += 1;
        }
        println!("{}: {n_inputs} inputs", target.name);
        assert!(n_inputs > 0 || each.is_zero());
    }
}

/// Checks that every seed is accepted: mutations of accepted inputs reach deep code.
#[test]
fn seeds_are_taken_to_their_end() {
    for target in bodies::TARGETS {
        for (i, seed) in (target.seeds)().iter().enumerate() {
            assert!((target.body)(seed), "{}: seed {i} is refused", target.name);
        }
    }
}

/// Returns a seed with up to eight changes.
fn mutated(seeds: &[Vec<u8>], random: &mut StdRng) -> Vec<u8> {
    let mut input = seeds[random.random_range(0..seeds.len())].clone();
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
                let other = &seeds[random.random_range(0..seeds.len())];
                let from = random.random_range(0..=other.len());
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
        }
    }
    input
}
