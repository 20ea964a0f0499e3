//! How models are told of tools, and how their replies are read: reasoning and calls of tools, told apart from text.
//!
//! What a format looks like follows from the chat template alone, so it is known here without asking the engine. The
//! state of a reader stands above failover: a stream that another engine takes up in the middle of a call goes on in the
//! middle of that call. Each family of models has a [`ToolFormat`] in a file of its own.

pub mod form;
pub mod reader;

mod json_call;
mod json_calls;
mod pending;
mod thought;

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
use baton_schemas::tools::{Tool, ToolUse};
pub use form::{NoThinking, ReplyForm, present};
pub use reader::{Part, ReplyReader};

/// How a family of models writes its calls.
pub trait ToolFormat: Send + Sync + Debug {
    /// For the log.
    fn name(&self) -> &'static str;

    /// Whether a chat template is of this family.
    fn is_of(&self, template: &str) -> bool;

    /// Control tokens that are part of the format: their spelling reaches the parser as text.
    fn markers(&self) -> &'static [&'static str] {
        &[]
    }

    /// Tells the model of the tools, and gives earlier calls the form that the template reads.
    fn present(&self, conversation: &mut Conversation, tools: &ToolUse, _template: &str) {
        conversation.tools = tools.offered().iter().map(Tool::definition).collect();
    }

    /// Replies that are calls of these tools.
    fn calls(&self, calls: &Calls<'_>) -> Rule;

    /// Replies that are text with calls of these tools in it, or text alone. `text` is what a reply without a call has to
    /// be, if it has to be anything.
    fn text_or_calls(&self, calls: &Calls<'_>, text: Option<Rule>) -> Rule;

    /// A reply that is no call, where that has a form too.
    fn answer(&self, text: Rule) -> Rule {
        text
    }

    /// Whether replies are read even where there are no tools, because text has a form too.
    fn is_always_read(&self) -> bool {
        false
    }

    /// Reads one reply.
    fn parser(&self, tools: &Arc<[Tool]>) -> Box<dyn CallParser>;
}

/// What errors call the tools of a request.
const FIELD: &str = "tools";

/// Calls that a reply may hold.
#[derive(Debug, Clone)]
pub struct Calls<'a> {
    /// The tools that may be called, with what arguments have to be: the first of these that the engine knows all of.
    pub tools: Vec<(&'a str, Vec<Rule>)>,
    /// Calls in one reply at most.
    pub max: u32,
}

impl Calls<'_> {
    /// One rule for each tool, any of which may be.
    fn one_of(&self, rule: impl Fn(&str, &Rule) -> Rule) -> Rule {
        let any = |name: &str, arguments: &[Rule]| match arguments {
            [only] => rule(name, only),
            several => Rule::FirstKnown(several.iter().map(|arguments| rule(name, arguments)).collect()),
        };
        let of = |name: &str, rule| Rule::For { field: FIELD.to_owned(), tool: Some(name.to_owned()), rule };
        Rule::OneOf(self.tools.iter().map(|(name, arguments)| of(name, Box::new(any(name, arguments)))).collect())
    }
}

/// A reader of one reply's text, cut into pieces anyhow.
///
/// A function of the text alone: however it is cut, the parts are the same, but for where text and arguments are cut.
pub trait CallParser: Send {
    /// Takes more text, and adds what is certain.
    fn feed(&mut self, text: &str, out: &mut Pieces);

    /// The text has ended: what is held back is added.
    fn finish(&mut self, out: &mut Pieces);

    /// Whether what comes now is reasoning.
    fn is_thinking(&self) -> bool {
        false
    }
}

/// What a parser found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text for the user.
    Text(String),
    /// What the model thinks.
    Thought(String),
    /// A call of this tool begins.
    Begin(String),
    /// More of its arguments.
    Arguments(String),
    /// It is complete.
    End,
}

/// Pieces in order, neighbours of a kind joined, none empty.
#[derive(Debug, Default)]
pub struct Pieces(Vec<Piece>);

impl Pieces {
    /// Adds text.
    pub fn text(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Text(last)) => last.push_str(text),
            _ => self.0.push(Piece::Text(text.to_owned())),
        }
    }

    /// Adds reasoning.
    pub fn thought(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Thought(last)) => last.push_str(text),
            _ => self.0.push(Piece::Thought(text.to_owned())),
        }
    }

    /// Adds arguments.
    pub fn arguments(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Arguments(last)) => last.push_str(text),
            _ => self.0.push(Piece::Arguments(text.to_owned())),
        }
    }

    /// A call begins.
    pub fn begin(&mut self, name: &str) {
        self.0.push(Piece::Begin(name.to_owned()));
    }

    /// A call is complete.
    pub fn end(&mut self) {
        self.0.push(Piece::End);
    }
}

/// All formats but [`generic`], those with narrower signs first.
const FORMATS: [&dyn ToolFormat; 6] = [
    &harmony::Harmony,
    &qwen_xml::QwenXml,
    &mistral_args::MistralArgs,
    &mistral::Mistral,
    &llama3::Llama3,
    &hermes::Hermes,
];

/// The format of a model with this template.
fn format_of(template: &str) -> &'static dyn ToolFormat {
    FORMATS.into_iter().find(|format| format.is_of(template)).unwrap_or(&generic::Generic)
}

#[cfg(test)]
mod tests;
