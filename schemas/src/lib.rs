//! Baton's data and bytes: what the other crates exchange.
//!
//! Nothing here runs anything: no tokio, no I/O, no model code. Read in this order: a dialect parses a client's JSON
//! into one [`generate::GenerateRequest`]. The proxy turns that into [`sequence::SequenceRequest`]s for an engine, which
//! answers with [`sequence::SequenceEvent`]s. [`node`] is the protocol that carries both between processes.
//!
//! ```
//! use baton_schemas::openai::ChatRequest;
//!
//! let body = br#"{"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}"#;
//! let drawn_seed = 7;
//! let chat = ChatRequest::parse(body, drawn_seed).unwrap();
//! assert_eq!(chat.generate.max_tokens, Some(8));
//! ```

#![warn(missing_docs)]

pub mod anthropic;
mod cache_scope;
pub mod constraint;
pub mod counted;
pub mod draft;
pub mod embed;
pub mod error;
mod error_code;
pub mod generate;
mod grammar;
pub mod handoff;
pub mod held;
pub mod held_schema;
pub mod image;
pub mod json_output;
pub mod json_values;
pub mod keep_alive;
mod key_tag;
pub mod kv;
pub mod llama_server;
pub mod lm_studio;
pub mod machine_models;
mod message_role;
pub mod model_difference;
pub mod no_handoff;
pub mod node;
mod node_kv;
mod node_texts;
pub mod ollama;
pub mod openai;
pub mod part_name;
pub mod printable;
mod reasoning_effort;
pub mod request;
mod sampling;
pub mod sampling_fields;
pub mod sequence;
mod shared;
pub mod store_report;
pub mod stream_versions;
pub mod streams;
pub mod thinking;
mod thinking_switches;
mod token;
pub mod tools;
pub mod worker;
pub mod written_number;
pub mod written_object;

pub use cache_scope::{CacheScope, ScopeList};
pub use error::EngineError;
pub use error_code::ErrorCode;
pub use generate::GenerateRequest;
pub use key_tag::KeyTag;
pub use message_role::MessageRole;
pub use sequence::{FinishReason, SequenceEvent, SequenceRequest, Token};
