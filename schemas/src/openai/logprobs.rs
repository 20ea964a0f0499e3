//! Log-probabilities in the shape of chat completions.

use schemars::JsonSchema;
use serde::Serialize;

use crate::sequence::{Alternative, Logprobs};

/// OpenAI's value for tokens that are practically impossible. JSON has no minus infinity.
const IMPOSSIBLE: f32 = -9999.0;

/// The `logprobs` of a choice, or of one of its chunks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema)]
pub struct ChoiceLogprobs {
    /// One entry per token.
    pub content: Vec<TokenLogprob>,
    /// Always null: no model here has a separate channel for refusals.
    pub refusal: Option<()>,
}

/// A generated token.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct TokenLogprob {
    /// The token's text, with U+FFFD where a character spans tokens.
    pub token: String,
    /// The log-probability, as a natural logarithm.
    pub logprob: f32,
    /// The token's exact bytes.
    pub bytes: Vec<u8>,
    /// The most likely tokens at this position, best first.
    pub top_logprobs: Vec<TopLogprob>,
}

/// One of the most likely tokens at a position.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct TopLogprob {
    /// The token's text, with U+FFFD where a character spans tokens.
    pub token: String,
    /// The log-probability, as a natural logarithm.
    pub logprob: f32,
    /// The token's exact bytes.
    pub bytes: Vec<u8>,
}

impl TokenLogprob {
    /// A token with these bytes.
    pub fn new(bytes: &[u8], logprobs: &Logprobs) -> Self {
        TokenLogprob {
            token: String::from_utf8_lossy(bytes).into_owned(),
            logprob: finite(logprobs.chosen),
            bytes: bytes.to_vec(),
            top_logprobs: logprobs.top.iter().map(TopLogprob::new).collect(),
        }
    }
}

impl TopLogprob {
    fn new(alternative: &Alternative) -> Self {
        TopLogprob {
            token: String::from_utf8_lossy(&alternative.bytes).into_owned(),
            logprob: finite(alternative.logprob),
            bytes: alternative.bytes.clone(),
        }
    }
}

pub(super) fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(bytes: &[u8], chosen: f32, top: Vec<Alternative>, expected: &str) {
        let token = TokenLogprob::new(bytes, &Logprobs { chosen, rank: None, top });
        let logprobs = ChoiceLogprobs { content: vec![token], refusal: None };
        assert_eq!(serde_json::to_string(&logprobs).unwrap(), expected);
    }

    #[test]
    fn a_token_is_reported_with_its_bytes() {
        check(
            b"Hi",
            -0.5,
            vec![Alternative { id: 1, bytes: b"Yo".to_vec(), logprob: -0.25 }],
            r#"{"content":[{"token":"Hi","logprob":-0.5,"bytes":[72,105],"top_logprobs":[{"token":"Yo","logprob":-0.25,"bytes":[89,111]}]}],"refusal":null}"#,
        );
        check(
            &[0xF0, 0x9F],
            f32::NEG_INFINITY,
            vec![],
            "{\"content\":[{\"token\":\"\u{FFFD}\",\"logprob\":-9999.0,\"bytes\":[240,159],\"top_logprobs\":[]}],\"refusal\":null}",
        );
    }
}
