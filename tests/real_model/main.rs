//! Promises that only a real model can show: exact numerics, KV handoffs between processes, grammars, tool calls, images.
//! Each engine computes on one thread: run no more tests at once than there are cores.

mod broken_weights;
mod bundle;
mod cancellation;
mod chat;
mod decode_nodes;
mod demo;
mod dialects;
mod doctor;
mod draft_nodes;
mod engine_recovery;
mod families;
mod fetched_models;
mod generation;
mod handoff;
mod hostile_templates;
mod images;
mod kv_store;
mod lending;
mod llama_server_options;
mod misbehaving_drafts;
mod on_demand_models;
mod prompt_logprobs;
mod rerank;
mod scripted;
mod speculation;
mod split_models;
mod start_up;
mod structured;
mod tools;
mod upstreams;
mod workers;
