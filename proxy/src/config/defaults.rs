//! Defaults and names that the command line shows, too.

/// The environment variable of `--api-key`.
pub const API_KEY_VARIABLE: &str = "BATON_API_KEY";

/// Loopback: other machines reach the endpoint only if the operator says so.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:8080";

/// Where Ollama's clients look by themselves. Not listened to unless asked: an Ollama may be running there.
pub const OLLAMA_LISTEN: &str = "127.0.0.1:11434";

/// The embedded default: small enough for any machine, with a licence that lets anyone use it.
pub const DEFAULT_MODEL: &str = "smollm2";
