//! Engines run models; this crate holds them and the ways to reach them.
//!
//! [`Engine`] is the one interface. [`llama`] runs GGUF models through llama.cpp, [`sim`] plays a model at configured
//! speeds, [`remote`] is an engine in another process, reached over the node protocol that [`node`] serves around any
//! engine. [`handoff`] pulls a prompt's KV from another node, [`transport`] says what clients of nodes trust. All
//! engines pass one contract suite (`engines/tests/engines/contract`). [`upstream`] is no engine: a client of servers
//! that speak text instead of tokens (Ollama, llama-server, vLLM, …).

pub mod embed;
pub mod engine;
pub mod gguf;
pub mod handoff;
pub mod limits;
mod lines;
#[cfg(feature = "llama")]
pub mod llama;
pub mod node;
pub mod registry;
pub mod remote;
pub mod sim;
pub mod template;
pub mod trace;
pub mod transport;
pub mod upstream;

pub use engine::{EmbedStream, Engine, KvEvent, KvStream, LoadStream, SequenceStream};

/// A log filter, as of `RUST_LOG`, for llama.cpp's own lines: it says a hundred for each model that it loads, some of its
/// progress as warnings, and its errors come back as ours.
pub const QUIET_LLAMA: &str = "llama-cpp-2=error,llama_cpp_2=error";
