//! Tools that a model may call, and the calls it makes, free of any dialect.

use serde_json::{Map, Value, json};

/// A function that the client runs for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tool {
    /// What the model calls it; checked by [`check`].
    pub name: String,
    /// What it is for, in words.
    pub description: Option<String>,
    /// JSON Schema of its arguments: an object's.
    pub parameters: Value,
    /// Whether the arguments of a free call must follow the schema, too.
    pub strict: Strictness,
}

/// How closely the arguments of free calls follow the schema. Those of forced calls always follow it.
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
    /// A schema for a tool that takes no arguments.
    pub fn no_parameters() -> Value {
        json!({ "type": "object", "properties": {} })
    }

    /// The form that chat templates read. The same for every dialect, so that they share cached prompts.
    pub fn definition(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".to_owned(), self.name.clone().into());
        if let Some(description) = &self.description {
            function.insert("description".to_owned(), description.clone().into());
        }
        function.insert("parameters".to_owned(), self.parameters.clone());
        json!({ "type": "function", "function": function })
    }
}

/// Which of the tools the model has to call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// None. The model does not see the tools.
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// The tools of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolUse {
    /// All that the client has.
    pub tools: Vec<Tool>,
    /// What the model has to do with them.
    pub choice: ToolChoice,
    /// Whether one reply may hold several calls.
    pub parallel: bool,
}

impl Default for ToolUse {
    /// No tools.
    fn default() -> Self {
        ToolUse { tools: Vec::new(), choice: ToolChoice::Auto, parallel: true }
    }
}

impl ToolUse {
    /// The tools that the model sees.
    pub fn offered(&self) -> &[Tool] {
        if self.choice == ToolChoice::None { &[] } else { &self.tools }
    }

    /// The tools that it may call.
    pub fn callable(&self) -> Vec<&Tool> {
        let named = |tool: &&Tool| !matches!(&self.choice, ToolChoice::Named(name) if *name != tool.name);
        self.offered().iter().filter(named).collect()
    }

    /// Returns true if the reply must be a call.
    pub fn is_forced(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }
}

/// A step of a call in a reply. A call is `Begin`, then its arguments in pieces, then `End`, unless the reply was cut off
/// in the middle of it. Calls do not overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolCallDelta {
    /// A call begins.
    Begin {
        /// Its place among the reply's calls, from 0.
        index: u32,
        /// By which the tool's result will refer to it.
        id: String,
        /// One of the request's tools.
        name: String,
    },
    /// More of its arguments.
    Arguments {
        /// Which call.
        index: u32,
        /// A piece of JSON. All pieces together are what the model wrote.
        fragment: String,
    },
    /// The call is complete.
    End {
        /// Which call.
        index: u32,
    },
}

/// Tools in one request. OpenAI takes 128, Anthropic any number, and agents with many servers of tools come beyond the
/// former. Each costs prompt tokens and a grammar.
pub const MAX_TOOLS: usize = 512;

/// Characters of a tool's name. OpenAI allows 64, Anthropic 128.
pub const MAX_NAME_CHARS: usize = 128;

/// Why tools are not taken. `index` is the tool's place in the request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ToolsError {
    /// More than [`MAX_TOOLS`].
    #[error("must have at most {MAX_TOOLS} tools, but has {n}")]
    TooMany {
        /// How many there are.
        n: usize,
    },
    /// A name that formats could not carry.
    #[error("a tool's name has 1 to {MAX_NAME_CHARS} letters, digits, '_', '-' or '.'")]
    Name {
        /// Which tool.
        index: usize,
    },
    /// Two tools have one name.
    #[error("two tools have this name")]
    Duplicate {
        /// The later one.
        index: usize,
    },
    /// See [`crate::constraint::check_schema`].
    #[error("{error}")]
    Schema {
        /// Which tool.
        index: usize,
        /// What is wrong.
        error: crate::constraint::SchemaError,
    },
    /// The choice is of a tool that is not there.
    #[error("there is no tool of this name")]
    Unknown,
    /// A call is wanted and there is nothing to call.
    #[error("needs tools")]
    NothingToCall,
}

/// Checks what a dialect has read. What the keywords of a schema mean is the engine's to check.
pub fn check(use_of_tools: &ToolUse) -> Result<(), ToolsError> {
    let tools = &use_of_tools.tools;
    if tools.len() > MAX_TOOLS {
        return Err(ToolsError::TooMany { n: tools.len() });
    }
    let mut budget = crate::constraint::Budget::default();
    for (index, tool) in tools.iter().enumerate() {
        if !is_name(&tool.name) {
            return Err(ToolsError::Name { index });
        }
        if tools[..index].iter().any(|earlier| earlier.name == tool.name) {
            return Err(ToolsError::Duplicate { index });
        }
        budget.take(&tool.parameters).map_err(|error| ToolsError::Schema { index, error })?;
    }
    match &use_of_tools.choice {
        ToolChoice::Required | ToolChoice::Named(_) if tools.is_empty() => Err(ToolsError::NothingToCall),
        ToolChoice::Named(name) if !tools.iter().any(|tool| tool.name == *name) => Err(ToolsError::Unknown),
        _ => Ok(()),
    }
}

fn is_name(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    (1..=MAX_NAME_CHARS).contains(&name.len()) && name.chars().all(is_part)
}

/// A whole call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// Its place among the reply's calls, from 0.
    pub index: u32,
    /// By which the tool's result will refer to it.
    pub id: String,
    /// One of the request's tools.
    pub name: String,
    /// JSON, in the model's own words.
    pub arguments: String,
}

/// Puts the steps of calls together, for dialects that do not send pieces.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallCollector(Option<ToolCall>);

impl CallCollector {
    /// Takes a step; returns the call that it completes.
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

    /// The call that was cut off before its end, if one was.
    pub fn rest(&mut self) -> Option<ToolCall> {
        self.0.take()
    }
}
