//! `baton-bench` as a process: its figures, its files, and what it finds wrong. `baton` must lie beside it: Cargo builds it with
//! the tests of the whole workspace, or `cargo build --release` does.
#![cfg(test)]

/// A benchmark's own figures in the file of `--json`.
fn details(json: &std::path::Path) -> serde_json::Value {
    let file: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert!(file["date"].is_string() && file["machine"]["cores"].as_u64() > Some(0), "{file}");
    file["details"].clone()
}

#[cfg(feature = "llama")]
mod backends;
mod compare;
#[cfg(feature = "llama")]
mod handoff;
#[cfg(feature = "llama")]
mod kv_store;
mod many;
mod serve;
#[cfg(feature = "llama")]
mod speculate;
