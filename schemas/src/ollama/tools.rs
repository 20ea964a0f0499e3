//! `tools` of `/api/chat`, whose names Ollama does not limit.

use schemars::JsonSchema;

use crate::request::InvalidRequest;
use crate::request::field::{Field, Required, join, object};
use crate::request::read::{Read, Reading};
use crate::request::tools::{DefinedTools, Definition, ToolFields, only_function};
use crate::request::values::SchemaObject;
use crate::tools::{Described, MAX_NAME_CHARS, Strictness, Tool, ToolNames};

object! {
    /// A tool of `/api/chat`.
    pub(crate) struct OllamaTool {
        /// The only supported type.
        #[schemars(extend("enum" = ["function", null]))]
        r#type: Field<String>,
        /// The function.
        function: Required<OllamaToolFunction>,
    }
}

object! {
    /// A function that the model may call.
    pub(crate) struct OllamaToolFunction {
        /// The name by which the model calls it.
        name: Required<OllamaToolName>,
        /// What the tool does, for the model.
        description: Field<String>,
        /// The JSON schema of its arguments.
        parameters: Field<SchemaObject>,
    }
}

/// A tool's name: any that the models' formats of calls can represent.
#[derive(Debug, JsonSchema)]
#[schemars(inline, extend("minLength" = 1, "maxLength" = MAX_NAME_CHARS, "pattern" = "^[a-zA-Z0-9_./:@+#-]+( [a-zA-Z0-9_./:@+#-]+)*$"))]
pub(crate) struct OllamaToolName(String);

impl Read for OllamaToolName {
    const EXPECTED: &'static str = String::EXPECTED;

    fn string(name: &str) -> Reading<Self> {
        Ok(OllamaToolName(name.to_owned()))
    }
}

impl Definition for OllamaTool {
    const FORM: ToolFields = ToolFields { names: ToolNames::Representable, ..ToolFields::OPENAI };

    fn define(self, at: &str, tools: &mut DefinedTools) -> Result<(), InvalidRequest> {
        only_function(self.r#type, at)?;
        let place = join(at, "function");
        let function = self.function.get(at)?;
        let tool = Tool {
            // The check of all names also reports a missing one.
            name: function.name.optional(&place)?.map(|name| name.0).unwrap_or_default(),
            description: function.description.get(&place)?,
            parameters: function.parameters.get(&place)?.map_or_else(Tool::no_parameters, |schema| schema.0),
            strict: Strictness::Loose,
            held: None,
            unheld: Default::default(),
            described: Described::InList,
        };
        tools.push(tool, place);
        Ok(())
    }
}
