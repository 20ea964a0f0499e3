//! llama-server's own routes. The JSON itself is in `baton_schemas::llama_server`.

pub mod state;
pub mod text;
