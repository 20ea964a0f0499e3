//! Definitions of tools in the forms of each dialect.

use schemars::JsonSchema;

use super::field::{Field, Items, Required, join, object};
use super::invalid::{InvalidRequest, quoted};
use super::read::{Read, Reading};
use super::room;
use super::schema::{Variant, described};
use super::values::SchemaObject;
use crate::held_schema::Unheld;
use crate::json_values::memory_bytes;
use crate::tools::{
    Described, HostedTool, MAX_NAME_CHARS, Strictness, Tool, ToolChoice, ToolNames, ToolUse, ToolsError, check_list,
};

object! {
    /// A function that the model may call.
    pub(crate) struct Function {
        /// The name by which the model calls it.
        name: Required<ToolName>,
        /// What the tool does, for the model.
        description: Field<String>,
        /// The JSON schema of its arguments.
        parameters: Field<SchemaObject>,
        /// Arguments must follow the schema even if the model need not call the tool.
        strict: Field<bool>,
        #[schemars(skip)]
        r#type: Field<String>,
    }
}

object! {
    /// A tool of `/v1/chat/completions`.
    pub(crate) struct ChatTool {
        /// The only supported type.
        #[schemars(extend("enum" = ["function", null]))]
        r#type: Field<String>,
        /// The function.
        function: Required<Function>,
    }
}

object! {
    /// A tool of `/v1/messages`. Tools that run on Anthropic's servers are skipped.
    pub(crate) struct MessagesTool {
        /// `custom`, or the type of a tool that is skipped, such as `web_search_20250305`.
        r#type: Field<MessagesToolType>,
        /// The name by which the model calls it.
        name: Field<ToolName>,
        /// What the tool does, for the model.
        description: Field<String>,
        /// The JSON schema of its arguments.
        input_schema: Field<SchemaObject>,
        /// Arguments must follow the schema even if the model need not call the tool.
        strict: Field<bool>,
        /// True: the model does not see the tool until a `tool_reference` names it.
        defer_loading: Field<bool>,
    }
    by "type" {
        Variant {
        words: &["custom"], is_default: true, needs: &["name"],
        may_have: &["description", "input_schema", "strict", "defer_loading"], ..Variant::NEW
        },
        Variant {
        words: &["web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "mcp_toolset"],
        ..Variant::NEW
        },
    }
    skipped by MessagesTool::is_anthropics
}

impl MessagesTool {
    fn is_anthropics(&self) -> bool {
        matches!(self.r#type.peek(), Some(MessagesToolType::Anthropics(_)))
    }
}

/// The type of a tool of `/v1/messages`.
#[derive(Debug)]
pub(crate) enum MessagesToolType {
    /// A function that the client runs.
    Custom,
    /// One of Anthropic's own tools.
    Anthropics(String),
}

impl Read for MessagesToolType {
    const EXPECTED: &'static str = String::EXPECTED;

    fn string(word: &str) -> Reading<Self> {
        Ok(match word {
            "custom" => MessagesToolType::Custom,
            _ => MessagesToolType::Anthropics(word.to_owned()),
        })
    }
}

described!([] MessagesToolType: as String);

/// A tool's name, unique in its request.
#[derive(Debug, JsonSchema)]
#[schemars(inline, extend("minLength" = 1, "maxLength" = MAX_NAME_CHARS, "pattern" = "^[a-zA-Z0-9_.-]+$"))]
pub(crate) struct ToolName(pub(crate) String);

impl Read for ToolName {
    const EXPECTED: &'static str = String::EXPECTED;

    fn string(name: &str) -> Reading<Self> {
        Ok(ToolName(name.to_owned()))
    }
}

/// The names of the fields in which a dialect has its tools, for errors.
#[derive(Clone, Copy)]
pub(crate) struct ToolFields {
    /// The field of the list of tools.
    pub(crate) list: &'static str,
    /// The field of the schema of the arguments.
    pub(crate) schema: &'static str,
    /// The field of the choice among the tools.
    pub(crate) choice: &'static str,
    /// The names of tools.
    pub(crate) names: ToolNames,
}

impl ToolFields {
    /// OpenAI's names of these fields.
    pub(crate) const OPENAI: ToolFields =
        ToolFields { list: "tools", schema: "parameters", choice: "tool_choice", names: ToolNames::Plain };
}

/// A tool in the form of a dialect.
pub(crate) trait Definition: Sized {
    const FORM: ToolFields;

