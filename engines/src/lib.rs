//! Engines, which run models, and the ways to reach them.
//!
//! [`Engine`] is the one interface. [`llama`] runs GGUF models with llama.cpp, `candle` in Rust, `mlx` runs folders of
//! safetensors with mlx-lm, [`sim`] simulates a model at configured speeds, [`remote`] is the client of an engine in
//! another process, which [`node`] serves over the node protocol. [`connections`] bounds what peers may do with a server's connections, also for the endpoint.
//! [`handoff`] pulls a prompt's KV from another node; [`transport`] decides which nodes are trusted and what may be
//! sent unencrypted; [`mdns`] announces services on the local network and browses them, and [`proof`] shows which of
//! them have the cluster key. All engines pass one contract suite (`engines/tests/engines/contract`). [`upstream`] is
//! not an engine but a client of servers that speak text instead of tokens (Ollama, llama-server, vLLM, …).
//!
//! ```
//! use baton_engines::Engine;
//! use baton_engines::sim::{SimConfig, SimEngine};
//!
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let engine = SimEngine::new(SimConfig { n_slots: 2, ..SimConfig::default() });
//! let info = engine.info().await.unwrap();
//! assert_eq!(info.n_slots, 2);
//! # });
//! ```

pub mod awake;
#[cfg(feature = "candle")]
pub mod candle;
#[cfg(feature = "models")]
pub mod codec_profile;
pub mod connections;
pub mod embed;
pub mod engine;
pub mod gguf;
pub mod handoff;
pub mod hf;
pub mod limits;
pub mod lines;
#[cfg(feature = "llama")]
pub mod llama;
mod long_json;
pub mod mdns;
#[cfg(feature = "mlx")]
pub mod mlx;
pub mod model_files;
pub mod no_sleep;
pub mod node;
pub mod options;
pub mod proof;
pub mod registry;
pub mod remote;
#[cfg(feature = "models")]
pub mod serving;
pub mod sim;
pub mod template;
pub mod trace;
pub mod transport;
pub mod upstream;
#[cfg(feature = "models")]
mod vocabulary;
#[cfg(feature = "llama")]
pub mod workers;

pub use engine::{EmbedStream, Engine, KvEvent, KvStream, LoadStream, SequenceStream};

/// A log filter in the syntax of `RUST_LOG` that keeps llama.cpp quiet: it logs about a hundred lines for each model it
/// loads, some of its progress as warnings, and its errors reach the log as Baton's.
pub const QUIET_LLAMA: &str = "llama-cpp-2=error,llama_cpp_2=error";
