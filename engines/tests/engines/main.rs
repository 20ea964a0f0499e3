//! Integration tests, a module for each promise of the crate. The first block of modules holds shared fixtures.
#![cfg(test)]

#[cfg(all(feature = "llama", any(feature = "candle", feature = "mlx")))]
mod beside_llama;
#[cfg(feature = "llama")]
mod kv_rig;
#[cfg(feature = "models")]
mod models;
mod own_process;
mod peers;

mod cancel_handoff;
#[cfg(feature = "candle")]
mod candle;
mod connections;
mod contract;
mod draft_nodes;
#[cfg(feature = "llama")]
mod drafted_replies;
#[cfg(feature = "llama")]
mod embeddings;
#[cfg(feature = "llama")]
mod exact;
#[cfg(feature = "llama")]
mod forged_turns;
#[cfg(feature = "llama")]
mod full_cache;
#[cfg(feature = "llama")]
mod grammar;
mod handoff;
mod hostile_peer;
#[cfg(feature = "llama")]
mod hybrid_handoff;
#[cfg(feature = "llama")]
mod images;
#[cfg(feature = "llama")]
mod kv_architectures;
#[cfg(feature = "llama")]
mod kv_classes;
mod kv_compressed;
#[cfg(feature = "llama")]
mod kv_state;
#[cfg(feature = "llama")]
mod llama_options;
mod load_stream;
#[cfg(feature = "mlx")]
mod mlx;
mod node_tls;
#[cfg(feature = "llama")]
mod other_weights;
#[cfg(feature = "llama")]
#[cfg(feature = "llama")]
mod prompt_logprobs;
mod resume;
#[cfg(feature = "llama")]
mod shared_positions;
mod speculation;
mod stored;
mod streams;
mod system_messages;
mod template_goldens;
#[cfg(feature = "llama")]
mod tiny_models;
#[cfg(feature = "llama")]
mod waiting_for_pulls;
