//! Definitions of tools in the forms of each dialect, and OpenAI's choice among them.

use schemars::{JsonSchema, json_schema};
use serde::Deserialize;
use serde::de::MapAccess;

use super::field::{Field, Items, Required, join, object};
use super::invalid::{InvalidRequest, quoted};
use super::read::{Read, Reading, ValueProblem};
use super::schema::{Variant, described};
use super::values::{SchemaObject, Word, Words};
use crate::tools::{
    Described, HostedTool, MAX_NAME_CHARS, MAX_TOOLS, Strictness, Tool, ToolChoice, ToolUse, ToolsError, check,
};

object! {
    /// A function that the model may call.
    pub(crate) struct Function {
        /// The name by which the model calls it.
        name: Required<ToolName>,
        /// What the tool does, for the model.
        description: Field<String>,
        /// The JSON schema of its arguments.
        parameters: Field<SchemaObject>,
        /// Arguments must follow the schema even if the model need not call the tool.
        strict: Field<bool>,
        #[schemars(skip)]
        r#type: Field<String>,
    }
}

object! {
    /// A tool of `/v1/chat/completions`.
    pub(crate) struct ChatTool {
        /// The only supported type.
        #[schemars(extend("enum" = ["function", null]))]
        r#type: Field<String>,
        /// The function.
        function: Required<Function>,
    }
}

object! {
    /// A tool of `/v1/messages`. Tools that run on Anthropic's servers are skipped.
    pub(crate) struct MessagesTool {
        /// `custom`, or the type of a tool that is skipped, such as `web_search_20250305`.
        r#type: Field<MessagesToolType>,
        /// The name by which the model calls it.
        name: Field<ToolName>,
        /// What the tool does, for the model.
        description: Field<String>,
        /// The JSON schema of its arguments.
        input_schema: Field<SchemaObject>,
        /// Arguments must follow the schema even if the model need not call the tool.
        strict: Field<bool>,
        /// True: the model does not see the tool until a `tool_reference` names it.
        defer_loading: Field<bool>,
    }
    by "type" {
        Variant {
        words: &["custom"], is_default: true, needs: &["name"],
        may_have: &["description", "input_schema", "strict", "defer_loading"], ..Variant::NEW
        },
        Variant {
        words: &["web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "mcp_toolset"],
        ..Variant::NEW
        },
    }
}

/// The type of a tool of `/v1/messages`.
#[derive(Debug)]
pub(crate) enum MessagesToolType {
    /// A function that the client runs.
    Custom,
    /// One of Anthropic's own tools.
    Anthropics(String),
}

impl Read for MessagesToolType {
    const EXPECTED: &'static str = String::EXPECTED;

    fn string(word: &str) -> Reading<Self> {
        Ok(match word {
            "custom" => MessagesToolType::Custom,
            _ => MessagesToolType::Anthropics(word.to_owned()),
        })
    }
}

described!([] MessagesToolType: as String);

/// A tool's name, unique in its request.
#[derive(Debug, JsonSchema)]
#[schemars(inline, extend("minLength" = 1, "maxLength" = MAX_NAME_CHARS, "pattern" = "^[a-zA-Z0-9_.-]+$"))]
pub(crate) struct ToolName(pub(crate) String);

impl Read for ToolName {
    const EXPECTED: &'static str = String::EXPECTED;

    fn string(name: &str) -> Reading<Self> {
        Ok(ToolName(name.to_owned()))
    }
}

/// The names of the fields in which a dialect has its tools, for errors.
#[derive(Clone, Copy)]
pub(crate) struct Form {
    /// The field of the list of tools.
    pub(crate) list: &'static str,
    /// The field of the schema of the arguments.
    schema: &'static str,
    /// The field of the choice among the tools.
    choice: &'static str,
}

/// A tool in the form of a dialect.
pub(crate) trait Definition: Sized {
    const FORM: Form;

