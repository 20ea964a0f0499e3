//! `baton-bench` as a process: its figures, its files, and what it finds wrong. `baton` must lie beside it: Cargo builds it with
//! the tests of the whole workspace, or `cargo build --release` does.
#![cfg(test)]

/// A benchmark's own figures in the file of `--json`.
fn details(json: &std::path::Path) -> serde_json::Value {
    let file: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert!(file["date"].is_string() && file["machine"]["cores"].as_u64() > Some(0), "{file}");
    file["details"].clone()
}

/// Runs a benchmark, which must succeed, and returns its table.
fn succeed(bench: &mut std::process::Command) -> String {
    let output = bench.stderr(std::process::Stdio::inherit()).output().unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    println!("{table}");
    assert!(output.status.success());
    table
}

#[cfg(feature = "llama")]
mod backends;
mod compare;
#[cfg(feature = "llama")]
mod handoff;
#[cfg(feature = "llama")]
mod kv_store;
#[cfg(feature = "llama")]
mod layers;
mod many;
mod serve;
#[cfg(feature = "llama")]
mod speculate;
