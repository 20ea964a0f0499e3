//! Anthropic's error envelope.

use bytes::BytesMut;
use schemars::JsonSchema;
use serde::Serialize;

use crate::error_code::ErrorCode;
use crate::json_output::{TypedEvent, write_typed_event};
use crate::openai::{ErrorBody, ErrorKind};

/// `{"type":"error","error":{…}}`: a whole reply, or the last event of a stream that failed after its head.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "AnthropicError")]
pub struct AnthropicErrorReply {
    #[serde(rename = "type")]
    #[schemars(extend("const" = "error"))]
    kind: &'static str,
    error: Detail,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "AnthropicErrorBody")]
struct Detail {
    #[serde(rename = "type")]
    kind: &'static str,
    message: String,
}

impl TypedEvent for AnthropicErrorReply {
    fn name(&self) -> &'static str {
        self.kind
    }
}

impl AnthropicErrorReply {
    /// Converts an error for a reply with this HTTP status.
    pub fn new(status: u16, error: ErrorBody) -> Self {
        let kind = match (status, error.kind) {
            (413, _) => "request_too_large",
            (_, ErrorKind::InvalidRequest | ErrorKind::NotSupported) => "invalid_request_error",
            (_, ErrorKind::Authentication) => "authentication_error",
            (_, ErrorKind::Permission) => "permission_error",
            (_, ErrorKind::NotFound) => "not_found_error",
            (_, ErrorKind::RateLimit) => "rate_limit_error",
            (_, ErrorKind::Unavailable) => "overloaded_error",
            (_, ErrorKind::Server) => "api_error",
        };
        // Clients match on these words, and then compact the conversation.
        let message = match (error.code, error.n_prompt_tokens, error.n_ctx) {
            (Some(ErrorCode::ContextLengthExceeded), Some(n_prompt), Some(n_ctx)) => {
                format!("prompt is too long: {n_prompt} tokens > {n_ctx} maximum. {}", error.message)
            }
            (Some(ErrorCode::ContextLengthExceeded), ..) => format!("prompt is too long: {}", error.message),
            _ => error.message,
        };
        AnthropicErrorReply { kind: "error", error: Detail { kind, message } }
    }

    /// Writes the error as the last event of a stream.
    pub fn write_event(&self, out: &mut BytesMut) {
        write_typed_event(out, self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_has_a_type_that_the_sdk_knows() {
        let check = |status, kind, expected: &str| {
            let json = serde_json::to_string(&AnthropicErrorReply::new(status, ErrorBody::new(kind, "Oh."))).unwrap();
            assert_eq!(json, format!(r#"{{"type":"error","error":{{"type":"{expected}","message":"Oh."}}}}"#));
        };
        check(400, ErrorKind::InvalidRequest, "invalid_request_error");
        check(413, ErrorKind::InvalidRequest, "request_too_large");
        check(401, ErrorKind::Authentication, "authentication_error");
        check(404, ErrorKind::NotFound, "not_found_error");
        check(429, ErrorKind::RateLimit, "rate_limit_error");
        check(500, ErrorKind::Server, "api_error");
        check(503, ErrorKind::Unavailable, "overloaded_error");
    }

    #[test]
    fn a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for() {
        let error = ErrorBody::new(ErrorKind::InvalidRequest, "It exceeds 8.").code(ErrorCode::ContextLengthExceeded);
        let said = |error| AnthropicErrorReply::new(400, error).error.message;
        assert_eq!(said(error.clone()), "prompt is too long: It exceeds 8.");
        let counted = ErrorBody { n_prompt_tokens: Some(9), n_ctx: Some(8), ..error };
        assert_eq!(said(counted), "prompt is too long: 9 tokens > 8 maximum. It exceeds 8.");
    }
}
