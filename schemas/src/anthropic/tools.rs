//! `tools` and `tool_choice`.

use crate::request::InvalidRequest;
use crate::request::fields::Fields;
use crate::request::tools::Form;
use crate::tools::{ToolChoice, ToolUse};

const CHOICE: &str = "tool_choice";

/// Reads the client's own tools. Those that Anthropic defines (`web_search_20250305` and the like) are skipped: nobody
/// here runs them, and their schemas are not written down anywhere.
pub(super) fn parse(root: Fields<'_>) -> Result<ToolUse, InvalidRequest> {
    let Some(choice) = root.get(CHOICE) else { return Form::ANTHROPIC.read(root, ToolChoice::Auto, true) };
    let choice = Fields::at(choice, CHOICE)?;
    let parallel = !choice.boolean("disable_parallel_tool_use")?.unwrap_or(false);
    let name = choice.string("name")?;
    let choice = match choice.string("type")? {
        Some("auto") => ToolChoice::Auto,
        Some("none") => ToolChoice::None,
        Some("any") => ToolChoice::Required,
        Some("tool") => {
            let name = name.ok_or_else(|| InvalidRequest::at(choice.name("name"), "is missing"))?;
            ToolChoice::Named(name.to_owned())
        }
        _ => return Err(InvalidRequest::at(choice.name("type"), "must be auto, any, tool or none")),
    };
    Form::ANTHROPIC.read(root, choice, parallel)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::tools::Strictness;

    fn parsed(choice: Value) -> Result<ToolUse, String> {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let body = json!({"tool_choice": choice, "tools": [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            {"name": "f", "description": "d", "input_schema": schema, "cache_control": {"type": "ephemeral"}},
            {"type": "custom", "name": "g", "input_schema": {"type": "object"}, "strict": true}]});
        parse(Fields::root(body.as_object().unwrap())).map_err(|error| error.param.unwrap_or_default())
    }

    #[test]
    fn the_clients_tools_are_read_and_anthropics_skipped() {
        let tools = parsed(json!(null)).unwrap();
        assert_eq!(tools.tools.iter().map(|tool| &*tool.name).collect::<Vec<_>>(), ["f", "g"]);
        assert_eq!(tools.tools[0].parameters["properties"]["a"]["type"], "integer");
        assert!(tools.parallel);
        assert_eq!([tools.tools[0].strict, tools.tools[1].strict], [Strictness::Loose, Strictness::Strict]);
    }

    #[test]
    fn a_choice_says_what_may_be_called() {
        let choice = |choice: Value| parsed(choice).map(|tools| (tools.choice, tools.parallel));
        assert_eq!(choice(json!({"type": "auto"})), Ok((ToolChoice::Auto, true)));
        assert_eq!(choice(json!({"type": "none"})), Ok((ToolChoice::None, true)));
        let one = json!({"type": "any", "disable_parallel_tool_use": true});
        assert_eq!(choice(one), Ok((ToolChoice::Required, false)));
        assert_eq!(choice(json!({"type": "tool", "name": "g"})), Ok((ToolChoice::Named("g".into()), true)));
        assert_eq!(choice(json!({"type": "tool", "name": "web_search"})), Err("tool_choice".into()));
        assert_eq!(choice(json!({"type": "tool"})), Err("tool_choice.name".into()));
        assert_eq!(choice(json!({"type": "always"})), Err("tool_choice.type".into()));
        assert_eq!(choice(json!("any")), Err("tool_choice".into()));
    }
}
