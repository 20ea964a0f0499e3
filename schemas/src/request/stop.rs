//! `stop`: strings that end the generation, and its other names.

use std::sync::Arc;

use schemars::json_schema;
use serde::de::SeqAccess;

use super::field::{Field, object};
use super::invalid::InvalidRequest;
use super::read::{Read, Reading, ValueProblem, each_item};
use super::schema::described;

/// Each stop string costs a search at every token. OpenAI allows 4; users of llama-server send more.
const MAX_STOPS: usize = 16;
/// Text that may begin a stop string is held back, so long stop strings delay the stream.
const MAX_STOP_CHARS: usize = 1024;

object! {
    /// Where a reply ends, under OpenAI's name and those of other servers. The strings of all of them count, since front ends
    /// send one list under several names. `/openapi.json` mentions `stop` alone.
    pub(crate) struct StopBody {
        /// Texts before which a reply ends.
        stop: Field<StopStrings>,
        /// Anthropic's and Cohere's name of it.
        #[schemars(skip)]
        stop_sequences: Field<ForeignStops>,
        /// KoboldCpp's name of it.
        #[schemars(skip)]
        stop_sequence: Field<ForeignStops>,
        /// Hugging Face's name of it.
        #[schemars(skip)]
        stop_strings: Field<ForeignStops>,
        /// The name of text-generation-webui and its front ends.
        #[schemars(skip)]
        stopping_strings: Field<ForeignStops>,
    }
}

impl StopBody {
    /// Returns the strings of all fields, each once. Errors: one of them is wrong, or they are too many together.
    pub(crate) fn check(self) -> Result<Arc<[String]>, InvalidRequest> {
        let StopStrings(mut stops) = self.stop.get("")?.unwrap_or_default();
        for (field, given) in [
            ("stop_sequences", self.stop_sequences),
            ("stop_sequence", self.stop_sequence),
            ("stop_strings", self.stop_strings),
            ("stopping_strings", self.stopping_strings),
        ] {
            let ForeignStops(StopStrings(given)) = given.get("")?.unwrap_or_default();
            given.into_iter().for_each(|stop| add(&mut stops, stop));
            if stops.len() > MAX_STOPS {
                let problem = format!("must have at most {MAX_STOPS} entries together with the other names of 'stop'");
                return Err(InvalidRequest::at(field, problem));
            }
        }
        Ok(stops.into())
    }
}

/// Adds a stop string that is not there yet. Keeps no more than are needed to see that there are too many.
fn add(stops: &mut Vec<String>, stop: String) {
    if stops.len() <= MAX_STOPS && !stops.contains(&stop) {
        stops.push(stop);
    }
}

/// One stop string, or several, each once. The reply ends before the first that occurs.
#[derive(Debug, Default)]
pub(crate) struct StopStrings(pub(crate) Vec<String>);

impl Read for StopStrings {
    const EXPECTED: &'static str = "a string or an array of strings";

    fn string(text: &str) -> Reading<Self> {
        Ok(StopStrings(vec![StopString::string(text)?.0]))
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        let mut stops = Ok(Vec::new());
        let mut n = 0;
        each_item(items, |item: Reading<StopString>| {
            n += 1;
            match (&mut stops, item) {
                (Ok(stops), Ok(stop)) => add(stops, stop.0),
                (Ok(_), Err(problem)) => stops = Err(problem),
                (Err(_), _) => {}
            }
        })?;
        Ok(stops.and_then(|stops| match n {
            0..=MAX_STOPS => Ok(StopStrings(stops)),
            _ => Err(ValueProblem::Value(format!("must have at most {MAX_STOPS} entries"))),
        }))
    }
}

/// Stop strings under a name of other servers. Front ends send every field that they know: one that is false or an empty
/// string is switched off.
#[derive(Debug, Default)]
pub(crate) struct ForeignStops(StopStrings);

impl Read for ForeignStops {
    const EXPECTED: &'static str = StopStrings::EXPECTED;

    fn boolean(is_on: bool) -> Reading<Self> {
        if is_on { Err(Self::wrong("a boolean")) } else { Ok(ForeignStops::default()) }
    }

    fn string(text: &str) -> Reading<Self> {
        if text.is_empty() { Ok(ForeignStops::default()) } else { StopStrings::string(text).map(ForeignStops) }
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        StopStrings::array(items).map(|stops| stops.map(ForeignStops))
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
