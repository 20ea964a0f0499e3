//! Why a template does not render.

/// Why a template did not render.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The template called `raise_exception`: these messages do not suit this model.
    #[error("{0}")]
    Rejected(String),
    /// The rendered prompt is longer than the caller can use.
    #[error("the rendered prompt has {n_bytes} bytes")]
    TooLong {
        /// Its length in UTF-8.
        n_bytes: usize,
    },
    /// The template does not parse, or failed.
    #[error("{0}")]
    Failed(String),
}
