//! The dialect of a path, for errors that are answered before or instead of a dialect's handler.

/// A public API shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's API, and llama-server's, which has the same errors.
    OpenAi,
    /// Ollama's API.
    Ollama,
    /// Anthropic's API.
    Anthropic,
}

impl Dialect {
    /// Returns the dialect of a path, also for paths without a route.
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
