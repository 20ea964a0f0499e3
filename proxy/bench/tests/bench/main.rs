//! `baton-bench` as a process: its figures, its files, and what it finds wrong. `baton` must lie beside it: Cargo builds it with
//! the tests of the whole workspace, or `cargo build --release` does.
#![cfg(test)]

#[cfg(feature = "llama")]
mod backends;
#[cfg(feature = "llama")]
mod handoff;
#[cfg(feature = "llama")]
mod kv_store;
mod serve;
#[cfg(feature = "llama")]
mod speculate;
