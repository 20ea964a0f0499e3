//! Engines: what runs models.
//!
//! [`registry`] starts an engine from its options. llama.cpp, candle and mlx-lm are a loaded model and its KV each;
//! [`sim`] simulates a model at configured speeds. All pass one contract suite (`engines/tests/engines/contract`).
//!
//! ```
//! use baton_engines::sim::{SimConfig, SimEngine};
//! use baton_link::Engine;
//!
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let engine = SimEngine::new(SimConfig { n_slots: 2, ..SimConfig::default() });
//! let info = engine.info().await.unwrap();
//! assert_eq!(info.n_slots, 2);
//! # });
//! ```
//!
//! Rooms in reading order; all but the first two are left out of a build without models:
//!
//! | room | what it has |
//! |---|---|
//! | [`registry`] | all engines, and the one place that starts one |
//! | [`engine_options`] | the options of every engine, declared once |
//! | [`sim`] | the deterministic engine, and links of configured speed |
//! | `serving` | for every engine that computes: the scheduler, slots, sampling, constraints, prompts |
//! | `llama`, `candle`, `mlx` | a loaded model: with llama.cpp, in Rust alone, with mlx-lm in Python |
//! | `workers` | machines that lend their devices to a node that runs llama.cpp |
//! | [`embed`] | order and checks of vectors |
//! | `codec_profile` | a file beside a model, by which its KV is encoded |
//!
//! Of Baton it uses `baton-link` (the [`Engine`](baton_link::Engine) trait, handoffs), `baton-model`, `baton-process`
//! and `baton-schemas`. No other crate may use llama.cpp or candle.

#![cfg_attr(
    not(all(feature = "candle", feature = "llama", feature = "mlx")),
    allow(dead_code, reason = "each engine leaves out a part of what all share")
)]

// The contract suite of the integration tests is a part of the unit tests, too.
#[cfg(test)]
extern crate self as baton_engines;

#[cfg(feature = "candle")]
pub mod candle;
#[cfg(feature = "models")]
pub mod codec_profile;
pub mod embed;
pub mod engine_options;
#[cfg(feature = "llama")]
pub mod llama;
#[cfg(feature = "mlx")]
pub mod mlx;
pub mod registry;
#[cfg(feature = "models")]
pub mod serving;
pub mod sim;
#[cfg(feature = "llama")]
pub mod workers;

/// A log filter in the syntax of `RUST_LOG` that keeps llama.cpp quiet: it logs about a hundred lines for each model it
/// loads, some of its progress as warnings, and its errors reach the log as Baton's.
pub const QUIET_LLAMA: &str = "llama-cpp-2=error,llama_cpp_2=error";
