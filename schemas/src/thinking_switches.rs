//! The fields by which clients of each API turn a model's reasoning on and off. Every chat takes all of them.

use schemars::{JsonSchema, json_schema};
use serde::Deserialize;
use serde::de::MapAccess;
use serde_json::Value;

use crate::reasoning_effort::ReasoningEffort;
use crate::request::InvalidRequest;
use crate::request::demand::Off;
use crate::request::field::{Field, Required, object};
use crate::request::foreign::{Foreign, ForeignFields, RefusedField};
use crate::request::read::{Read, Reading, ValueProblem};
use crate::request::schema::described;
use crate::request::values::{Word, Words};

/// What one field asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ReasoningWish {
    /// Turns reasoning on or off.
    pub(crate) on: Option<Switch>,
    pub(crate) effort: Option<ReasoningEffort>,
}

impl ReasoningWish {
    fn switch(on: bool) -> ReasoningWish {
        ReasoningWish { on: Some(if on { Switch::On } else { Switch::Off }), effort: None }
    }

    /// What a variable for the chat template asks for, if it is one of reasoning.
    pub(crate) fn of_variable(value: &Value) -> ReasoningWish {
        match value {
            Value::Bool(on) => ReasoningWish::switch(*on),
            Value::String(word) => ReasoningEffort::string(word).map(ReasoningWish::effort).unwrap_or_default(),
            _ => ReasoningWish::default(),
        }
    }

    /// No effort is off. Any other leaves the switch to the template.
    pub(crate) fn effort(effort: ReasoningEffort) -> ReasoningWish {
        ReasoningWish { on: (effort == ReasoningEffort::None).then_some(Switch::Off), effort: Some(effort) }
    }
}

/// A switch's position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Switch {
    On,
    Off,
    /// The model's own default.
    Default,
    /// On after the result of a tool, otherwise off.
    BetweenTools,
}

impl Switch {
    /// Returns whether reasoning is on, if the switch says so. `after_tool`: the conversation ends with the result of a tool.
    pub(crate) fn is_on(self, after_tool: bool) -> Option<bool> {
        match self {
            Switch::On => Some(true),
            Switch::Off => Some(false),
            Switch::Default => None,
            Switch::BetweenTools => Some(after_tool),
        }
    }
}

/// `reasoning`: an effort as in OpenAI's responses, a switch as in SGLang and OpenRouter, or a word as in LM Studio.
#[derive(Debug)]
pub(crate) enum ReasoningSwitch {
    Plain(ReasoningWish),
    Object(ReasoningBody),
}

object! {
    /// How the model should think.
    #[schemars(rename = "Reasoning")]
    pub(crate) struct ReasoningBody {
        /// How hard the model should think. `none` turns thinking off.
        effort: Field<ReasoningEffort>,
        /// Turns thinking on or off.
        enabled: Field<bool>,
        #[schemars(skip)]
        others: Foreign<ReasoningFields>,
    }
}

/// Other fields of `reasoning`.
#[derive(Debug)]
pub(crate) struct ReasoningFields;

impl ForeignFields for ReasoningFields {
    const AT: &'static str = "reasoning";
    const WITHOUT_EFFECT: &'static [&'static str] = &["summary", "generate_summary"];
    const REFUSED: &'static [RefusedField] = &[
        RefusedField::new("max_tokens", Off::BUDGET, "A budget for reasoning", "send 'effort'"),
        RefusedField::new("exclude", Off::ZERO, "A reply that hides its reasoning", "send 'enabled': false"),
        RefusedField::new("enable", Off::NEVER, "'enable'", "send 'enabled'"),
        RefusedField::new("reasoning_effort", Off::NEVER, "'reasoning_effort' here", "send 'effort'"),
    ];
}

/// The words of LM Studio's switch that are no efforts.
const SWITCHES: [(&str, bool); 2] = [("on", true), ("off", false)];

impl Read for ReasoningSwitch {
    const EXPECTED: &'static str = "an object, a switch or an effort";

    fn boolean(on: bool) -> Reading<Self> {
        Ok(ReasoningSwitch::Plain(ReasoningWish::switch(on)))
    }

    fn string(word: &str) -> Reading<Self> {
        let asked = match SWITCHES.iter().find(|(switch, _)| *switch == word) {
            Some((_, on)) => ReasoningWish::switch(*on),
            None => ReasoningWish::effort(ReasoningEffort::string(word)?),
        };
        Ok(ReasoningSwitch::Plain(asked))
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(ReasoningBody::object(fields)?.map(ReasoningSwitch::Object))
    }
}

