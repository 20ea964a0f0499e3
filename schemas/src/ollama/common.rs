//! What `/api/chat` and `/api/generate` have in common.

use schemars::json_schema;
use serde_json::{Map, Number, Value};

use super::format::Format;
use super::options::{Options, OptionsBody};
use crate::generate::{GenerateRequest, Input};
use crate::keep_alive::{KeepAlive, MAX_CHARS};
use crate::openai::TopLogprobs;
use crate::reasoning_effort::ReasoningEffort;
use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, ObjectMember as _, Required, object};
use crate::request::read::{Read, Reading, ValueProblem};
use crate::request::schema::described;
use crate::request::tools::{ChatTool, check_tools};
use crate::request::values::{Integer, ModelName};
use crate::tools::{MAX_TOOLS, ToolChoice};

object! {
    /// What `/api/chat` and `/api/generate` have in common.
    pub(crate) struct CommonBody {
        /// One of the names in `/api/tags`.
        model: Required<ModelName>,
        /// As lines of JSON, unless this is false.
        stream: Field<bool>,
        /// What the reply has to be.
        format: Field<Format>,
        /// Whether the model is to think. A 400 for a model that cannot.
        think: Field<Think>,
        /// How long a model that is loaded on demand stays in memory afterwards: 0 unloads it, a negative number keeps it
        /// for good. A model that is always loaded stays.
        keep_alive: Field<KeepAliveBody>,
        /// What the model may call.
        #[schemars(length(max = MAX_TOOLS))]
        tools: Field<Items<ChatTool>>,
        /// Report the log-probabilities of tokens.
        logprobs: Field<bool>,
        /// With so many of the most likely tokens at each place.
        top_logprobs: Field<TopLogprobs>,
        /// How to generate.
        options: Field<OptionsBody>,
    }
}

/// A checked [`CommonBody`].
pub(super) struct Common {
    /// The request, with an input that is to be replaced.
    pub(super) generate: GenerateRequest,
    /// What the chat template gets.
    pub(super) template_args: Map<String, Value>,
    /// As lines of JSON.
    pub(super) stream: bool,
}

impl CommonBody {
    /// `drawn_seed` is used where the client sent none.
    pub(super) fn check(self, drawn_seed: u64) -> Result<Common, InvalidRequest> {
        let options = self.options.get("")?.unwrap_or_else(|| OptionsBody::named(""));
        let Options { max_tokens, num_ctx, stop, sampling, chosen } = options.check(drawn_seed)?;
        let top_logprobs = self.top_logprobs.get("")?.and_then(Integer::count).unwrap_or(0);
        let wants_logprobs = self.logprobs.get("")?.unwrap_or(false);
        let think = self.think.get("")?;
        let generate = GenerateRequest {
            model: self.model.get("")?.0,
            input: Input::Tokens(Vec::new()),
            n: 1,
            max_tokens,
            stop,
            sampling,
            chosen,
            top_logprobs: wants_logprobs.then_some(top_logprobs),
            ignore_eos: false,
            constraint: self.format.get("")?.and_then(|format| format.0),
            tools: check_tools(self.tools, ToolChoice::Auto, true)?,
            wants_thinking: think.is_some_and(|think| think != Think::Off),
            keep_alive: self.keep_alive.get("")?.and_then(|keep_alive| keep_alive.0),
            num_ctx,
            context: None,
        };
        // Ollama streams unless it is told not to.
        let stream = self.stream.get("")?.unwrap_or(true);
        Ok(Common { generate, template_args: think.map(Think::template_args).unwrap_or_default(), stream })
    }
}

/// Whether the model thinks, and how hard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Think {
    Off,
    On,
    /// On, with one of [`EFFORTS`].
    Effort(ReasoningEffort),
}

/// The part of the scale that Ollama's dialect has.
const EFFORTS: [ReasoningEffort; 4] =
    [ReasoningEffort::Low, ReasoningEffort::Medium, ReasoningEffort::High, ReasoningEffort::Max];

impl Think {
    /// The variables of the chat template, for those that know these switches.
    fn template_args(self) -> Map<String, Value> {
        let mut args = Map::new();
        args.insert("enable_thinking".to_owned(), (self != Think::Off).into());
        if let Think::Effort(effort) = self {
            effort.set(&mut args);
        }
        args
    }
}

impl Read for Think {
    const EXPECTED: &'static str = "true, false, \"low\", \"medium\", \"high\" or \"max\"";

