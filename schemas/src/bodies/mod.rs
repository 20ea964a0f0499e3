//! What clients may send, as types that say it: the schema of every body in `/openapi.json` is derived from these.
//!
//! Nothing is ever read into them. A dialect's parser reads its body field by field, because it has to name the field
//! at fault and to take what SDKs really send. `tests/bodies.rs` holds both against each other, limit by limit. Fields
//! without effect are not written down, and no body is closed to unknown ones.

pub mod anthropic;
pub mod chat;
pub mod completion;
pub mod embeddings;
pub mod llama_server;
pub mod ollama;
pub mod responses;
pub mod shared;
pub mod tools;
