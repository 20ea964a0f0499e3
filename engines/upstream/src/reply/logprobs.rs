//! Log-probabilities as upstreams write them: the tokens of a text.

use std::borrow::Cow;
use std::fmt;

use baton_schemas::sequence::{Alternative, Logprobs};
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::reply::foreign::List;
use crate::{TextToken, UpstreamError};

/// The most tokens in one event, and the most likely ones in place of each: lists of short entries take many times the memory of
/// their text.
const MAX_TOKENS: usize = 1 << 14;
const MAX_TOP: usize = 128;

/// A text that is only copied if it has escapes.
#[derive(Default, Deserialize)]
pub(crate) struct JsonText<'a>(#[serde(borrow)] pub(crate) Cow<'a, str>);

/// A natural logarithm.
#[derive(Clone, Copy, Deserialize)]
#[serde(from = "f64")]
struct Logprob(f32);

impl From<f64> for Logprob {
    fn from(value: f64) -> Logprob {
        // JSON has no infinity, so clients must get a finite number for a token that cannot be.
        Logprob(value.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32)
    }
}

/// A token in the form of OpenAI's chats and of Ollama.
#[derive(Deserialize)]
pub(crate) struct TokenEntry<'a> {
    #[serde(borrow)]
    token: JsonText<'a>,
    /// Missing if the token is whole characters, in some servers.
    bytes: Option<Vec<u8>>,
    logprob: Logprob,
    /// The most likely tokens, in the same form.
    #[serde(borrow)]
    #[serde(default)]
    top_logprobs: List<TokenEntry<'a>, MAX_TOP>,
}

impl From<TokenEntry<'_>> for TextToken {
    fn from(entry: TokenEntry<'_>) -> TextToken {
        let top = entry.top_logprobs.0.into_iter().map(|entry| {
            let TextToken { bytes, logprobs } = entry.into();
            Alternative { id: 0, bytes, logprob: logprobs.chosen }
        });
        let logprobs = Logprobs { chosen: entry.logprob.0, rank: None, top: top.collect() };
        TextToken { bytes: entry.bytes.unwrap_or_else(|| entry.token.0.into_owned().into_bytes()), logprobs }
    }
}

/// The log-probabilities of a chunk, in either form of OpenAI's dialect.
#[derive(Deserialize)]
struct ChunkLogprobs<'a> {
    /// The form of chats: a list of objects. Some servers use it for plain completions, too.
    #[serde(borrow)]
    content: Option<List<TokenEntry<'a>, MAX_TOKENS>>,
    /// The form of plain completions: three lists with an entry for each token.
    #[serde(borrow)]
    tokens: Option<List<JsonText<'a>, MAX_TOKENS>>,
    /// `null` for a token that follows nothing.
    #[serde(default)]
    token_logprobs: List<Option<Logprob>, MAX_TOKENS>,
    #[serde(borrow, default)]
    top_logprobs: List<Option<PositionTop<'a>>, MAX_TOKENS>,
}

/// Reads the log-probabilities of a chunk. Errors: it has another form, or a token without a log-probability.
pub(crate) fn of_chunk(json: &str) -> Result<Vec<TextToken>, UpstreamError> {
    let ChunkLogprobs { content, tokens, token_logprobs, top_logprobs } =
        serde_json::from_str(json).map_err(UpstreamError::malformed)?;
    if let Some(content) = content {
        return Ok(content.0.into_iter().map(TextToken::from).collect());
    }
    let (tokens, chances) = (tokens.unwrap_or_default().0, token_logprobs.0);
    if tokens.len() != chances.len() {
        return Err(UpstreamError::malformed("a token without its log-probability"));
    }
    let tops = top_logprobs.0.into_iter().chain(std::iter::repeat_with(|| None));
    let token = |((text, chance), top): ((JsonText<'_>, Option<Logprob>), Option<PositionTop<'_>>)| {
        let top = top.map(|top| top.0).unwrap_or_default().into_iter().map(Alternative::from).collect();
        let logprobs = Logprobs { chosen: chance?.0, rank: None, top };
        Some(TextToken { bytes: text.0.into_owned().into_bytes(), logprobs })
    };
    Ok(tokens.into_iter().zip(chances).zip(tops).filter_map(token).collect())
}

/// The most likely tokens of a position in a plain completion: an object with a member for each.
struct PositionTop<'a>(Vec<TopMember<'a>>);

struct TopMember<'a> {
    text: JsonText<'a>,
    chance: Logprob,
}

impl From<TopMember<'_>> for Alternative {
    fn from(member: TopMember<'_>) -> Alternative {
        Alternative { id: 0, bytes: member.text.0.into_owned().into_bytes(), logprob: member.chance.0 }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for PositionTop<'a> {
    fn deserialize<D: Deserializer<'de>>(object: D) -> Result<Self, D::Error> {
        struct TopVisitor;

        impl<'de> Visitor<'de> for TopVisitor {
            type Value = PositionTop<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of log-probabilities")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<PositionTop<'de>, A::Error> {
                let mut members = Vec::new();
                while let Some((text, chance)) = object.next_entry()? {
                    if members.len() == MAX_TOP {
                        return Err(A::Error::custom("too many alternatives of a token"));
                    }
                    members.push(TopMember { text, chance });
                }
                Ok(PositionTop(members))
            }
        }

        object.deserialize_map(TopVisitor)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn log_probabilities_are_read_in_both_forms() {
        let chat = json!({ "content": [{
            "token": "A", "logprob": -0.5, "bytes": [65],
            "top_logprobs": [{ "token": "B\n", "logprob": -1.0, "bytes": null }, { "token": "C", "logprob": -1e300 }],
        }] });
        let plain = json!({
            "tokens": ["A"], "token_logprobs": [-0.5], "top_logprobs": [{ "B\n": -1.0, "C": -1e300 }], "text_offset": [0],
        });
        for logprobs in [chat, plain] {
            let read = of_chunk(&logprobs.to_string()).unwrap();
            assert_eq!((read[0].bytes.as_slice(), read[0].logprobs.chosen), (&b"A"[..], -0.5), "{logprobs}");
            let top = read[0].logprobs.top.iter().map(|top| (top.bytes.as_slice(), top.logprob));
            assert_eq!(top.collect::<Vec<_>>(), [(&b"B\n"[..], -1.0), (b"C", f32::MIN)], "{logprobs}");
        }
        let first = json!({ "tokens": ["A"], "token_logprobs": [null] });
        for without in [first, json!({}), json!({ "content": null, "refusal": null }), json!({ "content": [] })] {
            assert_eq!(of_chunk(&without.to_string()).unwrap(), [], "{without}");
        }
    }

    #[test]
    fn what_is_not_a_log_probability_is_an_error() {
        let entry = |extra: Value| {
            let mut entry = json!({ "token": "A", "logprob": -0.5 });
            entry.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            json!({ "content": [entry] })
        };
        for wrong in [
            json!([]),
            json!({ "content": 7 }),
            entry(json!({ "logprob": null })),
            entry(json!({ "bytes": [256] })),
            entry(json!({ "top_logprobs": [{ "token": "B" }] })),
            json!({ "tokens": ["A", "B"], "token_logprobs": [-0.5] }),
            json!({ "tokens": ["A"], "token_logprobs": ["x"] }),
            json!({ "tokens": ["A"], "token_logprobs": [-0.5], "top_logprobs": [{ "B": "often" }] }),
        ] {
            assert!(of_chunk(&wrong.to_string()).is_err(), "{wrong}");
        }
    }
}
