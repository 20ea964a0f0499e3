//! Tool definitions in the forms that dialects have for them, and the choice among them in OpenAI's words.

use serde_json::Value;

use super::fields::Fields;
use super::invalid::InvalidRequest;
use crate::tools::{Strictness, Tool, ToolChoice, ToolUse, ToolsError, check};

/// How a dialect writes tools down.
#[derive(Clone, Copy)]
pub(crate) struct Form {
    /// The field of their list.
    list: &'static str,
    /// Where in a tool its function stands, if not in the tool itself.
    function: Option<&'static str>,
    /// The field of the arguments' schema.
    schema: &'static str,
    /// The field of the choice among them.
    choice: &'static str,
    /// The `type` of tools that the client runs. Others run on the servers of the API's maker.
    kind: &'static str,
    /// What a tool is that says nothing of it.
    strict: Strictness,
    /// Whether tools of other types are left out, as nobody here can run them, or refused.
    skips_others: bool,
}

impl Form {
    /// That of chats, which Ollama has too.
    pub(crate) const CHAT: Form = Form {
        list: "tools",
        function: Some("function"),
        schema: "parameters",
        choice: "tool_choice",
        kind: "function",
        strict: Strictness::Loose,
        skips_others: false,
    };
    /// That of chats before tools were called so.
    pub(crate) const FUNCTIONS: Form =
        Form { list: "functions", function: None, choice: "function_call", ..Form::CHAT };
    /// That of `/v1/responses`, where functions are strict unless they say otherwise.
    pub(crate) const RESPONSES: Form =
        Form { function: None, strict: Strictness::IfKnown, skips_others: true, ..Form::CHAT };
    /// Anthropic's.
    pub(crate) const ANTHROPIC: Form =
        Form { function: None, schema: "input_schema", kind: "custom", skips_others: true, ..Form::CHAT };

    /// Reads the tools. Without any, choice and number mean nothing.
    pub(crate) fn read(self, root: Fields<'_>, choice: ToolChoice, parallel: bool) -> Result<ToolUse, InvalidRequest> {
        let values = root.array(self.list)?.unwrap_or_default();
        let (mut tools, mut places) = (Vec::new(), Vec::new());
        for (index, value) in values.iter().enumerate() {
            let path = format!("{}[{index}]", self.list);
            if let Some(tool) = self.definition(Fields::at(value, &path)?)? {
                tools.push(tool);
                places.push(index);
            }
        }
        let tools = ToolUse { tools, choice, parallel };
        check(&tools).map_err(|error| InvalidRequest::at(self.param(&error, &places), error))?;
        Ok(if tools.tools.is_empty() { ToolUse::default() } else { tools })
    }

    /// Reads the tools that a choice allows. The model is not told of the others.
    pub(crate) fn allowed(
        self,
        root: Fields<'_>,
        allowed: Fields<'_>,
        parallel: bool,
    ) -> Result<ToolUse, InvalidRequest> {
        let choice = match allowed.string("mode")? {
            Some("auto") | None => ToolChoice::Auto,
            Some("required") => ToolChoice::Required,
            Some(_) => return Err(InvalidRequest::at(allowed.name("mode"), "must be auto or required")),
        };
        let mut tools = self.read(root, ToolChoice::Auto, parallel)?;
        let names = allowed.array("tools")?.unwrap_or_default().iter();
        let name = |tool: &Value| match self.function {
            Some(function) => tool.get(function)?.get("name")?.as_str().map(str::to_owned),
            None => tool.get("name")?.as_str().map(str::to_owned),
        };
        let names: Vec<String> = names.filter_map(name).collect();
        tools.tools.retain(|tool| names.contains(&tool.name));
        if tools.tools.is_empty() {
            return Err(InvalidRequest::at(allowed.name("tools"), "names none of the functions among 'tools'"));
        }
        Ok(ToolUse { choice, ..tools })
    }