    /// Adds the tool at the path `at`, or what it stands for.
    fn define(self, at: &str, tools: &mut DefinedTools) -> Result<(), InvalidRequest>;
}

/// The tools of a body that are read so far.
#[derive(Default)]
pub(crate) struct DefinedTools {
    pub(crate) tools: Vec<Tool>,
    /// The path of each tool's object, for errors.
    pub(crate) places: Vec<String>,
    /// Tools that run on the servers of the API's owner.
    pub(crate) skipped: Vec<HostedTool>,
}

impl DefinedTools {
    pub(crate) fn push(&mut self, tool: Tool, at: impl Into<String>) {
        self.tools.push(tool);
        self.places.push(at.into());
    }

    /// Leaves out a tool of the type `kind`, if it runs on the servers of the API's owner. Errors: it runs at the client,
    /// in a form that no model here has learnt, or its type is unknown.
    pub(crate) fn skip(&mut self, kind: &str, hosted: Option<HostedTool>, at: &str) -> Result<(), InvalidRequest> {
        let Some(hosted) = hosted else {
            return Err(InvalidRequest::unsupported(join(at, "type"), format_args!("A tool of type {}", quoted(kind))));
        };
        if !self.skipped.contains(&hosted) {
            self.skipped.push(hosted);
        }
        Ok(())
    }
}

impl Definition for ChatTool {
    const FORM: Form = Form { list: "tools", schema: "parameters", choice: "tool_choice" };

    fn define(self, at: &str, tools: &mut DefinedTools) -> Result<(), InvalidRequest> {
        only_function(self.r#type, at)?;
        let at_function = join(at, "function");
        tools.push(self.function.get(at)?.tool(&at_function, Strictness::Loose)?, at_function);
        Ok(())
    }
}

/// OpenAI's older form of tools.
impl Definition for Function {
    const FORM: Form = Form { list: "functions", schema: "parameters", choice: "function_call" };

    fn define(mut self, at: &str, tools: &mut DefinedTools) -> Result<(), InvalidRequest> {
        only_function(self.r#type.take(), at)?;
        tools.push(self.tool(at, Strictness::Loose)?, at);
        Ok(())
    }
}

fn only_function(kind: Field<String>, at: &str) -> Result<(), InvalidRequest> {
    match kind.get(at)?.as_deref() {
        None | Some("function") => Ok(()),
        Some(_) => Err(InvalidRequest::unsupported(join(at, "type"), "A tool other than 'function'")),
    }
}

impl Definition for MessagesTool {
    const FORM: Form = Form { schema: "input_schema", ..ChatTool::FORM };

