//! The tools of OpenAI's chats, and the choice among them.

use schemars::{JsonSchema, json_schema};
use serde::Deserialize;
use serde::de::MapAccess;

use super::field::{Field, Items, Required, join, missing, object};
use super::invalid::InvalidRequest;
use super::read::{Read, Reading, ValueProblem};
use super::schema::{Variant, described};
use super::tools::{
    Allowed, ChatTool, DefinedTools, Definition, ToolFields, ToolName, check_defined, define_all, keep_allowed,
};
use super::values::{Word, Words};
use crate::tools::{MAX_TOOLS, ToolChoice, ToolUse};

object! {
    /// The tools of a chat.
    pub(crate) struct ChatToolsBody {
        /// The tools that the model may call.
        #[schemars(length(max = MAX_TOOLS))]
        tools: Field<Items<ChatTool>>,
        /// Which of the tools the model must call.
        tool_choice: Field<ToolChoiceBody<ChatChosenTools>>,
        /// Allows several calls in one reply.
        parallel_tool_calls: Field<bool>,
    }
}

impl ChatToolsBody {
    pub(crate) fn check(self) -> Result<ToolUse, InvalidRequest> {
        let ChatToolsRead { tools, chosen, parallel } = self.read()?;
        chosen.unwrap_or_default().among(define_all(tools)?, ChatTool::FORM, parallel)
    }

    /// Returns the fields, each sound in itself.
    pub(crate) fn read(self) -> Result<ChatToolsRead, InvalidRequest> {
        Ok(ChatToolsRead {
            parallel: self.parallel_tool_calls.get("")?.unwrap_or(true),
            chosen: ChosenTools::of(self.tool_choice)?,
            tools: self.tools.get("")?,
        })
    }
}

/// The tools of a chat before they are compared with the choice.
pub(crate) struct ChatToolsRead {
    pub(crate) tools: Option<Items<ChatTool>>,
    /// `None`: the client leaves the choice to the server.
    pub(crate) chosen: Option<ChosenTools>,
    pub(crate) parallel: bool,
}

/// Which tools of a list the model may call, and whether it must.
pub(crate) enum ChosenTools {
    /// All of them.
    All(ToolChoice),
    /// The model does not see the others.
    Only(Allowed),
}

impl Default for ChosenTools {
    fn default() -> Self {
        ChosenTools::All(ToolChoice::Auto)
    }
}

impl ChosenTools {
    fn of(field: Field<ToolChoiceBody<ChatChosenTools>>) -> Result<Option<ChosenTools>, InvalidRequest> {
        Ok(match field.get("")? {
            None => None,
            Some(ToolChoiceBody::Word(choice)) => Some(ChosenTools::All(choice)),
            Some(ToolChoiceBody::Object(chosen)) => Some(match chosen.r#type.peek().map(String::as_str) {
                Some(ALLOWED) => {
                    let at = join(CHOICE, ALLOWED);
                    let list = chosen.allowed_tools.get(CHOICE)?;
                    let list = list.ok_or_else(|| missing(CHOICE, ALLOWED))?;
                    let choice = list.mode.get(&at)?.map_or(ToolChoice::Auto, |mode| mode.0.into());
                    let functions = list.tools.optional(&at)?.unwrap_or_default().sound();
                    let names = functions.filter_map(|tool| tool.function.sound()?.name.sound());
                    let names = names.map(|name| name.0).collect();
                    ChosenTools::Only(Allowed { choice, names, field: join(&at, "tools") })
                }
                kind if kind == Some("function") || !chosen.r#type.is_given() => {
                    let name = chosen.function.sound().and_then(|function| function.name.sound());
                    ChosenTools::All(ToolChoice::Named(name.ok_or_else(wrong_choice)?.0))
                }
                _ => return Err(wrong_choice()),
            }),
        })
    }

    /// Whether the model must call a tool.
    pub(crate) fn choice(&self) -> &ToolChoice {
        match self {
            ChosenTools::All(choice) | ChosenTools::Only(Allowed { choice, .. }) => choice,
        }
    }

    /// Checks tools that are read, and keeps the chosen ones.
    pub(crate) fn among(
        self,
        tools: DefinedTools,
        fields: ToolFields,
        parallel: bool,
    ) -> Result<ToolUse, InvalidRequest> {
        match self {
            ChosenTools::All(choice) => check_defined(tools, fields, choice, parallel),
            ChosenTools::Only(allowed) => {
                keep_allowed(check_defined(tools, fields, ToolChoice::Auto, parallel)?, allowed)
            }
        }
    }
}

