//! Variables for the model's chat template, and the switches of reasoning, which are variables for most templates. A client
//! may set variables, never the template.

use schemars::JsonSchema;
use serde::de::MapAccess;
use serde_json::{Map, Value};

use crate::generate::Thinking;
use crate::reasoning_effort::ReasoningEffort;
use crate::request::demand::Demand;
use crate::request::field::{Field, object};
use crate::request::read::{Read, Reading};
use crate::request::{InvalidRequest, notes};
use crate::thinking_switches::{ReasoningSwitch, ReasoningWish, Switch, Think, ThinkingSwitch};

/// Variables that the server sets. A client that could set them could bypass the checks of the conversation.
const RESERVED: [&str; 6] = ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "chat_template"];

/// The variable that turns thinking on or off. Rendering gives it its other names, too.
const SWITCH: &str = "enable_thinking";
/// The variable with which some templates have it instead.
const OTHER_SWITCH: &str = "thinking";
/// The variable of the effort.
const EFFORT: &str = "reasoning_effort";

object! {
    /// Variables for the chat template, and how the model should think. Every chat has them, whatever its dialect.
    pub(crate) struct TemplateBody {
        /// How hard the model should think. `none` turns thinking off.
        reasoning_effort: Field<ReasoningEffort>,
        /// How the model should think, as in OpenAI's responses, SGLang or LM Studio.
        reasoning: Field<ReasoningSwitch>,
        /// Turns thinking on or off, as in Anthropic's messages.
        thinking: Field<ThinkingSwitch>,
        /// Turns thinking on or off, or sets its effort, as in Ollama.
        think: Field<Think>,
        /// Turns thinking on or off, in templates that have this switch.
        enable_thinking: Field<bool>,
        /// Other variables for the chat template.
        chat_template_kwargs: Field<TemplateArgs>,
        #[schemars(skip)]
        chat_template: Field<Demand>,
    }
}

/// Variables for the chat template. Those in [`RESERVED`] are refused.
#[derive(Debug, JsonSchema)]
#[schemars(inline, extend("propertyNames" = {"not": {"enum": RESERVED}}))]
pub(crate) struct TemplateArgs(Map<String, Value>);

impl Read for TemplateArgs {
    const EXPECTED: &'static str = "an object";

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(Map::object(fields)?.map(TemplateArgs))
    }
}

/// A checked [`TemplateBody`].
#[derive(Debug, PartialEq)]
pub(crate) struct TemplateChoice {
    /// The variables, with the names that templates of reasoning models use.
    pub(crate) args: Map<String, Value>,
    pub(crate) effort: Option<ReasoningEffort>,
    /// The body asks for reasoning, or for none. Anthropic's effort does neither.
    asks: Option<bool>,
    /// `thinking` was given, with what it says about showing the reasoning.
    pub(crate) shows_thinking: Option<bool>,
    /// Ollama's `think` was given and turns thinking on.
    pub(crate) thinks: bool,
}

impl TemplateBody {
    /// Checks the fields. `own` is Anthropic's effort, which comes before the others, and leaves open if the model thinks.
    /// `after_tool`: the conversation ends with the result of a tool. Of fields that contradict each other the first counts,
    /// and the header names the others.
    pub(crate) fn check(
        self,
        own: Option<ReasoningEffort>,
        after_tool: bool,
    ) -> Result<TemplateChoice, InvalidRequest> {
        if self.chat_template.is_given() {
            return Err(InvalidRequest::at("chat_template", "a chat template is never taken from a client"));
        }
        let mut args = self.chat_template_kwargs.get("")?.map(|args| args.0).unwrap_or_default();
        if let Some(name) = RESERVED.into_iter().find(|name| args.contains_key(*name)) {
            return Err(InvalidRequest::at(format!("chat_template_kwargs.{name}"), "is set by the server"));
        }
        let think = self.think.get("")?;
        let thinking = self.thinking.get("")?.map(ThinkingSwitch::check).transpose()?;
        let position = thinking.map(|(switch, _)| ReasoningWish { on: Some(switch), effort: None });
        let on = |on| if on { Switch::On } else { Switch::Off };
        let mut all = ReasoningWishes { after_tool, effort: own, ..ReasoningWishes::default() };
        for (field, asked) in [
            ("thinking", position),
            ("think", think.map(ReasoningWish::from)),
            (SWITCH, self.enable_thinking.get("")?.map(|said| ReasoningWish { on: Some(on(said)), effort: None })),
            ("reasoning", self.reasoning.get("")?.map(ReasoningSwitch::check).transpose()?),
            (EFFORT, self.reasoning_effort.get("")?.map(ReasoningWish::effort)),
        ] {
            all.add(field, asked.unwrap_or_default());
        }
        // The client's own variables stay as they are.
        let (on, effort) = (all.on, all.effort);
        for name in [SWITCH, OTHER_SWITCH, EFFORT] {
            let asked = args.get(name).map(ReasoningWish::of_variable).unwrap_or_default();
            if !all.add(&format!("chat_template_kwargs.{name}"), asked) {
                args.remove(name);
            }
        }
        if let Some(effort) = effort {
            args.insert(EFFORT.to_owned(), effort.as_str().into());
        }
        if let Some(is_on) = on {
            args.insert(SWITCH.to_owned(), is_on.into());
        }
        Ok(TemplateChoice {
            args,
            effort: all.effort,
            asks: all.asks,
            shows_thinking: thinking.map(|(_, shows)| shows),
            thinks: all.asks == Some(true) && think.is_some_and(|think| think != Think::Off),
        })
    }
}

