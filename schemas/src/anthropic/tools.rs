//! `tools` and `tool_choice` of a message.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, Required, missing, object};
use crate::request::tool_choice::CHOICE;
use crate::request::tools::{MessagesTool, check_tools};
use crate::request::values::{Word, Words};
use crate::tools::{MAX_TOOLS, ToolChoice, ToolUse};

object! {
    /// The tools of a message.
    pub(crate) struct MessagesToolsBody {
        /// The tools that the model may call.
        #[schemars(length(max = MAX_TOOLS))]
        tools: Field<Items<MessagesTool>>,
        /// Whether the model must call a tool.
        tool_choice: Field<MessagesToolChoice>,
        // OpenAI's name of `tool_choice.disable_parallel_tool_use`: what either forbids is forbidden.
        #[schemars(skip)]
        parallel_tool_calls: Field<bool>,
    }
}

object! {
    /// Whether the message may, must or must not call tools.
    pub(crate) struct MessagesToolChoice {
        /// The kind of choice. `any` and `tool` need tools.
        r#type: Required<Word<ChoiceKind>>,
        /// With `tool`, the tool to call.
        name: Field<String>,
        /// Allow at most one call.
        disable_parallel_tool_use: Field<bool>,
    }
}

/// The type of [`MessagesToolChoice`].
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ChoiceKind {
    Auto,
    Any,
    Tool,
    None,
}

impl Words for ChoiceKind {
    const WRONG: &'static str = "must be auto, any, tool or none";
}

impl MessagesToolsBody {
    /// Returns the client's own tools. Tools that Anthropic defines, such as `web_search_20250305`, are ignored: they
    /// run on Anthropic's servers, and their schemas are not public.
    pub(super) fn check(self) -> Result<ToolUse, InvalidRequest> {
        let parallel = self.parallel_tool_calls.get("")?.unwrap_or(true);
        let Some(choice) = self.tool_choice.get("")? else {
            return check_tools(self.tools, ToolChoice::Auto, parallel);
        };
        let parallel = parallel && !choice.disable_parallel_tool_use.get(CHOICE)?.unwrap_or(false);
        let name = choice.name.get(CHOICE)?;
        let choice = match choice.r#type.get(CHOICE)?.0 {
            ChoiceKind::Auto => ToolChoice::Auto,
            ChoiceKind::None => ToolChoice::None,
            ChoiceKind::Any => ToolChoice::Required,
            ChoiceKind::Tool => ToolChoice::Named(name.ok_or_else(|| missing(CHOICE, "name"))?),
        };
        check_tools(self.tools, choice, parallel)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::request::read::read;
    use crate::tools::Strictness;

    fn parsed(choice: Value) -> Result<ToolUse, String> {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let body = json!({"tool_choice": choice, "tools": [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            {"name": "f", "description": "d", "input_schema": schema, "cache_control": {"type": "ephemeral"}},
            {"type": "custom", "name": "g", "input_schema": {"type": "object"}, "strict": true}]});
        let tools = read::<MessagesToolsBody>(body.to_string().as_bytes()).and_then(MessagesToolsBody::check);
        tools.map_err(|error| error.param.unwrap_or_default())
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