    fn define(self, at: &str, tools: &mut DefinedTools) -> Result<(), InvalidRequest> {
        if let Some(MessagesToolType::Anthropics(kind)) = self.r#type.get(at)? {
            return tools.skip(&kind, HostedTool::of_anthropic(&kind), at);
        }
        let is_deferred = self.defer_loading.get(at)?.unwrap_or(false);
        let tool = Tool {
            name: self.name.get(at)?.map(|name| name.0).unwrap_or_default(),
            description: self.description.get(at)?,
            parameters: self.input_schema.get(at)?.map_or_else(Tool::no_parameters, |schema| schema.0),
            strict: strictness(self.strict.get(at)?, Strictness::Loose),
            held: None,
            described: if is_deferred { Described::InHistory } else { Described::InList },
        };
        tools.push(tool, at);
        Ok(())
    }
}

impl Function {
    pub(crate) fn tool(self, at: &str, unless_said: Strictness) -> Result<Tool, InvalidRequest> {
        Ok(Tool {
            // The check of all names also reports a missing one.
            name: self.name.optional(at)?.map(|name| name.0).unwrap_or_default(),
            description: self.description.get(at)?,
            parameters: self.parameters.get(at)?.map_or_else(Tool::no_parameters, |schema| schema.0),
            strict: strictness(self.strict.get(at)?, unless_said),
            held: None,
            described: Described::InList,
        })
    }
}

fn strictness(said: Option<bool>, unless_said: Strictness) -> Strictness {
    match said {
        None => unless_said,
        Some(false) => Strictness::Loose,
        Some(true) => Strictness::Strict,
    }
}

/// Checks the tools of a body. Without tools, `choice` and `parallel` have no effect.
pub(crate) fn check_tools<T: Definition>(
    tools: Field<Items<T>>,
    choice: ToolChoice,
    parallel: bool,
) -> Result<ToolUse, InvalidRequest> {
    let mut defined = DefinedTools::default();
    for tool in tools.get("")?.unwrap_or_default().each(T::FORM.list) {
        let (place, tool) = tool?;
        tool.define(&place, &mut defined)?;
    }
    check_defined(defined, T::FORM, choice, parallel)
}

/// Checks tools that are read.
pub(crate) fn check_defined(
    DefinedTools { tools, places, skipped }: DefinedTools,
    form: Form,
    choice: ToolChoice,
    parallel: bool,
) -> Result<ToolUse, InvalidRequest> {
    let tools = ToolUse { tools, choice, parallel, skipped };
    check(&tools).map_err(|error| InvalidRequest::at(form.field_at_fault(&error, &places), error))?;
    Ok(if tools.tools.is_empty() { ToolUse { skipped: tools.skipped, ..ToolUse::default() } } else { tools })
}

/// Checks the tools of a body and keeps only the allowed ones. The model does not see the others. Errors: no allowed
/// tool is among them.
pub(crate) fn check_allowed<T: Definition>(
    tools: Field<Items<T>>,
    allowed: Allowed,
    parallel: bool,
) -> Result<ToolUse, InvalidRequest> {
    keep_allowed(check_tools(tools, ToolChoice::Auto, parallel)?, allowed)
}

/// Keeps only the allowed tools. Errors: there are none.
pub(crate) fn keep_allowed(mut tools: ToolUse, allowed: Allowed) -> Result<ToolUse, InvalidRequest> {
    tools.tools.retain(|tool| allowed.names.contains(&tool.name));
    if tools.tools.is_empty() {
        return Err(InvalidRequest::at(allowed.field, "names none of the functions among 'tools'"));
    }
    Ok(ToolUse { choice: allowed.choice, ..tools })
}

/// Some of a body's tools.
pub(crate) struct Allowed {
    pub(crate) choice: ToolChoice,
    pub(crate) names: Vec<String>,
    /// The path of the field that names them, for errors.
    pub(crate) field: String,
}

impl Form {
    /// Returns the path of the wrong field. `places` are the paths of the checked tools.
    fn field_at_fault(self, error: &ToolsError, places: &[String]) -> String {
        let at = |index: &usize, field: &str| join(places.get(*index).map_or(self.list, String::as_str), field);
        match error {
            ToolsError::TooMany { .. } => self.list.to_owned(),
            ToolsError::Name { index } | ToolsError::Duplicate { index } => at(index, "name"),
            ToolsError::Schema { index, .. } => at(index, self.schema),
            ToolsError::Unknown | ToolsError::NothingToCall => self.choice.to_owned(),
        }
    }
}

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
        let parallel = self.parallel_tool_calls.get("")?.unwrap_or(true);
        let choice = match self.tool_choice.get("")? {
            None => ToolChoice::Auto,
            Some(ToolChoiceBody::Word(choice)) => choice,
            Some(ToolChoiceBody::Object(chosen)) => match chosen.r#type.peek().map(String::as_str) {
                Some(ALLOWED) => {
                    let at = join(CHOICE, ALLOWED);
                    let list = chosen.allowed_tools.get(CHOICE)?;
                    let list = list.ok_or_else(|| InvalidRequest::at(&*at, "is missing"))?;
                    let choice = list.mode.get(&at)?.map_or(ToolChoice::Auto, |mode| mode.0.into());
                    let functions = list.tools.optional(&at)?.unwrap_or_default().sound();
                    let names = functions.filter_map(|tool| tool.function.sound()?.name.sound());
                    let names = names.map(|name| name.0).collect();
                    return check_allowed(self.tools, Allowed { choice, names, field: join(&at, "tools") }, parallel);
                }
                kind if kind == Some("function") || !chosen.r#type.is_given() => {
                    let name = chosen.function.sound().and_then(|function| function.name.sound());
                    ToolChoice::Named(name.ok_or_else(wrong_choice)?.0)
                }
                _ => return Err(wrong_choice()),
            },
        };
        check_tools(self.tools, choice, parallel)
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
        for nothing in [json!({}), json!({ "tools": [], "tool_choice": "none", "parallel_tool_calls": false })] {
            assert_eq!(parsed(nothing), Ok(ToolUse::default()));
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
