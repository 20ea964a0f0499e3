//! The fields that `/api/chat` and `/api/generate` share.

use std::sync::Arc;

use schemars::json_schema;
use serde_json::{Map, Number, Value};

use super::format::Format;
use super::options::{Options, OptionsBody};
use super::tools::OllamaTool;
use crate::generate::{GenerateRequest, Input, Thinking};
use crate::keep_alive::{KeepAlive, MAX_CHARS};
use crate::openai::{ReplyLengthBody, StructuredBody, TemplateBody, TopLogprobs};
use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, ObjectMember as _, Required, object};
use crate::request::read::{Read, Reading, ValueProblem};
use crate::request::schema::described;
use crate::request::tools::check_tools;
use crate::request::values::{Integer, ModelName};
use crate::tools::{MAX_TOOLS, ToolChoice};

object! {
    /// The fields that `/api/chat` and `/api/generate` share.
    pub(crate) struct CommonBody {
        /// A model's name, as `/api/tags` lists it.
        model: Required<ModelName>,
        /// False: reply with one object. Otherwise: stream lines of JSON.
        stream: Field<bool>,
        /// The form that the reply must have.
        format: Field<Format>,
        /// The same by the names of OpenAI's chats and of other servers.
        #[schemars(flatten)]
        structured: StructuredBody,
        /// Turns thinking on or off, and variables for the chat template. `think` is a 400 if the model cannot think.
        #[schemars(flatten)]
        template: TemplateBody,
        /// How long a model that is loaded on demand stays in memory after the reply: 0 unloads it, a negative number
        /// keeps it forever. No effect on models that are always loaded.
        keep_alive: Field<KeepAliveBody>,
        /// The tools that the model may call.
        #[schemars(length(max = MAX_TOOLS))]
        tools: Field<Items<OllamaTool>>,
        // As in OpenAI's chats.
        #[schemars(skip)]
        parallel_tool_calls: Field<bool>,
        /// Report the log-probability of each token.
        logprobs: Field<bool>,
        /// How many of the most likely tokens to report at each position.
        top_logprobs: Field<TopLogprobs>,
        // `num_predict` in `options` takes precedence.
        #[schemars(skip)]
        length: ReplyLengthBody,
        /// Sampling and limits.
        options: Field<OptionsBody>,
    }
}

/// A checked [`CommonBody`].
pub(super) struct Common {
    /// The request. Its input is empty: the caller sets it.
    pub(super) generate: GenerateRequest,
    /// Variables for the chat template.
    pub(super) template_args: Map<String, Value>,
}

impl CommonBody {
    /// Checks the fields. `drawn_seed` is used if the client sent no seed.
    /// `after_tool`: the conversation ends with the result of a tool.
    pub(super) fn check(self, drawn_seed: u64, after_tool: bool) -> Result<Common, InvalidRequest> {
        let options = self.options.get("")?.unwrap_or_else(|| OptionsBody::named(""));
        let Options { max_tokens, num_ctx, stop, sampling, chosen } = options.check(drawn_seed)?;
        let own = max_tokens.map(|n| Integer(i64::from(n)));
        let max_tokens = self.length.check(&[("options.num_predict", own)])?.and_then(Integer::count);
        let top_logprobs = self.top_logprobs.get("")?.and_then(Integer::count).unwrap_or(0);
        let wants_logprobs = self.logprobs.get("")?.unwrap_or(false);
        let template = self.template.check(None, after_tool)?;
        let format = self.format.get("")?.and_then(|format| format.0).map(|format| ("format", format));
        let generate = GenerateRequest {
            // Ollama streams by default.
            is_streamed: self.stream.get("")?.unwrap_or(true),
            model: self.model.get("")?.0,
            input: Input::Tokens(Vec::new()),
            n: 1,
            max_tokens,
            stop: stop.into(),
            sampling,
            chosen,
            top_logprobs: wants_logprobs.then_some(top_logprobs),
            ignore_eos: false,
            constraint: self.structured.check_beside(format)?.map(Arc::new),
            tools: check_tools(self.tools, ToolChoice::Auto, self.parallel_tool_calls.get("")?.unwrap_or(true))?,
            thinking: if template.thinks { Thinking::Required } else { Thinking::AsSaid },
            keep_alive: self.keep_alive.get("")?.and_then(|keep_alive| keep_alive.0),
            num_ctx,
            context: None,
            prompt_logprobs: None,
            predicted: None,
        };
        Ok(Common { generate, template_args: template.args })
    }
}

/// What a request without messages or prompt asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadOnly {
    /// Load the model.
    Load,
    /// Unload the model: `keep_alive` is 0.
    Unload,
}

impl LoadOnly {
    /// Decides by the request's `keep_alive`.
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

/// `keep_alive`: a number of seconds, or a Go duration. An empty string counts as missing.
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

/// The strings that [`KeepAlive::parse`] accepts, as a pattern.
const KEEP_ALIVE: &str =
    "^([-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)|[-+]?(([0-9]+[.]?[0-9]*|[.][0-9]+)(ns|us|µs|μs|ms|s|m|h))+)?$";

described!([] KeepAliveBody: named "KeepAlive", |_generator| {
    json_schema!({
        "description": "How long the model stays in memory.",
        "anyOf": [
            { "description": "Seconds.", "type": "number", "format": "double" },
            {
                "description": "A Go duration such as `5m`, or a number of seconds. Empty counts as missing.",
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
        let load = read::<CommonBody>(body.to_string().as_bytes()).and_then(|body| body.check(0, false));
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
