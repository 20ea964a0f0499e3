//! Tools and calls of tools, independent of the dialect.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::held_schema::{HeldSchema, Unheld, held};
use crate::json_values::memory_bytes;

/// A function that the client runs for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tool {
    /// The name by which the model calls it; checked by [`check`].
    pub name: String,
    /// What the tool does, for the model.
    pub description: Option<String>,
    /// The JSON schema of its arguments, which are an object.
    pub parameters: Value,
    /// How closely the arguments of a free call must follow the schema.
    pub strict: Strictness,
    /// Another schema that calls are held to instead, which the model does not see: the part of `parameters` that engines can
    /// hold, or a grammar that the description shows in the client's words.
    pub held: Option<Value>,
    /// The parts of `parameters` that engines do not hold.
    pub unheld: Unheld,
    /// Where the prompt describes the tool.
    pub described: Described,
}

/// Where the prompt describes a tool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Described {
    /// In the list of tools.
    #[default]
    InList,
    /// In the result of the search that loaded it. The list stays as it was, and so does the cached prompt.
    InHistory,
}

/// How closely the arguments of free calls must follow the schema. Those of forced calls always follow it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Strictness {
    /// They need not follow it.
    #[default]
    Loose,
    /// They follow it if the engine supports the whole schema. Otherwise they are any object.
    IfKnown,
    /// They follow it, and a schema that the engine does not fully support is refused.
    Strict,
}

impl Tool {
    /// Returns the schema of a tool without arguments.
    pub fn no_parameters() -> Value {
        json!({ "type": "object", "properties": {} })
    }

    /// Returns the form that chat templates read. It is the same in every dialect, so that they share cached prompts.
    pub fn definition(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".to_owned(), self.name.clone().into());
        if let Some(description) = &self.description {
            function.insert("description".to_owned(), description.clone().into());
        }
        function.insert("parameters".to_owned(), self.parameters.clone());
        json!({ "type": "function", "function": function })
    }

    /// Finds the part of its schema that engines hold, unless calls follow another schema.
    pub(crate) fn find_held(&mut self) {
        if self.held.is_none() {
            let HeldSchema { schema, unheld } = held(&self.parameters, self.strict == Strictness::Strict);
            (self.held, self.unheld) = (schema, unheld);
        }
    }

    /// Returns the bytes that it takes in memory. Reads all of it.
    pub fn memory_bytes(&self) -> usize {
        let held = self.held.as_ref().map_or(0, memory_bytes);
        let texts = self.name.capacity() + self.description.as_ref().map_or(0, String::capacity);
        size_of::<Tool>() + texts + memory_bytes(&self.parameters) + held
    }

    /// Returns the schema that calls are held to.
    pub fn held(&self) -> &Value {
        self.held.as_ref().unwrap_or(&self.parameters)
    }
}

/// Which of the tools the model may or must call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// It must not call a tool, and does not see the tools.
    None,
    /// It must call at least one.
    Required,
    /// It must call this one.
    Named(String),
}

/// The tools of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolUse {
    /// The client's tools, which the readers of all choices share.
    pub tools: Arc<[Tool]>,
    /// Which of them the model may or must call.
    pub choice: ToolChoice,
    /// Allow several calls in one reply.
    pub parallel: bool,
    /// Tools of the request that are not offered, because they run on the servers of the API's owner. Each once.
    pub skipped: Vec<HostedTool>,
}

impl Default for ToolUse {
    /// No tools.
    fn default() -> Self {
        ToolUse { tools: Arc::default(), choice: ToolChoice::Auto, parallel: true, skipped: Vec::new() }
    }
}

impl ToolUse {
    /// Returns the tools that the model sees.
    pub fn offered(&self) -> &[Tool] {
        if self.choice == ToolChoice::None { &[] } else { &self.tools }
    }

    /// Returns the tools that the prompt lists: all if each is described in the history, because the list also tells the
    /// model how to call.
    pub fn listed(&self) -> impl Iterator<Item = &Tool> {
        let is_listed = |tool: &Tool| tool.described == Described::InList;
        let all = !self.offered().iter().any(is_listed);
        self.offered().iter().filter(move |tool| all || is_listed(tool))
    }

    /// Returns the tools that the model may call.
    pub fn callable(&self) -> Vec<&Tool> {
        let named = |tool: &&Tool| !matches!(&self.choice, ToolChoice::Named(name) if *name != tool.name);
        self.offered().iter().filter(named).collect()
    }

