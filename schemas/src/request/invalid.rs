//! Why a body cannot be answered. Dialects dress it in their own envelopes.

/// A body that is not a request this server can answer. Always a 400; safe to show.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct InvalidRequest {
    /// The problem, in a full sentence.
    pub message: String,
    /// The field at fault, e.g. `messages[0].content`.
    pub param: Option<String>,
    /// A stable word for programs, e.g. `unsupported_parameter`.
    pub code: Option<&'static str>,
}

impl InvalidRequest {
    /// A field whose value is wrong.
    pub fn at(param: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let param = param.into();
        InvalidRequest { message: format!("Invalid '{param}': {problem}."), param: Some(param), code: None }
    }

    /// A field that asks for something this server does not do.
    pub fn unsupported(param: impl Into<String>, what: impl std::fmt::Display) -> Self {
        InvalidRequest {
            message: format!("{what} is not supported by this server yet."),
            param: Some(param.into()),
            code: Some("unsupported_parameter"),
        }
    }

    /// A body that is wrong as a whole.
    pub fn body(message: impl Into<String>) -> Self {
        InvalidRequest { message: message.into(), param: None, code: None }
    }
}
