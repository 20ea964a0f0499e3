//! Why a request is refused. Each dialect writes it in its own error envelope.

use crate::error_code::ErrorCode;

/// A body that this server cannot answer. Always a 400; the message is safe to show to clients.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct InvalidRequest {
    /// The problem, in a full sentence.
    pub message: String,
    /// The path of the wrong field, e.g. `messages[0].content`.
    pub param: Option<String>,
    /// The machine-readable reason, if there is one.
    pub code: Option<ErrorCode>,
}

impl InvalidRequest {
    /// Refuses a field because of its value.
    pub fn at(param: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let param = param.into();
        InvalidRequest { message: format!("Invalid '{param}': {problem}."), param: Some(param), code: None }
    }

    /// Refuses a body without a required field. `advice` is empty, or a sentence.
    pub fn missing(param: impl Into<String>, advice: &str) -> Self {
        let param = param.into();
        let message = format!("'{param}' is missing. {advice}").trim_end().to_owned();
        InvalidRequest { message, param: Some(param), code: None }
    }

    /// Refuses a field that asks for something this server does not do.
    pub fn unsupported(param: impl Into<String>, what: impl std::fmt::Display) -> Self {
        InvalidRequest {
            message: format!("{what} is not supported by this server yet."),
            param: Some(param.into()),
            code: Some(ErrorCode::UnsupportedParameter),
        }
    }

    /// The same, with an advice: what serves instead. It may be empty.
    pub(crate) fn unsupported_but(param: impl Into<String>, what: &str, instead: &str) -> Self {
        match instead {
            "" => InvalidRequest::unsupported(param, what),
            _ => InvalidRequest {
                message: format!("This server does not support {}: {instead}.", within(what)),
                param: Some(param.into()),
                code: Some(ErrorCode::UnsupportedParameter),
            },
        }
    }

    /// Refuses a body as a whole.
    pub fn body(message: impl Into<String>) -> Self {
        InvalidRequest { message: message.into(), param: None, code: None }
    }
}

/// Quotes a client's word for a message, cut to 40 characters.
pub(crate) fn quoted(word: &str) -> String {
    let cut: String = word.chars().take(40).collect();
    format!("\"{}\"", cut.escape_debug())
}

/// A phrase that begins a sentence, as it stands within one. An abbreviation stays as it is.
fn within(phrase: &str) -> String {
    let word = phrase.split_whitespace().next().unwrap_or_default();
    if word.chars().skip(1).any(char::is_uppercase) {
        return phrase.to_owned();
    }
    let mut chars = phrase.chars();
    chars.next().map_or_else(String::new, |first| first.to_lowercase().chain(chars).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phrase_within_a_sentence_keeps_abbreviations() {
        for (phrase, expected) in [
            ("XTC sampling", "XTC sampling"),
            ("DRY sampling ('dry_multiplier')", "DRY sampling ('dry_multiplier')"),
            ("Top-a sampling", "top-a sampling"),
            ("A penalty", "a penalty"),
            ("'stop'", "'stop'"),
            ("", ""),
        ] {
            assert_eq!(within(phrase), expected);
        }
    }
}