impl TemplateChoice {
    /// Returns true if the body shows the reasoning, or asks for it and does not hide it.
    pub(crate) fn shows(&self) -> bool {
        self.shows_thinking.unwrap_or(self.asks == Some(true))
    }

    /// Turns thinking off unless the body says something about it: the default of a dialect in which it must be asked for.
    pub(crate) fn off_by_default(&mut self) -> Thinking {
        if self.shows_thinking.is_some() || self.asks.is_some() {
            return Thinking::AsSaid;
        }
        self.args.insert(SWITCH.to_owned(), false.into());
        Thinking::OffByDefault
    }
}

/// The wishes about reasoning of the fields of a body that agree.
#[derive(Default)]
struct ReasoningWishes {
    after_tool: bool,
    /// Reasoning is asked for, by a switch or an effort, or none is.
    asks: Option<bool>,
    on: Option<bool>,
    effort: Option<ReasoningEffort>,
}

impl ReasoningWishes {
    /// Adds what a field asks for. Returns false if it contradicts a field before it; nothing of it counts then.
    fn add(&mut self, field: &str, asked: ReasoningWish) -> bool {
        let on = asked.on.and_then(|switch| switch.is_on(self.after_tool));
        let asks = on.or(asked.effort.map(|effort| effort != ReasoningEffort::None));
        let agrees = agree(self.asks, asks) && agree(self.effort, asked.effort);
        if agrees {
            self.asks = self.asks.or(asks);
            self.on = self.on.or(on);
            self.effort = self.effort.or(asked.effort);
        } else {
            notes::ignored(field);
        }
        agrees
    }
}

