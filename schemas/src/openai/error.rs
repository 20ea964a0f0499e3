//! OpenAI's error envelope.

use schemars::JsonSchema;
use serde::Serialize;

use crate::error_code::ErrorCode;
use crate::request::InvalidRequest;

/// The class of an error: the `type` of OpenAI's error envelope.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub enum ErrorKind {
    /// 400, 405, 408, 413, 415: the request is wrong.
    #[serde(rename = "invalid_request_error")]
    InvalidRequest,
    /// 401.
    #[serde(rename = "authentication_error")]
    Authentication,
    /// 403.
    #[serde(rename = "permission_error")]
    Permission,
    /// 404.
    #[serde(rename = "not_found_error")]
    NotFound,
    /// 429.
    #[serde(rename = "rate_limit_error")]
    RateLimit,
    /// 500.
    #[serde(rename = "server_error")]
    Server,
    /// 501.
    #[serde(rename = "not_supported_error")]
    NotSupported,
    /// 503.
    #[serde(rename = "unavailable_error")]
    Unavailable,
}

/// The object under `error`. The first four keys are always present: clients rely on them.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct ErrorBody {
    /// The message, for people.
    pub message: String,
    /// The class, for programs.
    #[serde(rename = "type")]
    pub kind: ErrorKind,
    /// The path of the wrong field, e.g. `messages[0].content`.
    pub param: Option<String>,
    /// The exact reason, for programs; null if the class says enough.
    #[schemars(with = "Option<String>")]
    pub code: Option<ErrorCode>,
    /// On context overflow: tokens in the prompt. Agents use it to decide how much of a conversation to compact.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_prompt_tokens: Option<u32>,
    /// On context overflow: tokens that one sequence can hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_ctx: Option<u32>,
}

impl ErrorBody {
    /// Creates an error without a field or a code.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        ErrorBody { message: message.into(), kind, param: None, code: None, n_prompt_tokens: None, n_ctx: None }
    }

    /// Adds a code.
    pub fn code(self, code: ErrorCode) -> Self {
        ErrorBody { code: Some(code), ..self }
    }

    /// Adds the path of the wrong field.
    pub fn param(self, param: impl Into<String>) -> Self {
        ErrorBody { param: Some(param.into()), ..self }
    }
}

impl From<InvalidRequest> for ErrorBody {
    fn from(invalid: InvalidRequest) -> Self {
        ErrorBody {
            param: invalid.param,
            code: invalid.code,
            ..ErrorBody::new(ErrorKind::InvalidRequest, invalid.message)
        }
    }
}

/// `{"error": …}`: a whole reply, or one event of a stream that failed after its head.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "OpenAiError")]
pub struct ErrorEnvelope {
    /// The error.
    pub error: ErrorBody,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(error: ErrorBody, expected: &str) {
        assert_eq!(serde_json::to_string(&ErrorEnvelope { error }).unwrap(), expected);
    }

    #[test]
    fn the_four_keys_are_always_there() {
        check(
            ErrorBody::new(ErrorKind::Server, "Oh."),
            r#"{"error":{"message":"Oh.","type":"server_error","param":null,"code":null}}"#,
        );
        check(
            InvalidRequest::at("n", "must be at least 1").into(),
            r#"{"error":{"message":"Invalid 'n': must be at least 1.","type":"invalid_request_error","param":"n","code":null}}"#,
        );
        check(
            InvalidRequest::unsupported("tools", "Tool calling").into(),
            r#"{"error":{"message":"Tool calling is not supported by this server yet.","type":"invalid_request_error","param":"tools","code":"unsupported_parameter"}}"#,
        );
        let overflow =
            ErrorBody { n_prompt_tokens: Some(9), n_ctx: Some(8), ..ErrorBody::new(ErrorKind::InvalidRequest, "Big.") };
        check(
            overflow.code(ErrorCode::ContextLengthExceeded).param("messages"),
            r#"{"error":{"message":"Big.","type":"invalid_request_error","param":"messages","code":"context_length_exceeded","n_prompt_tokens":9,"n_ctx":8}}"#,
        );
    }
}
