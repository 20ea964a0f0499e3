//! The reply to `POST /v1/completions`: one object, or a stream of chunks of the same shape.

use std::borrow::Cow;
use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use super::chat_response::finish_reason;
use super::logprobs::finite;
use crate::sequence::{FinishReason, GeneratedToken, Logprobs};
use crate::token::Token;

/// One choice, or a step of it in a stream.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct TextChoice<'a> {
    /// The text; in a stream, the new part.
    pub text: Cow<'a, str>,
    /// From 0; the choices of the first prompt come first.
    pub index: u32,
    /// Log-probabilities, if requested.
    pub logprobs: Option<TextLogprobs>,
    /// The prompt's tokens, if `prompt_logprobs` asks for them: null for the first, and for each other one an object that maps
    /// its id and those of the most likely tokens to their log-probabilities.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<Option<BTreeMap<Token, PromptLogprob>>>>,
    /// Null until the choice has ended.
    #[schemars(extend("enum" = ["stop", "length", "content_filter", null]))]
    pub finish_reason: Option<&'static str>,
}

impl<'a> TextChoice<'a> {
    /// A step with text.
    pub fn text(index: u32, text: impl Into<Cow<'a, str>>, logprobs: Option<TextLogprobs>) -> Self {
        TextChoice { text: text.into(), index, logprobs, prompt_logprobs: None, finish_reason: None }
    }

    /// A choice's last chunk.
    pub fn finish(index: u32, reason: FinishReason) -> Self {
        let finish_reason = Some(finish_reason(reason));
        TextChoice { finish_reason, ..TextChoice::text(index, "", None) }
    }
}

/// A token of a prompt, or one that is likely in its place, in vLLM's shape.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct PromptLogprob {
    /// Its log-probability, as natural logarithm.
    pub logprob: f32,
    /// Its place among all tokens by likelihood, from 1; null if its engine does not say it.
    pub rank: Option<u32>,
    /// Its text, with U+FFFD where a character spans tokens.
    pub decoded_token: String,
}

/// The entry of a prompt's token, with at most `n_top` alternatives. `None` for the first token, which nothing predicts.
pub fn prompt_entry(token: &GeneratedToken, n_top: usize) -> Option<BTreeMap<Token, PromptLogprob>> {
    let Logprobs { chosen, rank, top } = token.logprobs.as_ref()?;
    let entry = |bytes: &[u8], logprob: f32, rank: Option<u32>| PromptLogprob {
        logprob: finite(logprob),
        rank,
        decoded_token: String::from_utf8_lossy(bytes).into_owned(),
    };
    let mut entries = BTreeMap::from([(token.id, entry(&token.bytes, *chosen, *rank))]);
    entries.extend(top.iter().zip(1..).take(n_top).map(|(a, rank)| (a.id, entry(&a.bytes, a.logprob, Some(rank)))));
    Some(entries)
}

/// Log-probabilities in OpenAI's older shape: lists of equal length with one entry per token.
#[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema)]
pub struct TextLogprobs {
    /// The tokens' texts, with U+FFFD where a character spans tokens.
    pub tokens: Vec<String>,
    /// The tokens' log-probabilities, as natural logarithms; null for the first token of an echoed prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// The most likely tokens at each position, with their log-probabilities; null where there is none.
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
    /// Each token's offset in the choice's text, in characters.
    pub text_offset: Vec<u32>,
}

