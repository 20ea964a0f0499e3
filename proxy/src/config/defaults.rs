//! Defaults and names that the command line shows, too.

/// The key that commands present to an endpoint. `baton serve` does not take it as its own: whoever calls one endpoint and starts
/// another must not lock the second with the key of the first.
pub const API_KEY_VARIABLE: &str = "BATON_API_KEY";

/// The key that `baton serve` wants to see, if it is to have one: the environment variable of its `--api-key`.
pub const OWN_KEY_VARIABLE: &str = "BATON_SERVE_API_KEY";

/// Loopback: other machines reach the endpoint only if the operator says so.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:8080";

/// Where Ollama's clients look by themselves. Not listened to unless asked: an Ollama may be running there.
pub const OLLAMA_LISTEN: &str = "127.0.0.1:11434";

/// The embedded default: small enough for any machine, with a licence that lets anyone use it.
pub const DEFAULT_MODEL: &str = "smollm2";
