//! Tool definitions in OpenAI's form, which Ollama has too.

use serde_json::Value;

use super::fields::Fields;
use super::invalid::InvalidRequest;
use crate::tools::{Tool, ToolChoice, ToolUse, ToolsError, check};

/// Reads `tools`, `tool_choice` and `parallel_tool_calls`. Without tools the others mean nothing.
pub(crate) fn parse(root: Fields<'_>) -> Result<ToolUse, InvalidRequest> {
    let parallel = root.boolean("parallel_tool_calls")?.unwrap_or(true);
    checked(ToolUse { tools: definitions(root)?, choice: choice(root)?, parallel })
}

/// Reads `tools` alone.
pub(crate) fn parse_definitions(root: Fields<'_>) -> Result<ToolUse, InvalidRequest> {
    checked(ToolUse { tools: definitions(root)?, ..ToolUse::default() })
}

fn checked(tools: ToolUse) -> Result<ToolUse, InvalidRequest> {
    check(&tools).map_err(|error| InvalidRequest::at(param(&error), error))?;
    Ok(if tools.tools.is_empty() { ToolUse::default() } else { tools })
}

fn param(error: &ToolsError) -> String {
    match error {
        ToolsError::TooMany { .. } => "tools".to_owned(),
        ToolsError::Name { index } | ToolsError::Duplicate { index } => format!("tools[{index}].function.name"),
        ToolsError::Schema { index, .. } => format!("tools[{index}].function.parameters"),
        ToolsError::Unknown | ToolsError::NothingToCall => "tool_choice".to_owned(),
    }
}

fn definitions(root: Fields<'_>) -> Result<Vec<Tool>, InvalidRequest> {
    let tools = root.array("tools")?.unwrap_or_default();
    tools.iter().enumerate().map(|(index, value)| definition(value, &format!("tools[{index}]"))).collect()
}

fn definition(value: &Value, path: &str) -> Result<Tool, InvalidRequest> {
    let tool = Fields::at(value, path)?;
    if !matches!(tool.string("type")?, None | Some("function")) {
        return Err(InvalidRequest::unsupported(tool.name("type"), "A tool other than 'function'"));
    }
    let path = tool.name("function");
    let function = tool.get("function").ok_or_else(|| InvalidRequest::at(&*path, "is missing"))?;
    let function = Fields::at(function, &path)?;
    Ok(Tool {
        name: function.string("name")?.unwrap_or_default().to_owned(),
        description: function.string("description")?.map(str::to_owned),
        parameters: function.get("parameters").map_or_else(Tool::no_parameters, Value::clone),
        strict: function.boolean("strict")?.unwrap_or(false),
    })
}

fn choice(root: Fields<'_>) -> Result<ToolChoice, InvalidRequest> {
    const FIELD: &str = "tool_choice";
    let wrong = || InvalidRequest::at(FIELD, "must be auto, none, required or {type: function, function: {name}}");
    match root.get(FIELD) {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            _ => Err(wrong()),
        },
        Some(named @ Value::Object(_)) => {
            let name = named.get("function").and_then(|function| function.get("name")).and_then(Value::as_str);
            let is_function = named.get("type").is_none_or(|kind| kind == "function");
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
        assert!(!tools.parallel && tools.tools[0].strict && !tools.tools[1].strict);
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
    fn what_cannot_be_a_tool_is_named() {
        let refused = |body: Value| parsed(body).unwrap_err();
        assert_eq!(refused(json!({ "tools": [tool("no spaces")] })), "tools[0].function.name");
        assert_eq!(refused(json!({ "tools": [tool("")] })), "tools[0].function.name");
        assert_eq!(refused(json!({ "tools": [tool(&"x".repeat(129))] })), "tools[0].function.name");
        assert_eq!(refused(json!({ "tools": [tool("f"), tool("f")] })), "tools[1].function.name");
        assert_eq!(refused(json!({ "tools": vec![tool("f"); 129] })), "tools");
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
