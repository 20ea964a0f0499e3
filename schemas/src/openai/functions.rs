//! `functions` and `function_call`: the form that tools had before they were called so. A reply makes one call at most.

use serde_json::{Map, Value, json};

use super::messages;
use crate::request::InvalidRequest;
use crate::request::fields::Fields;
use crate::request::tools::Form;
use crate::tools::{ToolChoice, ToolUse};

const CHOICE: &str = "function_call";

/// Reads the functions; `None` if there are none.
pub(super) fn parse(root: Fields<'_>) -> Result<Option<ToolUse>, InvalidRequest> {
    let wrong = || InvalidRequest::at(CHOICE, "must be auto, none or {name}");
    let choice = match root.get(CHOICE) {
        None => ToolChoice::Auto,
        Some(Value::String(word)) if word == "auto" => ToolChoice::Auto,
        Some(Value::String(word)) if word == "none" => ToolChoice::None,
        Some(named) => {
            let name = named.get("name").and_then(Value::as_str).ok_or_else(wrong)?;
            ToolChoice::Named(name.to_owned())
        }
    };
    let functions = Form::FUNCTIONS.read(root, choice, false)?;
    if functions.tools.is_empty() {
        return Ok(None);
    }
    if root.array("tools")?.is_some_and(|tools| !tools.is_empty()) {
        return Err(InvalidRequest::at("functions", "cannot be there together with 'tools'"));
    }
    Ok(Some(functions))
}

/// The call that an assistant made earlier, in the form of a tool's. It has no id: the result names the function.
pub(super) fn earlier_call(message: Fields<'_>) -> Result<Option<Value>, InvalidRequest> {
    let Some(call) = message.get(CHOICE) else { return Ok(None) };
    let path = message.name(CHOICE);
    let call = Fields::at(call, &path)?;
    let name = call.string("name")?.filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| InvalidRequest::at(call.name("name"), "is missing"))?;
    let mut tool_call = Map::new();
    tool_call.insert("type".to_owned(), "function".into());
    tool_call.insert("function".to_owned(), json!({ "name": name, "arguments": messages::arguments(call)? }));
    Ok(Some(Value::Object(tool_call)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(body: Value) -> Result<Option<ToolUse>, String> {
        parse(Fields::root(body.as_object().unwrap())).map_err(|error| error.param.unwrap_or_default())
    }

    #[test]
    fn functions_are_tools_of_which_one_is_called() {
        let f = || json!([{"name": "f", "parameters": {"type": "object"}}]);
        let choice = |choice: Value| {
            let functions = parsed(json!({"functions": f(), "function_call": choice}))?.unwrap();
            assert!(!functions.parallel && functions.tools[0].name == "f");
            Ok::<_, String>(functions.choice)
        };
        assert_eq!(choice(json!(null)), Ok(ToolChoice::Auto));
        assert_eq!(choice(json!("none")), Ok(ToolChoice::None));
        assert_eq!(choice(json!({"name": "f"})), Ok(ToolChoice::Named("f".into())));
        assert_eq!(choice(json!({"name": "g"})), Err("function_call".into()));
        assert_eq!(choice(json!("required")), Err("function_call".into()));
        assert_eq!(parsed(json!({"functions": [], "function_call": "auto"})), Ok(None));
        assert_eq!(parsed(json!({"function_call": {"name": "f"}})), Err("function_call".into()));
        assert_eq!(parsed(json!({"functions": [{}]})), Err("functions[0].name".into()));
        let tools = json!([{"type": "function", "function": {"name": "g"}}]);
        assert_eq!(parsed(json!({"functions": f(), "tools": tools})), Err("functions".into()));
    }
}
