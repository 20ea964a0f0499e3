//! The errors of compiling and rendering a chat template.

/// Why a template did not compile or render.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The template called `raise_exception`: it does not support these messages.
    #[error("{0}")]
    Rejected(String),
    /// The rendered prompt is longer than the caller can use.
    #[error("the rendered prompt has {n_bytes} bytes")]
    TooLong {
        /// Its length in UTF-8, bytes.
        n_bytes: usize,
    },
    /// The template does not parse, failed, or exceeded a limit.
    #[error("{0}")]
    Failed(String),
}