/// Converts a number so that JSON shows the digits of the 32-bit float: `token_logprobs` shows the same digits.
fn decimal(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

impl TextLogprobs {
    /// Adds a token with these bytes at `offset` characters, and at most `n_top` alternatives. Returns the offset of the
    /// next token. The first token of a prompt has no log-probabilities.
    pub fn push(&mut self, bytes: &[u8], logprobs: Option<&Logprobs>, n_top: usize, offset: u32) -> u32 {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        self.tokens.push(text(bytes));
        self.token_logprobs.push(logprobs.map(|logprobs| finite(logprobs.chosen)));
        let top = |logprobs: &Logprobs| {
            let top = logprobs.top.iter().take(n_top);
            top.map(|other| (text(&other.bytes), decimal(finite(other.logprob)))).collect()
        };
        self.top_logprobs.push(logprobs.map(top));
        self.text_offset.push(offset);
        // Every byte that is not a UTF-8 continuation byte begins a character.
        let n_begun = bytes.iter().filter(|&byte| byte & 0xC0 != 0x80).count();
        offset.saturating_add(u32::try_from(n_begun).unwrap_or(u32::MAX))
    }

    /// Appends the log-probabilities of later tokens.
    pub fn extend(&mut self, later: TextLogprobs) {
        self.tokens.extend(later.tokens);
        self.token_logprobs.extend(later.token_logprobs);
        self.top_logprobs.extend(later.top_logprobs);
        self.text_offset.extend(later.text_offset);
    }
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;

    use super::*;
    use crate::json_output::SharedFields;
    use crate::openai::chat_response::{ChunkStep, Completion, ReplyHead};
    use crate::openai::usage::{TimingsReport, Usage};
    use crate::sequence::Alternative;

    fn head() -> ReplyHead {
        ReplyHead {
            id: "cmpl-1".into(),
            object: ReplyHead::TEXT,
            created: 1_700_000_000,
            model: "m".into(),
            system_fingerprint: "baton-0".into(),
        }
    }

    #[test]
    fn a_whole_reply_has_openais_shape_and_order() {
        let top = vec![Alternative { id: 1, bytes: b"Yo".to_vec(), logprob: -0.25 }];
        let mut logprobs = TextLogprobs::default();
        let offset = logprobs.push("é".as_bytes(), Some(&Logprobs { chosen: -0.5, rank: None, top }), 1, 4);
        logprobs.push(b"!", Some(&Logprobs { chosen: f32::NEG_INFINITY, rank: None, top: vec![] }), 1, offset);
        let choice = TextChoice { finish_reason: Some("stop"), ..TextChoice::text(0, "é!", Some(logprobs)) };
        let usage = Usage::new(3, 1, 2);
        let reply = Completion { head: head(), choices: vec![choice], usage, timings: TimingsReport::default() };
        assert_eq!(serde_json::to_string_pretty(&reply).unwrap() + "\n", include_str!("golden/text_completion.json"));
    }

    #[test]
    fn a_stream_has_openais_shape_and_order() {
        let shared = SharedFields::of(&head());
        let mut transcript = BytesMut::new();
        let mut write = |choices: &[TextChoice<'_>], usage| {
            shared.write_event(&mut transcript, &ChunkStep { choices, usage, timings: None });
        };
        write(&[TextChoice::text(1, "Hi\n", None)], None);
        write(&[TextChoice::finish(1, FinishReason::Length)], None);
        write(&[], Some(Some(Usage::new(3, 1, 2))));
        assert_eq!(transcript, include_str!("golden/text_chunks.sse"));
    }

    #[test]
    fn a_token_has_one_log_probability_in_both_lists() {
        for logprob in [-0.1, -1.234_567_9, -13.370_001, -1e-7, f32::NEG_INFINITY] {
            let top = vec![Alternative { id: 1, bytes: b"a".to_vec(), logprob }];
            let mut logprobs = TextLogprobs::default();
            logprobs.push(b"a", Some(&Logprobs { chosen: logprob, rank: None, top }), 1, 0);
            let json: Value = serde_json::from_str(&serde_json::to_string(&logprobs).unwrap()).unwrap();
            assert_eq!(json["token_logprobs"][0], json["top_logprobs"][0]["a"]);
        }
    }

    #[test]
    fn offsets_count_characters_even_where_tokens_split_them() {
        let mut logprobs = TextLogprobs::default();
        let mut offset = 0;
        for bytes in ["a".as_bytes(), &[0xF0, 0x9F], &[0x98, 0x80], b"b"] {
            offset = logprobs.push(bytes, Some(&Logprobs { chosen: 0.0, rank: None, top: vec![] }), 1, offset);
        }
        assert_eq!((logprobs.text_offset, offset), (vec![0, 1, 2, 2], 3));
    }
}