/// OpenAI's field of the choice among tools.
pub(crate) const CHOICE: &str = "tool_choice";

/// The type of a choice that allows only some of the tools, and the name of its field.
pub(crate) const ALLOWED: &str = "allowed_tools";

/// Creates the error for an unknown choice.
pub(crate) fn wrong_choice() -> InvalidRequest {
    InvalidRequest::at(CHOICE, WRONG_CHOICE)
}

const WRONG_CHOICE: &str = "must be auto, none, required, a function or allowed_tools";

/// OpenAI's choice among tools: a word, or an object that names tools.
#[derive(Debug)]
pub(crate) enum ToolChoiceBody<O> {
    Word(ToolChoice),
    Object(O),
}

impl<O: Read> Read for ToolChoiceBody<O> {
    const EXPECTED: &'static str = WRONG_CHOICE;

    fn wrong(_: &'static str) -> ValueProblem {
        ValueProblem::value(WRONG_CHOICE)
    }

    fn string(word: &str) -> Reading<Self> {
        match word {
            "auto" => Ok(ToolChoiceBody::Word(ToolChoice::Auto)),
            "none" => Ok(ToolChoiceBody::Word(ToolChoice::None)),
            "required" => Ok(ToolChoiceBody::Word(ToolChoice::Required)),
            _ => Err(Self::wrong("a string")),
        }
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(O::object(fields)?.map(ToolChoiceBody::Object))
    }
}

described!([O: JsonSchema] ToolChoiceBody<O>: named O::schema_name().replace("ChosenTools", "ToolChoice"), |generator| json_schema!({
    "description": "Whether the model may, must or must not call tools. `required` needs tools.",
    "anyOf": [
        { "type": "string", "enum": ["auto", "none", "required"] },
        generator.subschema_for::<O>(),
    ],
}));

object! {
    /// Requires a call of one tool in `tools`, or allows only some of them: the model does not see the others.
    pub(crate) struct ChatChosenTools {
        /// The kind of choice.
        r#type: Field<String>,
        /// The tool to call.
        function: Field<ToolNamed>,
        /// The allowed tools.
        allowed_tools: Field<AllowedChatTools>,
    }
    by "type" {
        Variant { words: &["function"], is_default: true, needs: &["function"], ..Variant::NEW },
        Variant { words: &["allowed_tools"], needs: &["allowed_tools"], ..Variant::NEW },
    }
}

object! {
    /// The allowed tools, and whether one of them must be called.
    pub(crate) struct AllowedChatTools {
        /// `required`: the reply must call one of them.
        mode: Field<Word<AllowedMode>>,
        /// The allowed tools.
        #[schemars(length(min = 1))]
        tools: Required<Items<AllowedChatTool>>,
    }
}

object! {
    /// An allowed tool.
    pub(crate) struct AllowedChatTool {
        /// The function.
        function: Required<ToolNamed>,
    }
}

object! {
    /// Names a tool.
    pub(crate) struct ToolNamed {
        /// Its name.
        name: Required<ToolName>,
    }
}

/// Whether the reply must call one of the allowed tools.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AllowedMode {
    Auto,
    Required,
}

impl Words for AllowedMode {
    const WRONG: &'static str = "must be auto or required";
}

