//! The inputs of `/v1/completions` and `/v1/embeddings`: a text, an array of tokens, or an array of such inputs.

use schemars::json_schema;
use serde::de::SeqAccess;
use serde_json::Number;

use super::field::Items;
use super::invalid::InvalidRequest;
use super::read::{Read, Reading, ValueProblem, each_item};
use super::schema::described;
use super::values::{EMPTY, NOT_A_TOKEN, NonEmpty, TokenId, Tokens};
use crate::token::Token;

/// A text or its tokens; not empty.
#[derive(Debug)]
pub(crate) enum TextOrTokens {
    Text(String),
    Tokens(Vec<Token>),
}

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
    /// The first `MAX` of the array's `n` inputs.
    Many {
        first: Items<TextOrTokens>,
        n: usize,
    },
}

impl<const MAX: usize> Inputs<MAX> {
    /// Checks the inputs of the field `name`. Error messages call them `nouns`.
    pub(crate) fn check(self, name: &str, nouns: &str) -> Result<Vec<TextOrTokens>, InvalidRequest> {
        match self {
            Inputs::One(input) => Ok(vec![input]),
            Inputs::Many { n, .. } if n > MAX => {
                let problem = format!("must have at most {MAX} {nouns}, but has {n}");
                Err(InvalidRequest::at(name, problem))
            }
            Inputs::Many { first, .. } => first.each(name).map(|input| Ok(input?.1)).collect(),
        }
    }
}

impl<const MAX: usize> Read for Inputs<MAX> {
    const EXPECTED: &'static str = TextOrTokens::EXPECTED;

    fn string(text: &str) -> Reading<Self> {
        TextOrTokens::string(text).map(Inputs::One)
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        let mut array = InputArray::<MAX>::default();
        each_item(items, |item: Reading<InputOrToken>| array.push(item.unwrap_or_else(InputOrToken::wrong_item)))?;
        Ok(array.finish())
    }
}

/// An array that is one input while all its items are numbers.
#[derive(Default)]
struct InputArray<const MAX: usize> {
    n: usize,
    tokens: Vec<Token>,
    /// A number is not a token id.
    has_wrong_number: bool,
    /// The first `MAX` items, once one of them is not a number.
    inputs: Vec<Reading<TextOrTokens>>,
    has_inputs: bool,
}

impl<const MAX: usize> InputArray<MAX> {
    fn push(&mut self, item: InputOrToken) {
        let n_before = self.n;
        self.n += 1;
        let input = match item {
            InputOrToken::Number(token) if !self.has_inputs => {
                self.has_wrong_number |= token.is_none();
                self.tokens.extend(token);
                return;
            }
            InputOrToken::Number(_) => Err(TextOrTokens::wrong("a number")),
            InputOrToken::Input(input) => input,
        };
        if !self.has_inputs {
            self.has_inputs = true;
            self.inputs = (0..n_before.min(MAX)).map(|_| Err(TextOrTokens::wrong("a number"))).collect();
        }
        if self.inputs.len() < MAX {
            self.inputs.push(input);
        }
    }

    fn finish(self) -> Reading<Inputs<MAX>> {
        match self.n {
            0 => Err(ValueProblem::value(EMPTY)),
            n if self.has_inputs => Ok(Inputs::Many { first: self.inputs.into_iter().collect(), n }),
            _ if self.has_wrong_number => Err(ValueProblem::value(NOT_A_TOKEN)),
            _ => Ok(Inputs::One(TextOrTokens::Tokens(self.tokens))),
        }
    }
}

/// An item of an array of tokens or of inputs.
enum InputOrToken {
    /// `None`: the number is not a token id.
    Number(Option<Token>),
    Input(Reading<TextOrTokens>),
}

impl InputOrToken {
    fn wrong_item(problem: ValueProblem) -> Self {
        InputOrToken::Input(Err(problem))
    }
}

impl Read for InputOrToken {
    const EXPECTED: &'static str = TextOrTokens::EXPECTED;
    /// An array keeps all its tokens, but few of its inputs.
    const ROOM: usize = size_of::<Token>();

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
