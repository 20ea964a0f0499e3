//! `tools`, `tool_choice` and `parallel_tool_calls` of a response.

use serde_json::{Value, json};

use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, join, object};
use crate::request::read::Echoed;
use crate::request::schema::Variant;
use crate::request::tools::{
    ALLOWED, Allowed, AllowedMode, CHOICE, ResponseTool, ToolChoiceBody, ToolName, ToolNamed, check_allowed,
    check_tools, wrong_choice,
};
use crate::request::values::Word;
use crate::tools::{MAX_TOOLS, Strictness, Tool, ToolChoice, ToolUse};

object! {
    /// The tools of a response.
    pub(crate) struct ResponseToolsBody {
        /// The tools that the model may call.
        #[schemars(length(max = MAX_TOOLS))]
        tools: Field<Items<ResponseTool>>,
        /// Which of the tools the model must call.
        tool_choice: Field<Echoed<ToolChoiceBody<ResponseChosenTools>>>,
        /// Allows several calls in one reply.
        parallel_tool_calls: Field<bool>,
    }
}

object! {
    /// Requires a call of one function in `tools`, or allows only some of them.
    pub(crate) struct ResponseChosenTools {
        /// The kind of choice.
        r#type: Field<String>,
        /// The function to call.
        name: Field<ToolName>,
        /// With `allowed_tools`, `required`: the reply must call one of them.
        mode: Field<Word<AllowedMode>>,
        /// The allowed tools.
        #[schemars(length(min = 1))]
        tools: Field<Items<ToolNamed>>,
    }
    by "type" {
        Variant { words: &["function"], needs: &["name"], ..Variant::NEW },
        Variant { words: &["allowed_tools"], needs: &["tools"], may_have: &["mode"], ..Variant::NEW },
    }
}

impl ResponseToolsBody {
    /// Returns the functions, and the choice as the client wrote it. Tools that run on OpenAI's servers are ignored.
    pub(super) fn check(self) -> Result<(ToolUse, Value), InvalidRequest> {
        let parallel = self.parallel_tool_calls.get("")?.unwrap_or(true);
        let (choice, echo) = match self.tool_choice.get("")? {
            None => (ToolChoice::Auto, "auto".into()),
            Some(Echoed { read: ToolChoiceBody::Word(choice), written }) => (choice, written),
            Some(Echoed { read: ToolChoiceBody::Object(chosen), written }) => {
                match chosen.r#type.get(CHOICE)?.as_deref() {
                    Some("function") => {
                        let name = chosen.name.get(CHOICE)?.ok_or_else(wrong_choice)?;
                        (ToolChoice::Named(name.0), written)
                    }
                    Some(ALLOWED) => {
                        let choice = chosen.mode.get(CHOICE)?.map_or(ToolChoice::Auto, |mode| mode.0.into());
                        let names = chosen.tools.get(CHOICE)?.unwrap_or_default().sound();
                        let names = names.filter_map(|named| named.name.sound()).map(|name| name.0).collect();
                        let allowed = Allowed { choice, names, field: join(CHOICE, "tools") };
                        return Ok((check_allowed(self.tools, allowed, parallel)?, written));
                    }
                    Some(_) => {
                        return Err(InvalidRequest::unsupported(CHOICE, "A tool that runs on OpenAI's servers"));
                    }
                    None => return Err(wrong_choice()),
                }
            }
        };
        Ok((check_tools(self.tools, choice, parallel)?, echo))
    }
}

/// Returns a function as replies repeat it. `strict` is null if the client did not send it: whether the engine can
/// enforce the schema is known only later.
pub(super) fn echo(tool: &Tool) -> Value {
    json!({
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": match tool.strict {
            Strictness::Loose => Some(false),
            Strictness::IfKnown => None,
            Strictness::Strict => Some(true),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::read::read;

    fn parsed(body: Value) -> Result<ToolUse, String> {
        let tools = read::<ResponseToolsBody>(body.to_string().as_bytes()).and_then(ResponseToolsBody::check);
        tools.map(|(tools, _)| tools).map_err(|error| error.param.unwrap_or_default())
    }

    fn tools() -> Value {
        json!([{"type": "web_search"}, {"type": "function", "name": "f", "description": "d", "strict": true,
            "parameters": {"type": "object"}}, {"type": "function", "name": "g"},
            {"type": "function", "name": "h", "strict": false}])
    }

    #[test]
    fn functions_stand_flat_and_other_tools_are_skipped() {
        let all = parsed(json!({ "tools": tools(), "parallel_tool_calls": false })).unwrap();
        assert_eq!(all.tools.iter().map(|tool| &*tool.name).collect::<Vec<_>>(), ["f", "g", "h"]);
        assert!(!all.parallel);
        let strict: Vec<_> = all.tools.iter().map(|tool| (tool.strict, echo(tool)["strict"].clone())).collect();
        use Strictness::{IfKnown, Loose, Strict};
        assert_eq!(strict, [(Strict, json!(true)), (IfKnown, json!(null)), (Loose, json!(false))]);
        assert_eq!(
            echo(&all.tools[0]),
            json!({"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": true})
        );
        assert_eq!(parsed(json!({ "tools": [{"type": "local_shell"}] })), Ok(ToolUse::default()));
    }

    #[test]
    fn a_choice_is_a_word_a_function_or_some_of_them() {
        let of = |choice: Value| parsed(json!({ "tools": tools(), "tool_choice": choice }));
        assert_eq!(of(json!("required")).unwrap().choice, ToolChoice::Required);
        assert_eq!(of(json!({"type": "function", "name": "g"})).unwrap().choice, ToolChoice::Named("g".into()));
        let g = json!([{"type": "function", "name": "g"}]);
        let some = of(json!({"type": "allowed_tools", "mode": "required", "tools": g})).unwrap();
        assert_eq!((some.choice, &*some.tools[0].name, some.tools.len()), (ToolChoice::Required, "g", 1));
        assert_eq!(of(json!("always")), Err("tool_choice".into()));
        assert_eq!(of(json!({"type": "function", "name": "i"})), Err("tool_choice".into()));
        assert_eq!(of(json!({"type": "file_search"})), Err("tool_choice".into()));
        assert_eq!(of(json!({"type": "allowed_tools", "tools": []})), Err("tool_choice.tools".into()));
        assert_eq!(
            parsed(json!({ "tools": [{"type": "web_search"}], "tool_choice": "required" })),
            Err("tool_choice".into())
        );
        let second = json!([{"type": "web_search"}, {"type": "function", "name": "a b"}]);
        assert_eq!(parsed(json!({ "tools": second })), Err("tools[1].name".into()));
    }
}
