//! Whose API a path belongs to, for replies that are made before, or instead of, a dialect's handler.

/// A public API shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's, and llama-server's, which has the same errors.
    OpenAi,
    /// Ollama's.
    Ollama,
    /// Anthropic's.
    Anthropic,
}

impl Dialect {
    /// The dialect of a path, whether or not there is such a route.
    pub fn of(path: &str) -> Dialect {
        let is_under =
            |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        match () {
            () if is_under("/api") => Dialect::Ollama,
            () if is_under("/v1/messages") => Dialect::Anthropic,
            () => Dialect::OpenAi,
        }
    }
}
