//! Text as servers write it.

use std::borrow::Cow;
use std::fmt;

use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{ForeignObject, ForeignWord, members};
use crate::LeftOut;

/// Text: a string, or a list of parts. Strict: another type is an error.
#[derive(Debug, Default)]
pub(crate) enum Said<'a> {
    #[default]
    Nothing,
    /// Only copied if it has escapes.
    Text(Cow<'a, str>),
    Parts(Vec<SaidPart>),
}

/// A part of a text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum SaidPart {
    Text(String),
    Reasoning(String),
    Refusal(String),
    LeftOut(LeftOut),
}

impl Said<'_> {
    pub(crate) fn is_empty(&self) -> bool {
        match self {
            Said::Nothing => true,
            Said::Text(text) => text.is_empty(),
            Said::Parts(parts) => parts.is_empty(),
        }
    }

    /// This, or the other if this is empty.
    pub(crate) fn or(self, other: Self) -> Self {
        if self.is_empty() { other } else { self }
    }

    /// All texts of a field that holds text of one kind. `None` if there is none.
    pub(crate) fn joined(self) -> Option<String> {
        let text = match self {
            Said::Nothing => return None,
            Said::Text(text) => text.into_owned(),
            Said::Parts(parts) => parts.iter().map(SaidPart::text).collect(),
        };
        Some(text).filter(|text| !text.is_empty())
    }
}

impl SaidPart {
    fn text(&self) -> &str {
        match self {
            SaidPart::Text(text) | SaidPart::Reasoning(text) | SaidPart::Refusal(text) => text,
            SaidPart::LeftOut(_) => "",
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Said<'a> {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        struct SaidVisitor;

        impl<'de> Visitor<'de> for SaidVisitor {
            type Value = Said<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, or a list of its parts")
            }

            fn visit_unit<E>(self) -> Result<Said<'de>, E> {
                Ok(Said::Nothing)
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Said<'de>, E> {
                Ok(Said::Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Said<'de>, E> {
                Ok(Said::Text(Cow::Owned(text.to_owned())))
            }

            fn visit_string<E>(self, text: String) -> Result<Said<'de>, E> {
                Ok(Said::Text(Cow::Owned(text)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Said<'de>, A::Error> {
                let mut parts = Vec::new();
                while let Some(PartOfText(part)) = list.next_element()? {
                    push(&mut parts, part);
                }
                Ok(Said::Parts(parts))
            }
        }

        value.deserialize_any(SaidVisitor)
    }
}

/// Adds a part. Neighbours of the same kind are joined, and none is empty.
fn push(parts: &mut Vec<SaidPart>, part: SaidPart) {
    match (parts.last_mut(), part) {
        (Some(SaidPart::Text(last)), SaidPart::Text(more))
        | (Some(SaidPart::Reasoning(last)), SaidPart::Reasoning(more))
        | (Some(SaidPart::Refusal(last)), SaidPart::Refusal(more)) => last.push_str(&more),
        (Some(SaidPart::LeftOut(last)), SaidPart::LeftOut(more)) if *last == more => {}
        (_, SaidPart::Text(text) | SaidPart::Reasoning(text) | SaidPart::Refusal(text)) if text.is_empty() => {}
        (_, part) => parts.push(part),
    }
}

/// A part: a string, or an object whose type says what its text is.
struct PartOfText(SaidPart);

/// A part's members in all known forms: OpenAI's `text`, `output_text` and `refusal`, Mistral's and Anthropic's `thinking`,
/// OpenRouter's `summary`.
#[derive(Default, Deserialize)]
struct PartObject<'a> {
    #[serde(default, rename = "type")]
    kind: ForeignWord,
    #[serde(borrow, default)]
    text: Said<'a>,
    #[serde(borrow, default)]
    thinking: Said<'a>,
    #[serde(borrow, default)]
    refusal: Said<'a>,
    /// The text of a part of reasoning that is summarised.
    #[serde(borrow, default)]
    summary: Said<'a>,
}

impl<'de: 'a, 'a> ForeignObject<'de> for PartObject<'a> {
    const ASIDE: &'static [&'static str] = &["type"];
}

impl PartObject<'_> {
    fn part(self) -> SaidPart {
        let PartObject { kind, text, thinking, refusal, summary } = self;
        if let Some(thinking) = thinking.or(summary).joined() {
            return SaidPart::Reasoning(thinking);
        }
        if let Some(refusal) = refusal.joined() {
            return SaidPart::Refusal(refusal);
        }
        let text = text.joined();
        match kind.0.as_str() {
            "thinking" | "reasoning" | "reasoning_text" | "summary_text" => {
                SaidPart::Reasoning(text.unwrap_or_default())
            }
            "text" | "output_text" | "refusal" | "" => SaidPart::Text(text.unwrap_or_default()),
            kind => text.map_or(SaidPart::LeftOut(LeftOut::of_part(kind)), SaidPart::Text),
        }
    }
}

impl<'de> Deserialize<'de> for PartOfText {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        struct PartVisitor;

        impl<'de> Visitor<'de> for PartVisitor {
            type Value = PartOfText;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a part of a text")
            }

            fn visit_unit<E>(self) -> Result<PartOfText, E> {
                Ok(PartOfText(SaidPart::Text(String::new())))
            }

            fn visit_str<E>(self, text: &str) -> Result<PartOfText, E> {
                Ok(PartOfText(SaidPart::Text(text.to_owned())))
            }

            fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<PartOfText, A::Error> {
                members::read::<PartObject<'_>, _>(object).map(|part| PartOfText(part.part()))
            }
        }

        value.deserialize_any(PartVisitor)
    }
}
