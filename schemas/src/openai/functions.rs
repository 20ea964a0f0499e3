//! `functions` and `function_call`: OpenAI's older form of tools. A reply has at most one call.

use schemars::json_schema;
use serde::de::MapAccess;

use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, object};
use crate::request::read::{Read, Reading, ValueProblem};
use crate::request::schema::described;
use crate::request::tool_choice::{ChatToolsBody, ToolNamed};
use crate::request::tools::{Function, check_tools};
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

impl FunctionsBody {
    /// Returns the functions, or `None` if there are none. Errors: the body has functions and tools.
    pub(crate) fn check(self, tools: &mut ChatToolsBody) -> Result<Option<ToolUse>, InvalidRequest> {
        let choice = self.function_call.get("")?.map_or(ToolChoice::Auto, |choice| choice.0);
        let functions = check_tools(self.functions, choice, false)?;
        if functions.tools.is_empty() {
            return Ok(None);
        }
        if tools.tools.take().get("")?.is_some_and(|tools| !tools.is_empty()) {
            return Err(InvalidRequest::at("functions", "cannot be there together with 'tools'"));
        }
        Ok(Some(functions))
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

    fn parsed(body: Value) -> Result<Option<ToolUse>, String> {
        let bytes = body.to_string();
        let mut tools: ChatToolsBody = read(bytes.as_bytes()).unwrap();
        let functions = read::<FunctionsBody>(bytes.as_bytes()).and_then(|body| body.check(&mut tools));
        functions.map_err(|error| error.param.unwrap_or_default())
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
