//! The errors of compiling and rendering a chat template.

/// Why a template did not compile or render.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The template called `raise_exception`: it does not support these messages.
    #[error("{0}")]
    Rejected(String),
    /// The rendered prompt is longer than the caller can use.
    #[error("the rendered prompt has {} bytes", prompt.len())]
    TooLong {
        /// The prompt.
        prompt: String,
    },
    /// The template does not parse, failed, or exceeded a limit.
    #[error("{0}")]
    Failed(String),
    /// Nothing could render it now: the template and the messages are not at fault. Only renderers in other processes say this.
    #[error("{0}")]
    Unavailable(String),
}
