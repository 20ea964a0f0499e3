//! `functions` and `function_call`: OpenAI's older form of tools. A reply has at most one call.

use schemars::json_schema;
use serde::de::MapAccess;

use crate::request::field::{Field, Items, object};
use crate::request::read::{Read, Reading, ValueProblem};
use crate::request::schema::described;
use crate::request::tool_choice::{ChatToolsBody, ChatToolsRead, ChosenTools, ToolNamed};
use crate::request::tools::{ChatTool, Definition, Function, ToolFields, define_all};
use crate::request::{InvalidRequest, notes};
use crate::tools::{MAX_TOOLS, ToolChoice, ToolUse};

object! {
    /// The functions and the choice among them.
    pub(crate) struct FunctionsBody {
        /// The older form of `tools`. Not with `tools`.
        #[schemars(length(max = MAX_TOOLS))]
        functions: Field<Items<Function>>,
        /// The older form of `tool_choice`.
        function_call: Field<FunctionChoice>,
    }
}

/// The tools of a chat in either form.
pub(crate) struct ChatTools {
    pub(crate) tools: ToolUse,
    /// They came as `functions`.
    pub(crate) has_functions: bool,
}

impl FunctionsBody {
    /// Returns the tools in either form. A choice under the other form's name counts if there is none under the own name. Errors:
    /// the body has functions and tools.
    pub(crate) fn check(self, tools: ChatToolsBody) -> Result<ChatTools, InvalidRequest> {
        let functions = self.functions.get("")?;
        let ChatToolsRead { tools, chosen, parallel } = tools.read()?;
        let has_functions = functions.as_ref().is_some_and(|functions| !functions.is_empty());
        if has_functions && tools.as_ref().is_some_and(|tools| !tools.is_empty()) {
            return Err(InvalidRequest::at("functions", "cannot be there together with 'tools'"));
        }
        let older = (self.function_call.get("")?.map(|choice| ChosenTools::All(choice.0)), Function::FORM.choice);
        let newer = (chosen, ChatTool::FORM.choice);
        let ((own, own_field), (other, other_field)) = if has_functions { (older, newer) } else { (newer, older) };
        let (chosen, choice) = match (own, other) {
            (None, Some(other)) => (other, other_field),
            (own, other) => {
                let own = own.unwrap_or_default();
                if other.is_some_and(|other| other.choice() != own.choice()) {
                    notes::ignored(other_field);
                }
                (own, own_field)
            }
        };
        let tools = match has_functions {
            true => chosen.among(define_all(functions)?, ToolFields { choice, ..Function::FORM }, false)?,
            false => chosen.among(define_all(tools)?, ToolFields { choice, ..ChatTool::FORM }, parallel)?,
        };
        Ok(ChatTools { tools, has_functions })
    }
}

/// Whether the reply may, must or must not call a function.
#[derive(Debug)]
pub(crate) struct FunctionChoice(ToolChoice);

impl Read for FunctionChoice {
    const EXPECTED: &'static str = "auto, none or {name}";

    fn wrong(_: &'static str) -> ValueProblem {
        ValueProblem::value(format!("must be {}", Self::EXPECTED))
    }

    fn string(word: &str) -> Reading<Self> {
        match word {
            "auto" => Ok(FunctionChoice(ToolChoice::Auto)),
            "none" => Ok(FunctionChoice(ToolChoice::None)),
            _ => Err(Self::wrong("a string")),
        }
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        let name = ToolNamed::object(fields)?.ok().and_then(|named| named.name.sound());
        Ok(name.map(|name| FunctionChoice(ToolChoice::Named(name.0))).ok_or_else(|| Self::wrong("an object")))
    }
}

