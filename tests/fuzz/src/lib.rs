//! Fuzz targets for everything that reads bytes from outside. See docs/fuzzing.md.
//!
//! A target is a plain function. `tests/fuzz.rs` calls it on stable Rust with the corpora and with random mutations, and
//! `bin/fuzz.rs` lets libFuzzer call it.

mod files;
mod grammars;
pub mod limits;
pub mod mutate;
mod nodes;
mod replies;
mod requests;
// `schemas/tests/kv` includes it as a module of its own.
#[allow(dead_code, unreachable_pub, reason = "schemas/tests/kv uses the rest")]
mod sample;
mod strangers;
mod streams;
mod upstreams;

/// A parser, and inputs to start from.
pub struct FuzzTarget {
    pub name: &'static str,
    /// Panics when a promise is broken. Otherwise returns whether the input was read to its end or refused.
    pub body: fn(&[u8]) -> bool,
    /// Inputs that are read to their end.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// Every target.
pub const TARGETS: [FuzzTarget; 25] = [
    FuzzTarget { name: "kv_reader_raw", body: nodes::kv_reader_raw, seeds: nodes::kv_reader_raw_seeds },
    FuzzTarget { name: "kv_reader", body: nodes::kv_reader, seeds: nodes::kv_reader_seeds },
    FuzzTarget { name: "node_messages", body: nodes::messages, seeds: nodes::messages_seeds },
    FuzzTarget { name: "key_proofs", body: nodes::key_proofs, seeds: nodes::key_proofs_seeds },
    FuzzTarget { name: "stream_client", body: streams::client, seeds: streams::client_seeds },
    FuzzTarget { name: "stream_node", body: streams::node, seeds: streams::node_seeds },
    FuzzTarget { name: "openai_requests", body: requests::openai, seeds: requests::openai_seeds },
    FuzzTarget { name: "anthropic_requests", body: requests::anthropic, seeds: requests::anthropic_seeds },
    FuzzTarget { name: "ollama_requests", body: requests::ollama, seeds: requests::ollama_seeds },
    FuzzTarget { name: "llama_server_requests", body: requests::llama_server, seeds: requests::llama_server_seeds },
    FuzzTarget { name: "grammars", body: grammars::grammars, seeds: grammars::seeds },
    FuzzTarget { name: "upstream_events", body: upstreams::events, seeds: upstreams::events_seeds },
    FuzzTarget { name: "upstream_lines", body: upstreams::lines, seeds: upstreams::lines_seeds },
    FuzzTarget { name: "upstream_replies", body: upstreams::replies, seeds: upstreams::replies_seeds },
    FuzzTarget { name: "upstream_errors", body: upstreams::errors, seeds: upstreams::errors_seeds },
    FuzzTarget { name: "model_replies", body: replies::model_replies, seeds: replies::seeds },
    FuzzTarget { name: "upstream_models", body: upstreams::models, seeds: upstreams::models_seeds },
    FuzzTarget { name: "gguf", body: files::gguf, seeds: files::gguf_seeds },
    FuzzTarget { name: "safetensors", body: files::safetensors, seeds: files::safetensors_seeds },
    FuzzTarget { name: "config", body: files::config, seeds: files::config_seeds },
    FuzzTarget { name: "conversations", body: files::conversations, seeds: files::conversations_seeds },
    FuzzTarget { name: "templates", body: files::templates, seeds: files::templates_seeds },
    FuzzTarget { name: "template_values", body: files::template_values, seeds: files::template_values_seeds },
    FuzzTarget { name: "mdns_records", body: strangers::mdns_records, seeds: strangers::mdns_seeds },
    FuzzTarget { name: "pairing_records", body: strangers::pairing_records, seeds: strangers::pairing_seeds },
];

/// The target of this name.
pub fn target(name: &str) -> Option<&'static FuzzTarget> {
    const { &TARGETS }.iter().find(|target| target.name == name)
}