fn agree<T: PartialEq>(known: Option<T>, asked: Option<T>) -> bool {
    known.is_none() || asked.is_none() || known == asked
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::request::read::read;
    use crate::request::{MeasuredParse, measured};

    fn checked(body: &Value) -> Result<TemplateChoice, InvalidRequest> {
        read::<TemplateBody>(body.to_string().as_bytes()).and_then(|body| body.check(None, false))
    }

    fn check(body: Value, expected: Result<Value, &str>) {
        match (checked(&body), expected) {
            (Ok(choice), Ok(expected)) => assert_eq!(Value::Object(choice.args), expected, "{body}"),
            (Err(error), Err(param)) => assert_eq!(error.param.as_deref(), Some(param), "{body}"),
            (got, expected) => panic!("{body}: {got:?} instead of {expected:?}"),
        }
    }

    #[test]
    fn variables_pass_and_templates_do_not() {
        check(json!({}), Ok(json!({})));
        check(json!({"chat_template_kwargs": {"enable_thinking": false}}), Ok(json!({"enable_thinking": false})));
        check(json!({"reasoning_effort": "low"}), Ok(json!({"reasoning_effort": "low"})));
        check(json!({"enable_thinking": true}), Ok(json!({"enable_thinking": true})));
        let none = json!({"reasoning_effort": "none", "enable_thinking": false});
        check(json!({"reasoning_effort": "none"}), Ok(none));
        check(json!({"reasoning_effort": "huge"}), Err("reasoning_effort"));
        check(json!({"chat_template": "{{ x }}"}), Err("chat_template"));
        check(json!({"chat_template_kwargs": {"messages": []}}), Err("chat_template_kwargs.messages"));
        check(json!({"chat_template_kwargs": 1}), Err("chat_template_kwargs"));
    }

    #[test]
    fn reasoning_is_turned_off_in_every_published_form() {
        let off = || Ok(json!({"enable_thinking": false}));
        for body in [
            json!({"reasoning": {"enabled": false}}),
            json!({"reasoning": "off"}),
            json!({"reasoning": false}),
            json!({"thinking": {"type": "disabled"}}),
            json!({"thinking": {"type": "between_tools"}}),
            json!({"thinking": false}),
            json!({"think": false}),
            json!({"enable_thinking": false}),
            json!({"chat_template_kwargs": {"enable_thinking": false}}),
        ] {
            check(body, off());
        }
        let none = || Ok(json!({"enable_thinking": false, "reasoning_effort": "none"}));
        for body in [
            json!({"reasoning": {"effort": "none"}}),
            json!({"reasoning": "none"}),
            json!({"reasoning_effort": "none"}),
        ] {
            check(body, none());
        }
    }

    #[test]
    fn reasoning_is_turned_on_in_every_published_form() {
        let on = || Ok(json!({"enable_thinking": true}));
        for body in [
            json!({"reasoning": {"enabled": true, "effort": null, "summary": "auto"}}),
            json!({"reasoning": "on"}),
            json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}),
            json!({"thinking": true}),
            json!({"think": true}),
        ] {
            check(body, on());
        }
        check(json!({"think": "high"}), Ok(json!({"enable_thinking": true, "reasoning_effort": "high"})));
        check(json!({"reasoning": {"effort": "high"}}), Ok(json!({"reasoning_effort": "high"})));
        check(json!({"reasoning": "low"}), Ok(json!({"reasoning_effort": "low"})));
        for default in [json!({"thinking": {"type": "adaptive"}}), json!({"thinking": {"type": "auto"}})] {
            check(default, Ok(json!({})));
        }
        let between = read::<TemplateBody>(br#"{"thinking": {"type": "between_tools"}}"#).unwrap().check(None, true);
        assert_eq!(between.unwrap().args[SWITCH], true);
    }

    #[test]
    fn what_cannot_be_held_is_named() {
        check(json!({"reasoning": {"max_tokens": 100}}), Err("reasoning.max_tokens"));
        check(json!({"reasoning": {"exclude": true}}), Err("reasoning.exclude"));
        check(json!({"reasoning": {"effort": "huge"}}), Err("reasoning.effort"));
        check(json!({"reasoning": 5}), Err("reasoning"));
        check(json!({"thinking": {"type": "always"}}), Err("thinking.type"));
        check(json!({"think": "hard"}), Err("think"));
    }

    #[test]
    fn of_switches_that_contradict_each_other_the_first_counts_and_the_others_are_named() {
        let noted = |body: Value| {
            let MeasuredParse { value, notes, .. } = measured(|| checked(&body));
            (Value::Object(value.unwrap().args), notes.ignored.join(", "))
        };
        let off = json!({"enable_thinking": false});
        assert_eq!(noted(json!({"think": false, "enable_thinking": true})), (off, "enable_thinking".to_owned()));
        let both = json!({"thinking": {"type": "enabled"}, "reasoning_effort": "none"});
        assert_eq!(noted(both), (json!({"enable_thinking": true}), "reasoning_effort".to_owned()));
        let high = || json!({"reasoning_effort": "high"});
        let both = json!({"reasoning": {"effort": "high"}, "reasoning_effort": "none"});
        assert_eq!(noted(both), (high(), "reasoning_effort".to_owned()));
        let none = json!({"reasoning_effort": "none", "enable_thinking": false});
        let both = json!({"reasoning": {"effort": "none"}, "reasoning_effort": "high"});
        assert_eq!(noted(both), (none.clone(), "reasoning_effort".to_owned()));
        let variable = json!({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": false}});
        assert_eq!(noted(variable), (high(), "chat_template_kwargs.thinking".to_owned()));
        let variable = json!({"reasoning_effort": "none", "chat_template_kwargs": {"reasoning_effort": "high"}});
        assert_eq!(noted(variable), (none, "chat_template_kwargs.reasoning_effort".to_owned()));
        let agreeing = json!({"reasoning": {"effort": "low"}, "reasoning_effort": "low", "think": true});
        let low = json!({"enable_thinking": true, "reasoning_effort": "low"});
        assert_eq!(noted(agreeing), (low, String::new()));
    }

    #[test]
    fn a_dialect_can_have_thinking_off_by_default() {
        let of = |body: Value| {
            let mut choice = checked(&body).unwrap();
            (choice.off_by_default(), Value::Object(choice.args))
        };
        assert_eq!(of(json!({})), (Thinking::OffByDefault, json!({"enable_thinking": false})));
        let effort = json!({"reasoning_effort": "high"});
        assert_eq!(of(effort.clone()), (Thinking::AsSaid, effort));
        let mut own = read::<TemplateBody>(b"{}").unwrap().check(Some(ReasoningEffort::High), false).unwrap();
        assert_eq!(own.off_by_default(), Thinking::OffByDefault, "Anthropic's effort turns nothing on");
        assert_eq!(Value::Object(own.args), json!({"enable_thinking": false, "reasoning_effort": "high"}));
        assert_eq!(of(json!({"thinking": {"type": "adaptive"}})), (Thinking::AsSaid, json!({})));
        let by_template = json!({"chat_template_kwargs": {"thinking": true}});
        assert_eq!(of(by_template), (Thinking::AsSaid, json!({"thinking": true})));
    }
}
