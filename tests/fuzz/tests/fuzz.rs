//! Runs every fuzz target on stable Rust: its seeds, its corpus, and random mutations of both for a bounded time. The
//! sequence of mutations is always the same. `BATON_FUZZ_SECONDS` is the time for all targets together, `BATON_FUZZ_TARGET`
//! the name of the only one to run.
#![cfg(test)]

use std::path::Path;
use std::time::{Duration, Instant};

use baton_fuzz::{FuzzTarget, TARGETS, limits, mutate};
use rand::SeedableRng as _;
use rand::rngs::StdRng;

/// The default time in seconds.
const DEFAULT_SECONDS: f64 = 10.0;

/// The inputs in the target's folder: those that once broke a promise, and those that reach the most code.
fn corpus(target: &FuzzTarget) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let Ok(files) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| (path.display().to_string(), std::fs::read(path).unwrap())).collect()
}

/// Returns whether the input was read to its end. Errors: the input that breaks a promise; the panic's own message is on
/// standard error.
fn check(target: &FuzzTarget, name: &str, input: &[u8]) -> Result<bool, String> {
    let outcome = std::panic::catch_unwind(|| limits::run(target, input));
    outcome.map_err(|_| format!("{}: {name} breaks a promise: {}", target.name, input.escape_ascii()))
}

/// Runs a target for this time, at least its seeds and its corpus.
fn run(target: &FuzzTarget, time: Duration) -> Result<(), String> {
    let mut inputs = (target.seeds)();
    for (i, seed) in inputs.iter().enumerate() {
        // Mutations of accepted inputs reach deep code.
        if !check(target, &format!("seed {i}"), seed)? {
            return Err(format!("{}: seed {i} is refused", target.name));
        }
    }
    for (path, input) in corpus(target) {
        check(target, &path, &input)?;
        inputs.push(input);
    }
    let mut random = StdRng::seed_from_u64(1);
    let since = Instant::now();
    let mut n_mutated = 0;
    while since.elapsed() < time {
        check(target, &format!("mutation {n_mutated}"), &mutate::mutated(&inputs, &mut random))?;
        n_mutated += 1;
    }
    println!("{}: {} inputs and {n_mutated} mutations", target.name, inputs.len());
    Ok(())
}

// One test, because the memory of all threads counts.
#[test]
fn no_input_breaks_a_promise() {
    let seconds = match std::env::var("BATON_FUZZ_SECONDS") {
        Ok(seconds) => seconds.parse().expect("BATON_FUZZ_SECONDS is a number of seconds"),
        Err(_) => DEFAULT_SECONDS,
    };
    let only = std::env::var("BATON_FUZZ_TARGET").ok();
    let targets: Vec<&FuzzTarget> =
        TARGETS.iter().filter(|one| only.as_ref().is_none_or(|name| one.name == name)).collect();
    assert!(!targets.is_empty(), "there is no target {only:?}");
    let each = Duration::from_secs_f64(seconds) / targets.len() as u32;
    let broken: Vec<String> = targets.iter().filter_map(|target| run(target, each).err()).collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}