described!([] FunctionChoice: named "FunctionChoice", |generator| json_schema!({
    "description": "Whether the reply may call a function (`auto`), must not (`none`), or must call this one.",
    "anyOf": [{ "type": "string", "enum": ["auto", "none"] }, generator.subschema_for::<ToolNamed>()],
}));

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::request::read::read;
    use crate::request::{MeasuredParse, measured};

    /// The functions, or the tools if there are none.
    fn parsed(body: Value) -> Result<Result<ToolUse, ToolUse>, String> {
        let bytes = body.to_string();
        let tools: ChatToolsBody = read(bytes.as_bytes()).unwrap();
        let functions = read::<FunctionsBody>(bytes.as_bytes()).and_then(|body| body.check(tools));
        let functions = functions.map_err(|error| error.param.unwrap_or_default())?;
        Ok(if functions.has_functions { Ok(functions.tools) } else { Err(functions.tools) })
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
        assert_eq!(parsed(json!({"functions": [], "function_call": "auto"})), Ok(Err(ToolUse::default())));
        assert_eq!(parsed(json!({"function_call": {"name": "f"}})), Err("function_call".into()));
        assert_eq!(parsed(json!({"functions": [{}]})), Err("functions[0].name".into()));
        let tools = json!([{"type": "function", "function": {"name": "g"}}]);
        assert_eq!(parsed(json!({"functions": f(), "tools": tools})), Err("functions".into()));
    }

    #[test]
    fn either_name_of_the_choice_counts_for_either_list() {
        let functions = json!({"functions": [{"name": "f"}, {"name": "g"}]});
        let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
        let tools = json!({"tools": [tool("f"), tool("g")]});
        let of = |list: &Value, field: &str, choice: Value| {
            let mut body = list.clone();
            body[field] = choice;
            let (Ok(used) | Err(used)) = parsed(body)?;
            let names: Vec<String> = used.tools.iter().map(|tool| tool.name.clone()).collect();
            Ok::<_, String>((used.choice, names.concat()))
        };
        let both = || "fg".to_owned();
        for list in [&functions, &tools] {
            assert_eq!(of(list, "tool_choice", json!("required")), Ok((ToolChoice::Required, both())));
            for (field, named) in [
                ("tool_choice", json!({"type": "function", "function": {"name": "g"}})),
                ("function_call", json!({"name": "g"})),
            ] {
                assert_eq!(
                    of(list, field, named.clone()),
                    Ok((ToolChoice::Named("g".into()), both())),
                    "{list} {field}"
                );
            }
            let unknown = json!({"type": "function", "function": {"name": "h"}});
            assert_eq!(of(list, "tool_choice", unknown), Err("tool_choice".into()));
            assert_eq!(of(list, "function_call", json!({"name": "h"})), Err("function_call".into()));
            let allowed = json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("g")]}});
            assert_eq!(of(list, "tool_choice", allowed), Ok((ToolChoice::Required, "g".into())));
        }
    }

    #[test]
    fn calls_that_are_forbidden_under_either_name_are() {
        let lists = [
            json!({}),
            json!({"tools": [{"type": "function", "function": {"name": "f"}}]}),
            json!({"functions": [{"name": "f"}]}),
        ];
        for list in lists {
            let choice = |new: &str, old: &str| {
                let mut body = list.clone();
                for (field, word) in
                    [("tool_choice", new), ("function_call", old)].into_iter().filter(|(_, w)| !w.is_empty())
                {
                    body[field] = word.into();
                }
                let MeasuredParse { value, notes, .. } = measured(|| parsed(body));
                (value.unwrap().unwrap_or_else(|tools| tools).choice, notes.ignored.join(" "))
            };
            assert_eq!(choice("none", ""), (ToolChoice::None, String::new()), "{list}");
            assert_eq!(choice("", "none"), (ToolChoice::None, String::new()), "{list}");
            assert_eq!(choice("none", "none"), (ToolChoice::None, String::new()), "{list}");
            let (own, other) = match list.get("functions") {
                Some(_) => (ToolChoice::None, ToolChoice::Auto),
                None => (ToolChoice::Auto, ToolChoice::None),
            };
            let ignored = if own == ToolChoice::None { "tool_choice" } else { "function_call" };
            assert_eq!(choice("auto", "none"), (own, ignored.to_owned()), "{list}");
            assert_eq!(choice("none", "auto"), (other, ignored.to_owned()), "{list}");
        }
    }
}
