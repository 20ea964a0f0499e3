//! `stop`: strings that end the generation.

use schemars::json_schema;
use serde::de::SeqAccess;

use super::read::{Read, Reading, ValueProblem, each_item};
use super::schema::described;

/// Each stop string costs a search at every token. OpenAI allows 4; users of llama-server send more.
const MAX_STOPS: usize = 16;
/// Text that may begin a stop string is held back, so long stop strings delay the stream.
const MAX_STOP_CHARS: usize = 1024;

/// One stop string, or several. The reply ends before the first that occurs.
#[derive(Debug, Default)]
pub(crate) struct StopStrings(pub(crate) Vec<String>);

impl Read for StopStrings {
    const EXPECTED: &'static str = "a string or an array of strings";

    fn string(text: &str) -> Reading<Self> {
        Ok(StopStrings(vec![StopString::string(text)?.0]))
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        let mut n = 0;
        let mut stops = Ok(Vec::new());
        each_item(items, |item: Reading<StopString>| {
            n += 1;
            match (&mut stops, item) {
                (Ok(stops), Ok(stop)) => stops.push(stop.0),
                (Ok(_), Err(problem)) => stops = Err(problem),
                (Err(_), _) => {}
            }
        })?;
        if n > MAX_STOPS {
            return Ok(Err(ValueProblem::Value(format!("must have at most {MAX_STOPS} entries, but has {n}"))));
        }
        Ok(stops.map(StopStrings))
    }
}

struct StopString(String);

impl Read for StopString {
    const EXPECTED: &'static str = StopStrings::EXPECTED;

    fn string(text: &str) -> Reading<Self> {
        if text.is_empty() {
            return Err(ValueProblem::value("must not have an empty string"));
        }
        if text.chars().nth(MAX_STOP_CHARS).is_some() {
            return Err(ValueProblem::Value(format!("must not be longer than {MAX_STOP_CHARS} characters")));
        }
        Ok(StopString(text.to_owned()))
    }
}

described!([] StopStrings: named "Stop", |_generator| {
    let one = json_schema!({ "type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS });
    json_schema!({
        "description": "The reply ends before the first of these texts that occurs.",
        "anyOf": [one, { "type": "array", "items": one, "maxItems": MAX_STOPS }],
    })
});