    /// Adds the tool at the path `at`, or what it stands for.
    fn define(self, at: &str, tools: &mut DefinedTools) -> Result<(), InvalidRequest>;
}

/// The tools of a body that are read so far.
#[derive(Default)]
pub(crate) struct DefinedTools {
    pub(crate) tools: Vec<Tool>,
    /// The path of each tool's object, for errors.
    pub(crate) places: Vec<String>,
    /// Tools that run on the servers of the API's owner.
    pub(crate) skipped: Vec<HostedTool>,
}

impl DefinedTools {
    pub(crate) fn push(&mut self, tool: Tool, at: impl Into<String>) {
        self.tools.push(tool);
        self.places.push(at.into());
    }

    /// Leaves out a tool of the type `kind`, if it runs on the servers of the API's owner. Errors: it runs at the client,
    /// in a form that no model here has learnt, or its type is unknown.
    pub(crate) fn skip(&mut self, kind: &str, hosted: Option<HostedTool>, at: &str) -> Result<(), InvalidRequest> {
        let Some(hosted) = hosted else {
            return Err(InvalidRequest::unsupported(join(at, "type"), format_args!("A tool of type {}", quoted(kind))));
        };
        if !self.skipped.contains(&hosted) {
            self.skipped.push(hosted);
        }
        Ok(())
    }
}

impl Definition for ChatTool {
    const FORM: ToolFields = ToolFields::OPENAI;

    fn define(self, at: &str, tools: &mut DefinedTools) -> Result<(), InvalidRequest> {
        only_function(self.r#type, at)?;
        let at_function = join(at, "function");
        tools.push(self.function.get(at)?.tool(&at_function, Strictness::Loose)?, at_function);
        Ok(())
    }
}

/// OpenAI's older form of tools.
impl Definition for Function {
    const FORM: ToolFields =
        ToolFields { list: "functions", schema: "parameters", choice: "function_call", names: ToolNames::Plain };

    fn define(mut self, at: &str, tools: &mut DefinedTools) -> Result<(), InvalidRequest> {
        only_function(self.r#type.take(), at)?;
        tools.push(self.tool(at, Strictness::Loose)?, at);
        Ok(())
    }
}

pub(crate) fn only_function(kind: Field<String>, at: &str) -> Result<(), InvalidRequest> {
    match kind.get(at)?.as_deref() {
        None | Some("function") => Ok(()),
        Some(_) => Err(InvalidRequest::unsupported(join(at, "type"), "A tool other than 'function'")),
    }
}

impl Definition for MessagesTool {
    const FORM: ToolFields = ToolFields { schema: "input_schema", ..ChatTool::FORM };

