//! Whose API a path belongs to, for replies that are made before, or instead of, a dialect's handler.

/// A public API shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's, and llama-server's, which has the same errors.
    OpenAi,
    /// Ollama's.
    Ollama,
}

impl Dialect {
    /// The dialect of a path, whether or not there is such a route.
    pub fn of(path: &str) -> Dialect {
        if path == "/api" || path.starts_with("/api/") { Dialect::Ollama } else { Dialect::OpenAi }
    }
}
