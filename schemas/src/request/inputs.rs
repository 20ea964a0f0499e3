//! The inputs of `/v1/completions` and `/v1/embeddings`: a text, an array of tokens, or an array of such inputs.

use schemars::json_schema;
use serde::de::SeqAccess;
use serde_json::Number;

use super::field::Items;
use super::invalid::InvalidRequest;
use super::read::{Read, Reading, ValueProblem, each_item};
use super::schema::described;
use super::values::{NOT_A_TOKEN, NonEmpty, TokenId, Tokens};
use crate::token::Token;

/// A text or its tokens; not empty.
#[derive(Debug)]
pub(crate) enum TextOrTokens {
    Text(String),
    Tokens(Vec<Token>),
}

const EMPTY: &str = "must not be empty";

impl Read for TextOrTokens {
    const EXPECTED: &'static str = "a string or an array of tokens";

    fn string(text: &str) -> Reading<Self> {
        if text.is_empty() { Err(ValueProblem::value(EMPTY)) } else { Ok(TextOrTokens::Text(text.to_owned())) }
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        Ok(Tokens::array(items)?.and_then(|Tokens(tokens)| match tokens.is_empty() {
            true => Err(ValueProblem::value(EMPTY)),
            false => Ok(TextOrTokens::Tokens(tokens)),
        }))
    }
}

/// One input, or an array of at most `MAX`.
#[derive(Debug)]
pub(crate) enum Inputs<const MAX: usize> {
    One(TextOrTokens),
    Many(Items<TextOrTokens>),
}

impl<const MAX: usize> Inputs<MAX> {
    /// Checks the inputs of the field `name`. Error messages call them `nouns`.
    pub(crate) fn check(self, name: &str, nouns: &str) -> Result<Vec<TextOrTokens>, InvalidRequest> {
        match self {
            Inputs::One(input) => Ok(vec![input]),
            Inputs::Many(inputs) if inputs.len() > MAX => {
                let problem = format!("must be at most {MAX} {nouns}, but is {}", inputs.len());
                Err(InvalidRequest::at(name, problem))
            }
            Inputs::Many(inputs) => inputs.each(name).map(|input| Ok(input?.1)).collect(),
        }
    }
}

impl<const MAX: usize> Read for Inputs<MAX> {
    const EXPECTED: &'static str = TextOrTokens::EXPECTED;

    fn string(text: &str) -> Reading<Self> {
        TextOrTokens::string(text).map(Inputs::One)
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        let mut read = Vec::new();
        each_item(items, |item: Reading<InputOrToken>| read.extend(item.ok()))?;
        if read.is_empty() {
            return Ok(Err(ValueProblem::value(EMPTY)));
        }
        if read.iter().all(|item| matches!(item, InputOrToken::Number(_))) {
            let tokens = read.into_iter().map(|item| if let InputOrToken::Number(token) = item { token } else { None });
            let tokens = tokens.collect::<Option<Vec<Token>>>().ok_or_else(|| ValueProblem::value(NOT_A_TOKEN));
            return Ok(tokens.map(|tokens| Inputs::One(TextOrTokens::Tokens(tokens))));
        }
        let inputs = read.into_iter().map(|item| match item {
            InputOrToken::Number(_) => Err(TextOrTokens::wrong("a number")),
            InputOrToken::Input(input) => input,
        });
        Ok(Ok(Inputs::Many(inputs.collect())))
    }
}

/// An item of an array of tokens or of inputs.
enum InputOrToken {
    /// `None`: the number is not a token id.
    Number(Option<Token>),
    Input(Reading<TextOrTokens>),
}

impl Read for InputOrToken {
    const EXPECTED: &'static str = TextOrTokens::EXPECTED;

    fn null() -> Reading<Self> {
        Ok(InputOrToken::Input(TextOrTokens::null()))
    }

    fn boolean(value: bool) -> Reading<Self> {
        Ok(InputOrToken::Input(TextOrTokens::boolean(value)))
    }

    fn number(number: &Number) -> Reading<Self> {
        Ok(InputOrToken::Number(TokenId::number(number).ok().map(|token| token.0)))
    }

    fn string(text: &str) -> Reading<Self> {
        Ok(InputOrToken::Input(TextOrTokens::string(text)))
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        Ok(Ok(InputOrToken::Input(TextOrTokens::array(items)?)))
    }

    fn object<'de, A: serde::de::MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(Ok(InputOrToken::Input(TextOrTokens::object(fields)?)))
    }
}

described!([const MAX: usize] Inputs<MAX>: |generator| {
    let text = generator.subschema_for::<NonEmpty>();
    let tokens = json_schema!({
        "description": "A text as tokens.",
        "type": "array", "items": generator.subschema_for::<TokenId>(), "minItems": 1,
    });
    let many = json_schema!({
        "description": "Several inputs.",
        "type": "array", "items": { "anyOf": [text, tokens] }, "minItems": 1, "maxItems": MAX,
    });
    json_schema!({ "anyOf": [text, tokens, many] })
});