    /// One tool, unless it is to be skipped.
    fn definition(self, tool: Fields<'_>) -> Result<Option<Tool>, InvalidRequest> {
        match tool.string("type")? {
            Some(kind) if kind != self.kind && self.skips_others => return Ok(None),
            Some(kind) if kind != self.kind => {
                let what = format!("A tool other than '{}'", self.kind);
                return Err(InvalidRequest::unsupported(tool.name("type"), what));
            }
            _ => {}
        }
        let Some(name) = self.function else { return self.function(tool).map(Some) };
        let path = tool.name(name);
        let function = tool.get(name).ok_or_else(|| InvalidRequest::at(&*path, "is missing"))?;
        self.function(Fields::at(function, &path)?).map(Some)
    }

    fn function(self, function: Fields<'_>) -> Result<Tool, InvalidRequest> {
        Ok(Tool {
            name: function.string("name")?.unwrap_or_default().to_owned(),
            description: function.string("description")?.map(str::to_owned),
            parameters: function.get(self.schema).map_or_else(Tool::no_parameters, Value::clone),
            strict: match function.boolean("strict")? {
                None => self.strict,
                Some(false) => Strictness::Loose,
                Some(true) => Strictness::Strict,
            },
        })
    }

    /// The field at fault. `places` are those of the tools in the client's list.
    fn param(self, error: &ToolsError, places: &[usize]) -> String {
        let at = |index: &usize, field: &str| {
            let place = places.get(*index).copied().unwrap_or_default();
            let inner = self.function.map(|name| format!(".{name}")).unwrap_or_default();
            format!("{}[{place}]{inner}.{field}", self.list)
        };
        match error {
            ToolsError::TooMany { .. } => self.list.to_owned(),
            ToolsError::Name { index } | ToolsError::Duplicate { index } => at(index, "name"),
            ToolsError::Schema { index, .. } => at(index, self.schema),
            ToolsError::Unknown | ToolsError::NothingToCall => self.choice.to_owned(),
        }
    }
}

/// Reads `tools`, `tool_choice` and `parallel_tool_calls` of a chat.
pub(crate) fn parse(root: Fields<'_>) -> Result<ToolUse, InvalidRequest> {
    let parallel = parallel(root)?;
    let chosen = root.get(Form::CHAT.choice).filter(|choice| choice.get("type").is_some_and(|is| is == ALLOWED));
    let Some(chosen) = chosen else { return Form::CHAT.read(root, choice(root)?, parallel) };
    let path = format!("{}.{ALLOWED}", Form::CHAT.choice);
    let allowed = chosen.get(ALLOWED).ok_or_else(|| InvalidRequest::at(&*path, "is missing"))?;
    Form::CHAT.allowed(root, Fields::at(allowed, &path)?, parallel)
}

/// The type of a choice that allows some of the tools.
pub(crate) const ALLOWED: &str = "allowed_tools";

/// Reads `tools` alone.
pub(crate) fn parse_definitions(root: Fields<'_>) -> Result<ToolUse, InvalidRequest> {
    Form::CHAT.read(root, ToolChoice::Auto, true)
}

/// `parallel_tool_calls`.
pub(crate) fn parallel(root: Fields<'_>) -> Result<bool, InvalidRequest> {
    Ok(root.boolean("parallel_tool_calls")?.unwrap_or(true))
}

/// OpenAI's words for a choice that names no tool.
pub(crate) fn plain_choice(word: &str) -> Option<ToolChoice> {
    match word {
        "auto" => Some(ToolChoice::Auto),
        "none" => Some(ToolChoice::None),
        "required" => Some(ToolChoice::Required),
        _ => None,
    }
}

fn choice(root: Fields<'_>) -> Result<ToolChoice, InvalidRequest> {
    const FIELD: &str = "tool_choice";
    let wrong = || InvalidRequest::at(FIELD, "must be auto, none, required, a function or allowed_tools");
    match root.get(FIELD) {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(word)) => plain_choice(word).ok_or_else(wrong),
        Some(named @ Value::Object(_)) => {
            let name = named.get("function").and_then(|function| function.get("name")).and_then(Value::as_str);
            let is_function = named.get("type").is_none_or(|kind| kind.is_null() || kind == "function");
            name.filter(|_| is_function).map(|name| ToolChoice::Named(name.to_owned())).ok_or_else(wrong)
        }
        Some(_) => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed(body: Value) -> Result<ToolUse, String> {
        parse(Fields::root(body.as_object().unwrap())).map_err(|error| error.param.unwrap_or_default())
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