    /// Returns true if the reply must be a call.
    pub fn is_forced(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }
}

/// A tool that runs on the servers of OpenAI or Anthropic, so nobody here can run it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostedTool {
    /// Searches the web.
    WebSearch,
    /// Reads pages of the web.
    WebFetch,
    /// Searches files that were uploaded to the owner.
    FileSearch,
    /// Runs code in a container of the owner.
    CodeExecution,
    /// Calls tools of an MCP server from the owner's servers.
    Mcp,
    /// Makes images with a model of the owner.
    ImageGeneration,
    /// Operates a computer by its screen, which only models of the owner have learnt in this form.
    ComputerUse,
    /// Finds tools whose definitions are loaded later. Here all definitions are loaded at once.
    ToolSearch,
    /// Asks another model of the owner.
    Advisor,
}

/// The words before a version in the types of OpenAI's tools.
const OPENAI_TOOLS: &[(&str, HostedTool)] = &[
    ("web_search", HostedTool::WebSearch),
    ("file_search", HostedTool::FileSearch),
    ("code_interpreter", HostedTool::CodeExecution),
    ("mcp", HostedTool::Mcp),
    ("image_generation", HostedTool::ImageGeneration),
    ("computer", HostedTool::ComputerUse),
    ("tool_search", HostedTool::ToolSearch),
];

/// The words before a version in the types of Anthropic's tools.
const ANTHROPIC_TOOLS: &[(&str, HostedTool)] = &[
    ("web_search", HostedTool::WebSearch),
    ("web_fetch", HostedTool::WebFetch),
    ("code_execution", HostedTool::CodeExecution),
    ("mcp_toolset", HostedTool::Mcp),
    ("computer", HostedTool::ComputerUse),
    ("tool_search_tool", HostedTool::ToolSearch),
    ("advisor", HostedTool::Advisor),
];

impl HostedTool {
    /// Returns the tool that a type of OpenAI's API names, with or without a version.
    pub fn of_openai(kind: &str) -> Option<HostedTool> {
        versioned(kind, OPENAI_TOOLS)
    }

    /// Returns the tool that a type of Anthropic's API names, with or without a version.
    pub fn of_anthropic(kind: &str) -> Option<HostedTool> {
        versioned(kind, ANTHROPIC_TOOLS)
    }

    /// Returns the word for headers and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            HostedTool::WebSearch => "web_search",
            HostedTool::WebFetch => "web_fetch",
            HostedTool::FileSearch => "file_search",
            HostedTool::CodeExecution => "code_execution",
            HostedTool::Mcp => "mcp",
            HostedTool::ImageGeneration => "image_generation",
            HostedTool::ComputerUse => "computer_use",
            HostedTool::ToolSearch => "tool_search",
            HostedTool::Advisor => "advisor",
        }
    }
}

fn versioned(kind: &str, tools: &[(&str, HostedTool)]) -> Option<HostedTool> {
    let is_of =
        |word: &str| kind.strip_prefix(word).is_some_and(|version| version.is_empty() || version.starts_with('_'));
    tools.iter().find(|(word, _)| is_of(word)).map(|(_, tool)| *tool)
}

/// A step of a call in a reply. A call is `Begin`, then `Arguments` in pieces, then `End`, unless the reply is cut off
/// during the call. Calls do not overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolCallDelta {
    /// A call begins.
    Begin {
        /// The index of the call in the reply, from 0.
        index: u32,
        /// The id that the tool's result will refer to.
        id: String,
        /// The name of the tool; a model may invent one.
        name: String,
    },
    /// More of the call's arguments.
    Arguments {
        /// The index of the call.
        index: u32,
        /// A piece of JSON. All pieces together are exactly what the model wrote.
        fragment: String,
    },
    /// The call is complete.
    End {
        /// The index of the call.
        index: u32,
    },
}

/// The most tools in one request. OpenAI allows 128 and Anthropic any number; agents with many tool servers need more
/// than 128. Each tool costs prompt tokens and a grammar.
pub const MAX_TOOLS: usize = 512;

/// The most characters in a tool's name. OpenAI allows 64, Anthropic 128.
pub const MAX_NAME_CHARS: usize = 128;

