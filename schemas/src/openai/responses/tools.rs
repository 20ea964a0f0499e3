//! `tools`, `tool_choice` and `parallel_tool_calls`.

use serde_json::{Value, json};

use crate::request::InvalidRequest;
use crate::request::fields::Fields;
use crate::request::tools::{ALLOWED, Form, parallel, plain_choice};
use crate::tools::{Strictness, Tool, ToolChoice, ToolUse};

const CHOICE: &str = "tool_choice";

/// Reads the functions. Tools that run on OpenAI's own servers are skipped, as nobody here can run them.
pub(super) fn parse(root: Fields<'_>) -> Result<ToolUse, InvalidRequest> {
    let parallel = parallel(root)?;
    let wrong = || InvalidRequest::at(CHOICE, "must be auto, none, required, a function or allowed_tools");
    let choice = match root.get(CHOICE) {
        None => ToolChoice::Auto,
        Some(Value::String(word)) => plain_choice(word).ok_or_else(wrong)?,
        Some(chosen @ Value::Object(_)) => {
            let chosen = Fields::at(chosen, CHOICE)?;
            match chosen.string("type")? {
                Some("function") => ToolChoice::Named(chosen.string("name")?.ok_or_else(wrong)?.to_owned()),
                Some(ALLOWED) => return Form::RESPONSES.allowed(root, chosen, parallel),
                Some(_) => return Err(InvalidRequest::unsupported(CHOICE, "A tool that runs on OpenAI's servers")),
                None => return Err(wrong()),
            }
        }
        Some(_) => return Err(wrong()),
    };
    Form::RESPONSES.read(root, choice, parallel)
}

/// A function as replies repeat it. Without a word of the client's the schema is held if it can be, which is known only
/// later: `strict` is null then.
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

    fn parsed(body: Value) -> Result<ToolUse, String> {
        parse(Fields::root(body.as_object().unwrap())).map_err(|error| error.param.unwrap_or_default())
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