impl From<AllowedMode> for ToolChoice {
    fn from(mode: AllowedMode) -> ToolChoice {
        match mode {
            AllowedMode::Auto => ToolChoice::Auto,
            AllowedMode::Required => ToolChoice::Required,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::request::read::read;
    use crate::tools::{Strictness, Tool};

    fn parsed(body: Value) -> Result<ToolUse, String> {
        let tools = read::<ChatToolsBody>(body.to_string().as_bytes()).and_then(ChatToolsBody::check);
        tools.map_err(|error| error.param.unwrap_or_default())
    }

    fn tool(name: &str) -> Value {
        json!({ "type": "function", "function": { "name": name } })
    }

    #[test]
    fn tools_take_one_form() {
        let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
        let full = json!({ "type": "function", "function": {
            "name": "f", "description": "d", "parameters": schema, "strict": true, "odd": 1 } });
        let tools = parsed(json!({ "tools": [full, tool("g.h-1")], "parallel_tool_calls": false })).unwrap();
        assert!(!tools.parallel);
        assert_eq!([tools.tools[0].strict, tools.tools[1].strict], [Strictness::Strict, Strictness::Loose]);
        assert_eq!(
            tools.tools[0].definition(),
            json!({ "type": "function", "function": { "name": "f", "description": "d", "parameters": schema } })
        );
        assert_eq!(tools.tools[1].parameters, Tool::no_parameters());
        assert_eq!(parsed(json!({})), Ok(ToolUse::default()));
        let forbidden = ToolUse { choice: ToolChoice::None, parallel: false, ..ToolUse::default() };
        for nothing in [json!({ "tools": [] }), json!({})] {
            let mut body = json!({ "tool_choice": "none", "parallel_tool_calls": false });
            body.as_object_mut().unwrap().extend(nothing.as_object().unwrap().clone());
            assert_eq!(parsed(body).as_ref(), Ok(&forbidden));
        }
    }

    #[test]
    fn a_choice_says_what_may_be_called() {
        let of = |choice: Value| parsed(json!({ "tools": [tool("f"), tool("g")], "tool_choice": choice })).unwrap();
        let named = of(json!({ "type": "function", "function": { "name": "g" } }));
        assert!(named.is_forced() && named.offered().len() == 2);
        assert_eq!(named.callable().iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>(), ["g"]);
        assert!(of(json!("required")).is_forced() && of(json!("required")).callable().len() == 2);
        assert!(!of(json!("auto")).is_forced() && of(json!(null)).offered().len() == 2);
        assert!(of(json!("none")).offered().is_empty());
    }

    #[test]
    fn a_choice_can_allow_some_tools() {
        let of = |allowed: Value| {
            let choice = json!({ "type": "allowed_tools", "allowed_tools": allowed });
            parsed(json!({ "tools": [tool("f"), tool("g")], "tool_choice": choice }))
        };
        let some = of(json!({ "mode": "required", "tools": [tool("g")] })).unwrap();
        assert!(some.is_forced() && some.offered().len() == 1 && some.offered()[0].name == "g");
        assert!(!of(json!({ "mode": "auto", "tools": [tool("f")] })).unwrap().is_forced());
        assert_eq!(of(json!({ "mode": "never", "tools": [tool("f")] })), Err("tool_choice.allowed_tools.mode".into()));
        assert_eq!(of(json!({ "tools": [tool("h")] })), Err("tool_choice.allowed_tools.tools".into()));
        assert_eq!(of(json!(null)), Err("tool_choice.allowed_tools".into()));
    }

    #[test]
    fn what_cannot_be_a_tool_is_named() {
        let refused = |body: Value| parsed(body).unwrap_err();
        assert_eq!(refused(json!({ "tools": [tool("no spaces")] })), "tools[0].function.name");
        assert_eq!(refused(json!({ "tools": [tool("")] })), "tools[0].function.name");
        assert_eq!(refused(json!({ "tools": [tool(&"x".repeat(129))] })), "tools[0].function.name");
        assert_eq!(refused(json!({ "tools": [tool("f"), tool("f")] })), "tools[1].function.name");
        assert_eq!(refused(json!({ "tools": vec![tool("f"); 513] })), "tools");
        assert_eq!(refused(json!({ "tools": [{ "type": "web_search" }] })), "tools[0].type");
        assert_eq!(refused(json!({ "tools": [{ "type": "function" }] })), "tools[0].function");
        assert_eq!(refused(json!({ "tools": ["f"] })), "tools[0]");
        let with = |parameters: Value| json!({ "tools": [{ "function": { "name": "f", "parameters": parameters } }] });
        assert_eq!(refused(with(json!("object"))), "tools[0].function.parameters");
        let deep = (0..64).fold(json!({}), |inner, _| json!({ "items": inner }));
        assert_eq!(refused(with(deep)), "tools[0].function.parameters");
        assert_eq!(refused(json!({ "tool_choice": "required" })), "tool_choice");
        let choice = |choice: Value| refused(json!({ "tools": [tool("f")], "tool_choice": choice }));
        assert_eq!(choice(json!("always")), "tool_choice");
        assert_eq!(choice(json!({ "type": "function", "function": { "name": "g" } })), "tool_choice");
        assert_eq!(choice(json!({ "type": "custom", "custom": { "name": "f" } })), "tool_choice");
        assert_eq!(choice(json!(1)), "tool_choice");
    }
}