    fn define(self, at: &str, tools: &mut DefinedTools) -> Result<(), InvalidRequest> {
        if let Some(MessagesToolType::Anthropics(kind)) = self.r#type.get(at)? {
            return tools.skip(&kind, HostedTool::of_anthropic(&kind), at);
        }
        let is_deferred = self.defer_loading.get(at)?.unwrap_or(false);
        let tool = Tool {
            name: self.name.get(at)?.map(|name| name.0).unwrap_or_default(),
            description: self.description.get(at)?,
            parameters: self.input_schema.get(at)?.map_or_else(Tool::no_parameters, |schema| schema.0),
            strict: strictness(self.strict.get(at)?, Strictness::Loose),
            unheld: Unheld::default(),
            held: None,
            described: if is_deferred { Described::InHistory } else { Described::InList },
        };
        tools.push(tool, at);
        Ok(())
    }
}

impl Function {
    pub(crate) fn tool(self, at: &str, unless_said: Strictness) -> Result<Tool, InvalidRequest> {
        Ok(Tool {
            // The check of all names also reports a missing one.
            name: self.name.optional(at)?.map(|name| name.0).unwrap_or_default(),
            description: self.description.get(at)?,
            parameters: self.parameters.get(at)?.map_or_else(Tool::no_parameters, |schema| schema.0),
            strict: strictness(self.strict.get(at)?, unless_said),
            unheld: Unheld::default(),
            held: None,
            described: Described::InList,
        })
    }
}

fn strictness(said: Option<bool>, unless_said: Strictness) -> Strictness {
    match said {
        None => unless_said,
        Some(false) => Strictness::Loose,
        Some(true) => Strictness::Strict,
    }
}

/// Checks the tools of a body. Without tools, too, `choice` and `parallel` hold for calls that an upstream's model invents.
pub(crate) fn check_tools<T: Definition>(
    tools: Field<Items<T>>,
    choice: ToolChoice,
    parallel: bool,
) -> Result<ToolUse, InvalidRequest> {
    check_defined(define_all(tools.get("")?)?, T::FORM, choice, parallel)
}

/// Reads the tools of a list, if there is one.
pub(crate) fn define_all<T: Definition>(tools: Option<Items<T>>) -> Result<DefinedTools, InvalidRequest> {
    let mut defined = DefinedTools::default();
    for tool in tools.unwrap_or_default().each(T::FORM.list) {
        let (place, tool) = tool?;
        tool.define(&place, &mut defined)?;
    }
    Ok(defined)
}

/// Checks tools that are read.
pub(crate) fn check_defined(
    DefinedTools { tools, places, skipped }: DefinedTools,
    form: ToolFields,
    choice: ToolChoice,
    parallel: bool,
) -> Result<ToolUse, InvalidRequest> {
    let mut tools = tools;
    check_list(&tools, &choice, form.names)
        .map_err(|error| InvalidRequest::at(form.field_at_fault(&error, &places), error))?;
    hold(&mut tools, &choice);
    Ok(ToolUse { tools: tools.into(), choice, parallel, skipped })
}

/// Finds what engines can hold calls to, for tools whose calls are held to their schemas.
fn hold(tools: &mut [Tool], choice: &ToolChoice) {
    let is_forced = matches!(choice, ToolChoice::Required | ToolChoice::Named(_));
    for tool in tools.iter_mut().filter(|tool| is_forced || tool.strict != Strictness::Loose) {
        tool.find_held();
        room::take(tool.held.as_ref().map_or(0, memory_bytes));
    }
}

/// Keeps only the allowed tools, so that the model does not see the others. Errors: none of them is in the list.
pub(crate) fn keep_allowed(tools: ToolUse, allowed: Allowed) -> Result<ToolUse, InvalidRequest> {
    let mut kept: Vec<Tool> = tools.tools.iter().filter(|tool| allowed.names.contains(&tool.name)).cloned().collect();
    if kept.is_empty() {
        return Err(InvalidRequest::at(allowed.field, "names none of the request's functions"));
    }
    hold(&mut kept, &allowed.choice);
    Ok(ToolUse { tools: kept.into(), choice: allowed.choice, ..tools })
}

/// Some of a body's tools.
pub(crate) struct Allowed {
    pub(crate) choice: ToolChoice,
    pub(crate) names: Vec<String>,
    /// The path of the field that names them, for errors.
    pub(crate) field: String,
}

impl ToolFields {
    /// Returns the path of the wrong field. `places` are the paths of the checked tools.
    fn field_at_fault(self, error: &ToolsError, places: &[String]) -> String {
        let at = |index: &usize, field: &str| join(places.get(*index).map_or(self.list, String::as_str), field);
        match error {
            ToolsError::TooMany { .. } => self.list.to_owned(),
            ToolsError::Name { index, .. } | ToolsError::Duplicate { index } => at(index, "name"),
            ToolsError::Schema { index, .. } => at(index, self.schema),
            ToolsError::Unknown | ToolsError::NothingToCall => self.choice.to_owned(),
        }
    }
}