/// Why tools are refused. `index` is the tool's index in the checked list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ToolsError {
    /// More than [`MAX_TOOLS`].
    #[error("must have at most {MAX_TOOLS} tools, but has {n}")]
    TooMany {
        /// The number of tools.
        n: usize,
    },
    /// A name that the dialect does not allow, or that some formats of calls cannot represent.
    #[error("a tool's name has 1 to {MAX_NAME_CHARS} {}", names.characters())]
    Name {
        /// The index of the tool.
        index: usize,
        /// The names that the dialect allows.
        names: ToolNames,
    },
    /// Two tools have the same name.
    #[error("two tools have this name")]
    Duplicate {
        /// The index of the second one.
        index: usize,
    },
    /// [`check_schema`](crate::constraint::check_schema) refused a schema.
    #[error("{error}")]
    Schema {
        /// The index of the tool.
        index: usize,
        /// The problem.
        error: crate::constraint::SchemaError,
    },
    /// The choice names a tool that does not exist.
    #[error("there is no tool of this name")]
    Unknown,
    /// A call is required and there are no tools.
    #[error("needs tools")]
    NothingToCall,
}

/// Checks the tools of a request: what holds in every dialect.
pub fn check(use_of_tools: &ToolUse) -> Result<(), ToolsError> {
    check_list(&use_of_tools.tools, &use_of_tools.choice, ToolNames::Representable)
}

/// Checks the tools that a dialect has parsed, before anything is made of their schemas.
pub(crate) fn check_list(tools: &[Tool], choice: &ToolChoice, names: ToolNames) -> Result<(), ToolsError> {
    if tools.len() > MAX_TOOLS {
        return Err(ToolsError::TooMany { n: tools.len() });
    }
    let mut budget = crate::constraint::Budget::default();
    for (index, tool) in tools.iter().enumerate() {
        if !names.have(&tool.name) {
            return Err(ToolsError::Name { index, names });
        }
        if tools[..index].iter().any(|earlier| earlier.name == tool.name) {
            return Err(ToolsError::Duplicate { index });
        }
        budget.take_arguments(tool.held()).map_err(|error| ToolsError::Schema { index, error })?;
    }
    match choice {
        ToolChoice::Required | ToolChoice::Named(_) if tools.is_empty() => Err(ToolsError::NothingToCall),
        ToolChoice::Named(name) if !tools.iter().any(|tool| tool.name == *name) => Err(ToolsError::Unknown),
        _ => Ok(()),
    }
}

/// Returns true for a name that the dialects of OpenAI and Anthropic allow.
pub fn is_name(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    (1..=MAX_NAME_CHARS).contains(&name.len()) && name.chars().all(is_part)
}

/// The names of tools that a dialect allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolNames {
    /// The names that OpenAI and Anthropic allow.
    Plain,
    /// The names that every format of calls can represent. Ollama itself allows any.
    Representable,
}

impl ToolNames {
    fn have(self, name: &str) -> bool {
        let plain = name.replace(['/', ':', '@', '+', '#'], "_");
        match self {
            ToolNames::Plain => is_name(name),
            ToolNames::Representable => name.len() <= MAX_NAME_CHARS && plain.split(' ').all(is_name),
        }
    }

    fn characters(self) -> &'static str {
        match self {
            ToolNames::Plain => "letters, digits, '_', '-' or '.'",
            ToolNames::Representable => "letters, digits or characters of _-./:@+#, and single spaces between them",
        }
    }
}

/// A whole call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// The index of the call in the reply, from 0.
    pub index: u32,
    /// The id that the tool's result will refer to.
    pub id: String,
    /// The name of the tool; a model may invent one.
    pub name: String,
    /// The arguments exactly as the model wrote them: JSON.
    pub arguments: String,
}

/// Collects the steps of calls, for dialects that report whole calls.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallCollector(Option<ToolCall>);

impl CallCollector {
    /// Adds a step. Returns the call if the step completes it.
    pub fn take(&mut self, step: &ToolCallDelta) -> Option<ToolCall> {
        match step {
            ToolCallDelta::Begin { index, id, name } => {
                let arguments = String::new();
                self.0 = Some(ToolCall { index: *index, id: id.clone(), name: name.clone(), arguments });
                None
            }
            ToolCallDelta::Arguments { fragment, .. } => {
                if let Some(call) = &mut self.0 {
                    call.arguments.push_str(fragment);
                }
                None
            }
            ToolCallDelta::End { .. } => self.0.take(),
        }
    }

    /// Returns the call that was cut off before its end, if there is one.
    pub fn rest(&mut self) -> Option<ToolCall> {
        self.0.take()
    }
}