    fn wrong(_: &'static str) -> ValueProblem {
        ValueProblem::value(format!("must be {}", Self::EXPECTED))
    }

    fn boolean(on: bool) -> Reading<Self> {
        Ok(if on { Think::On } else { Think::Off })
    }

    fn string(word: &str) -> Reading<Self> {
        ReasoningEffort::among(word, &EFFORTS).map(Think::Effort).map_err(|_| Self::wrong("a string"))
    }
}

described!([] Think: named "Think", |_generator| json_schema!({
    "description": "Whether and how hard to think.",
    "anyOf": [{ "type": "boolean" }, { "type": "string", "enum": EFFORTS.map(ReasoningEffort::as_str) }],
}));

/// What a request without a prompt asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadOnly {
    /// Nothing to answer: the model is to be ready.
    Load,
    /// `keep_alive` is 0: the model may go.
    Unload,
}

impl LoadOnly {
    /// What a request without anything to answer asks for.
    pub(super) fn of(keep_alive: Option<KeepAlive>) -> Self {
        if keep_alive.is_some_and(KeepAlive::is_nothing) { LoadOnly::Unload } else { LoadOnly::Load }
    }

    /// Ollama's `done_reason`.
    pub fn done_reason(self) -> &'static str {
        match self {
            LoadOnly::Load => "load",
            LoadOnly::Unload => "unload",
        }
    }
}

/// `keep_alive`: a number of seconds, or a Go duration. An empty string says nothing.
#[derive(Debug)]
pub(crate) struct KeepAliveBody(pub(super) Option<KeepAlive>);

impl KeepAliveBody {
    fn unless_wrong(parsed: Option<KeepAlive>) -> Reading<Self> {
        match parsed {
            Some(parsed) => Ok(KeepAliveBody(Some(parsed))),
            None => Err(ValueProblem::value(format!("must be {}", Self::EXPECTED))),
        }
    }
}

impl Read for KeepAliveBody {
    const EXPECTED: &'static str = "a number of seconds or a duration like \"5m\"";

    fn number(seconds: &Number) -> Reading<Self> {
        Self::unless_wrong(seconds.as_f64().and_then(KeepAlive::of_seconds))
    }

    fn string(duration: &str) -> Reading<Self> {
        if duration.is_empty() { Ok(KeepAliveBody(None)) } else { Self::unless_wrong(KeepAlive::parse(duration)) }
    }
}

/// What [`keep_alive`](crate::keep_alive) reads.
const KEEP_ALIVE: &str =
    "^([-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)|[-+]?(([0-9]+[.]?[0-9]*|[.][0-9]+)(ns|us|µs|μs|ms|s|m|h))+)?$";

described!([] KeepAliveBody: named "KeepAlive", |_generator| {
    json_schema!({
        "description": "How long the model should stay.",
        "anyOf": [
            { "description": "Seconds.", "type": "number", "format": "double" },
            {
                "description": "In Go's form, such as `5m`, or a number; the empty word says nothing.",
                "type": "string", "maxLength": MAX_CHARS, "pattern": KEEP_ALIVE,
            },
        ],
    })
});

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::request::read::read;

    fn check(keep_alive: Value, expected: Option<LoadOnly>) {
        let body = json!({ "model": "m", "keep_alive": keep_alive });
        let load = read::<CommonBody>(body.to_string().as_bytes()).and_then(|body| body.check(0));
        assert_eq!(load.ok().map(|common| LoadOnly::of(common.generate.keep_alive)), expected, "{body}");
    }

    #[test]
    fn only_a_keep_alive_of_zero_unloads() {
        check(json!(null), Some(LoadOnly::Load));
        check(json!("5m"), Some(LoadOnly::Load));
        check(json!(-1), Some(LoadOnly::Load));
        check(json!("-1"), Some(LoadOnly::Load));
        check(json!("10s"), Some(LoadOnly::Load));
        check(json!("0.5s"), Some(LoadOnly::Load));
        check(json!(""), Some(LoadOnly::Load));
        check(json!(0), Some(LoadOnly::Unload));
        check(json!(0.0), Some(LoadOnly::Unload));
        check(json!("0"), Some(LoadOnly::Unload));
        check(json!("0m0s"), Some(LoadOnly::Unload));
        check(json!([]), None);
        check(json!("soon"), None);
    }
}
