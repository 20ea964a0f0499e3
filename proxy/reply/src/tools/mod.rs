//! Describes tools in prompts, and splits replies into text, reasoning and tool calls.
//!
//! The chat template alone determines the format. A reader's state survives failover: a stream that another engine takes
//! over in the middle of a call continues there. Each family of models has a [`ToolFormat`] in its own file.

pub mod form;
pub mod reader;

mod json_call;
mod json_calls;
mod one_call;
mod pending;
mod thought;

mod deepseek;
mod generic;
mod harmony;
mod hermes;
mod llama3;
mod mistral;
mod mistral_args;
mod qwen_xml;
mod xml_values;

use std::fmt::Debug;
use std::sync::Arc;

use baton_schemas::constraint::Rule;
use baton_schemas::generate::Conversation;
use baton_schemas::tools::{Tool, ToolUse, is_name};
pub use form::{NoThinking, ReplyForm, present};
pub use reader::ReplyReader;
use smallvec::SmallVec;

pub use crate::part_content::PartContent;

/// The format in which a family of models writes calls.
pub trait ToolFormat: Send + Sync + Debug {
    /// The format's name in logs.
    fn name(&self) -> &'static str;

    /// Returns true if a chat template is of this family.
    fn is_of(&self, template: &str) -> bool;

    /// Control tokens of the format. Their spelling reaches the parser as text.
    fn markers(&self) -> &'static [&'static str] {
        &[]
    }

    /// Describes the tools to the model, and converts earlier calls to the form that the template reads.
    fn present(&self, conversation: &mut Conversation, tools: &ToolUse, _template: &str) {
        conversation.tools = tools.listed().map(Tool::definition).collect();
    }

    /// The rule of replies that are calls of these tools.
    fn calls(&self, calls: &Calls<'_>) -> Rule;

    /// The rule of replies that are text, with or without calls of these tools. `text` is the rule of a reply without
    /// calls, if there is one.
    fn text_or_calls(&self, calls: &Calls<'_>, text: Option<Rule>) -> Rule;

    /// The rule of a reply without calls, for formats in which text also has a form.
    fn answer(&self, text: Rule) -> Rule {
        text
    }

    /// Returns true if replies must be parsed even without tools, because text also has a form.
    fn is_always_read(&self) -> bool {
        false
    }

    /// A parser of one reply.
    fn parser(&self, tools: &Arc<[Tool]>) -> Box<dyn CallParser>;
}

/// The field in errors about tools.
const FIELD: &str = "tools";

/// Calls that a reply may hold.
#[derive(Debug, Clone)]
pub struct Calls<'a> {
    /// The tools that may be called, each with rules for its arguments: the first that the engine fully supports applies.
    pub tools: Vec<(&'a str, Vec<Rule>)>,
    /// The most calls in one reply.
    pub max: u32,
}

impl Calls<'_> {
    /// A choice among one rule for each tool.
    fn one_of(&self, rule: impl Fn(&str, &Rule) -> Rule) -> Rule {
        let any = |name: &str, arguments: &[Rule]| match arguments {
            [only] => rule(name, only),
            several => Rule::FirstKnown(several.iter().map(|arguments| rule(name, arguments)).collect()),
        };
        let of = |name: &str, rule| Rule::For { field: FIELD.to_owned(), tool: Some(name.to_owned()), rule };
        Rule::OneOf(self.tools.iter().map(|(name, arguments)| of(name, Box::new(any(name, arguments)))).collect())
    }
}

/// Returns true if a call of this name is passed on: any name will do while tools are offered. A client answers that there is
/// no such tool, and the model goes on; as text, the markup would end its turn.
fn is_callable(name: &str, tools: &[Tool]) -> bool {
    tools.iter().any(|tool| tool.name == name) || !tools.is_empty() && is_name(name)
}

/// Parses one reply's text, which arrives in pieces.
///
/// The result depends only on the text. However the text is cut, the parts are the same, except for the cuts within text
/// and arguments.
pub trait CallParser: Send {
    /// Takes more text, and adds the final pieces to `out`.
    fn feed(&mut self, text: String, out: &mut ParsedPieces);

    /// Ends the text, and adds everything held back to `out`.
    fn finish(&mut self, out: &mut ParsedPieces);

    /// Returns true if the next text is reasoning.
    fn is_thinking(&self) -> bool {
        false
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParsedPiece {
    /// Text for the user.
    Text(String),
    /// Reasoning.
    Thought(String),
    /// A call of this tool begins.
    Begin(String),
    /// More of its arguments.
    Arguments(String),
    /// The call is complete.
    End,
}

/// Pieces in order. Neighbours of the same variant are joined, and none is empty.
#[derive(Debug, Default)]
pub struct ParsedPieces(SmallVec<[ParsedPiece; 1]>);

impl ParsedPieces {
    pub fn text(&mut self, text: impl Into<String> + AsRef<str>) {
        match self.0.last_mut() {
            _ if text.as_ref().is_empty() => {}
            Some(ParsedPiece::Text(last)) => last.push_str(text.as_ref()),
            _ => self.0.push(ParsedPiece::Text(text.into())),
        }
    }

    /// Adds reasoning.
    pub fn thought(&mut self, text: impl Into<String> + AsRef<str>) {
        match self.0.last_mut() {
            _ if text.as_ref().is_empty() => {}
            Some(ParsedPiece::Thought(last)) => last.push_str(text.as_ref()),
            _ => self.0.push(ParsedPiece::Thought(text.into())),
        }
    }

    pub fn arguments(&mut self, text: impl Into<String> + AsRef<str>) {
        match self.0.last_mut() {
            _ if text.as_ref().is_empty() => {}
            Some(ParsedPiece::Arguments(last)) => last.push_str(text.as_ref()),
            _ => self.0.push(ParsedPiece::Arguments(text.into())),
        }
    }

    /// A call begins.
    pub fn begin(&mut self, name: &str) {
        self.0.push(ParsedPiece::Begin(name.to_owned()));
    }

    /// A call is complete.
    pub fn end(&mut self) {
        self.0.push(ParsedPiece::End);
    }
}

/// All formats except [`generic`], the most specific first.
const FORMATS: [&dyn ToolFormat; 8] = [
    &harmony::Harmony,
    &deepseek::DeepSeek,
    &qwen_xml::QwenXml,
    &mistral_args::MistralArgs,
    &mistral::Mistral,
    &llama3::LlamaVersion::V4,
    &llama3::LlamaVersion::V3,
    &hermes::Hermes,
];

/// The format of a model with this template.
fn format_of(template: &str) -> &'static dyn ToolFormat {
    FORMATS.into_iter().find(|format| format.is_of(template)).unwrap_or(&generic::Generic)
}

#[cfg(test)]
mod tests;