described!([] ReasoningSwitch: named "ReasoningSwitch", |generator| json_schema!({
    "description": "How the model should think: an object, `on` or `off`, or an effort.",
    "anyOf": [
        generator.subschema_for::<ReasoningBody>(),
        { "type": "boolean" },
        { "type": "string", "enum": SWITCHES.map(|(word, _)| word) },
        generator.subschema_for::<ReasoningEffort>(),
    ],
}));

impl ReasoningSwitch {
    pub(crate) fn check(self) -> Result<ReasoningWish, InvalidRequest> {
        const AT: &str = "reasoning";
        let body = match self {
            ReasoningSwitch::Plain(asked) => return Ok(asked),
            ReasoningSwitch::Object(body) => body,
        };
        body.others.check()?;
        let effort = body.effort.get(AT)?.map(ReasoningWish::effort).unwrap_or_default();
        let enabled = body.enabled.get(AT)?.map(ReasoningWish::switch).unwrap_or_default();
        Ok(ReasoningWish { on: enabled.on.or(effort.on), effort: effort.effort })
    }
}

/// `thinking`: Anthropic's object, which DeepSeek and GLM have too, or a switch.
#[derive(Debug)]
pub(crate) enum ThinkingSwitch {
    Plain(bool),
    Object(ThinkingBody),
}

object! {
    /// Turns thinking on or off. `budget_tokens` has no effect.
    #[schemars(rename = "Thinking")]
    pub(crate) struct ThinkingBody {
        /// On, off, the model's default, or on after the result of a tool.
        r#type: Required<Word<ThinkingKind>>,
        /// `omitted`: `/v1/messages` shows no thinking.
        display: Field<Word<ThinkingDisplay>>,
        #[schemars(skip)]
        others: Foreign<ThinkingFields>,
    }
}

/// Other fields of `thinking`.
#[derive(Debug)]
pub(crate) struct ThinkingFields;

impl ForeignFields for ThinkingFields {
    const AT: &'static str = "thinking";
    const WITHOUT_EFFECT: &'static [&'static str] = &["budget_tokens", "block_binding"];
}

/// The type of a [`ThinkingBody`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ThinkingKind {
    Enabled,
    Disabled,
    /// The model's default.
    Adaptive,
    /// DeepSeek's and GLM's word for the same.
    Auto,
    BetweenTools,
}

impl Words for ThinkingKind {
    const WRONG: &'static str = "must be enabled, disabled, adaptive, auto or between_tools";
}

/// How a reply shows thinking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ThinkingDisplay {
    Summarized,
    Omitted,
}

impl Words for ThinkingDisplay {
    const WRONG: &'static str = "must be summarized or omitted";
}

impl Read for ThinkingSwitch {
    const EXPECTED: &'static str = "an object";

    fn boolean(on: bool) -> Reading<Self> {
        Ok(ThinkingSwitch::Plain(on))
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(ThinkingBody::object(fields)?.map(ThinkingSwitch::Object))
    }
}

described!([] ThinkingSwitch: named "ThinkingSwitch", |generator| json_schema!({
    "description": "Turns thinking on or off.",
    "anyOf": [generator.subschema_for::<ThinkingBody>(), { "type": "boolean" }],
}));

impl ThinkingSwitch {
    /// Returns the switch's position, and whether a reply may show what the model thinks.
    pub(crate) fn check(self) -> Result<(Switch, bool), InvalidRequest> {
        const AT: &str = "thinking";
        let body = match self {
            ThinkingSwitch::Plain(true) => return Ok((Switch::On, true)),
            ThinkingSwitch::Plain(false) => return Ok((Switch::Off, false)),
            ThinkingSwitch::Object(body) => body,
        };
        body.others.check()?;
        let is_omitted = body.display.get(AT)?.is_some_and(|display| display.0 == ThinkingDisplay::Omitted);
        let switch = match body.r#type.get(AT)?.0 {
            ThinkingKind::Enabled => Switch::On,
            ThinkingKind::Disabled => Switch::Off,
            ThinkingKind::Adaptive | ThinkingKind::Auto => Switch::Default,
            ThinkingKind::BetweenTools => Switch::BetweenTools,
        };
        Ok((switch, switch != Switch::Off && !is_omitted))
    }
}

/// `think`: Ollama's switch.
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

impl From<Think> for ReasoningWish {
    fn from(think: Think) -> ReasoningWish {
        match think {
            Think::Off => ReasoningWish::switch(false),
            Think::On => ReasoningWish::switch(true),
            Think::Effort(effort) => ReasoningWish { effort: Some(effort), ..ReasoningWish::switch(true) },
        }
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
    "description": "Turns thinking on or off, or sets its effort.",
    "anyOf": [{ "type": "boolean" }, { "type": "string", "enum": EFFORTS.map(ReasoningEffort::as_str) }],
}));
