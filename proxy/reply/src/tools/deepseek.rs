//! The format of DeepSeek V3.1: `<｜tool▁calls▁begin｜>`, then for each call
//! `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`, then `<｜tool▁calls▁end｜>`.
//!
//! Its template shows earlier calls but no tools, so the system message describes them, in the words of the model's card.
//! Templates of DeepSeek's earlier models lose the arguments of some calls, so those models get [`super::generic`]'s form.

use std::sync::Arc;

use baton_schemas::constraint::Rule;
use baton_schemas::generate::Conversation;
use baton_schemas::tools::{MAX_NAME_CHARS, Tool, ToolUse};
use baton_schemas::written_number::{AsWritten, arguments_text};
use serde_json::Value;

use super::generic::instruct;
use super::json_call::{Extent, JsonPlace};
use super::mistral::text_or;
use super::pending::{Front, Pending};
use super::{CallParser, Calls, ParsedPieces, ToolFormat, is_callable};

const CALLS: &str = "<｜tool▁calls▁begin｜>";
const CALL: &str = "<｜tool▁call▁begin｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const CALLS_END: &str = "<｜tool▁calls▁end｜>";

/// Some replies have arguments in a block of code, as DeepSeek's earlier models learnt it.
const FENCE: &str = "```";

#[derive(Debug)]
pub(super) struct DeepSeek;

impl ToolFormat for DeepSeek {
    fn name(&self) -> &'static str {
        "deepseek"
    }

    fn is_of(&self, template: &str) -> bool {
        template.contains(CALL) && template.contains(SEPARATOR) && !template.contains("```json")
    }

    fn markers(&self) -> &'static [&'static str] {
        &[CALLS, CALL, SEPARATOR, CALL_END, CALLS_END]
    }

    fn present(&self, conversation: &mut Conversation, tools: &ToolUse, template: &str) {
        if !tools.offered().is_empty() {
            instruct(&mut conversation.messages, &instructions(tools));
        }
        // The template appends the arguments as they are, unless it converts them itself.
        let spaceless: String = template.chars().filter(|c| !c.is_whitespace()).collect();
        if spaceless.contains("['arguments']|tojson") {
            return;
        }
        for call in conversation.messages.iter_mut().flat_map(|message| &mut message.tool_calls) {
            let written = arguments_text(call);
            if let Some(arguments) = call.pointer_mut("/function/arguments").filter(|arguments| !arguments.is_string())
            {
                *arguments = Value::String(written);
            }
        }
    }

    fn calls(&self, calls: &Calls<'_>) -> Rule {
        let call = calls.one_of(|name, arguments| {
            let begin = Rule::literal(format!("{CALL}{name}{SEPARATOR}"));
            Rule::Sequence(vec![begin, arguments.clone(), Rule::literal(CALL_END)])
        });
        let all = Rule::Repeat { rule: Box::new(call), min: 1, max: Some(calls.max) };
        Rule::Sequence(vec![Rule::literal(CALLS), all, Rule::literal(CALLS_END)])
    }

    fn text_or_calls(&self, calls: &Calls<'_>, text: Option<Rule>) -> Rule {
        text_or(self.calls(calls), text)
    }

    fn parser(&self, tools: &Arc<[Tool]>) -> Box<dyn CallParser> {
        Box::new(DeepSeekParser {
            tools: Arc::clone(tools),
            pending: Pending::default(),
            held: String::new(),
            state: DeepSeekState::Outside,
        })
    }
}

fn instructions(tools: &ToolUse) -> String {
    let one = |tool: &Tool| {
        let description = tool.description.as_deref().unwrap_or_default();
        let parameters = AsWritten(&tool.parameters);
        format!("### {}\nDescription: {description}\n\nParameters: {parameters}\n\n", tool.name)
    };
    let all: String = tools.listed().map(one).collect();
    format!(
        "## Tools\nYou have access to the following tools:\n\n{all}\
         IMPORTANT: ALWAYS adhere to this exact format for tool use:\n\
         {CALLS}{CALL}tool_call_name{SEPARATOR}tool_call_arguments{CALL_END}{{additional_tool_calls}}{CALLS_END}\n\n\
         Where:\n\
         - `tool_call_name` must be an exact match to one of the available tools\n\
         - `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n\
         - For multiple tool calls, chain them directly without separators or spaces"
    )
}

enum DeepSeekState {
    /// In text.
    Outside,
    /// Before a call, or after one.
    Between,
    /// In a name.
    Name(String),
    /// Between the name and its arguments.
    BeforeArguments(Fence),
    Arguments(Extent, Fence),
    /// After arguments in a block of code, before the block's end.
    BeforeFenceEnd,
}

/// A block of code around arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fence {
    None,
    /// In the word that names the language.
    Language,
    Open,
}

struct DeepSeekParser {
    tools: Arc<[Tool]>,
    pending: Pending,
    /// Markup since the last text or call, which is text if no call follows.
    held: String,
    state: DeepSeekState,
}

impl CallParser for DeepSeekParser {
    fn feed(&mut self, text: String, out: &mut ParsedPieces) {
        self.pending.push(text);
        while !self.pending.is_empty() && self.step(out) {}
    }

    fn finish(&mut self, out: &mut ParsedPieces) {
        let rest = self.pending.take();
        match &mut self.state {
            DeepSeekState::Outside => out.text(rest),
            // A part of the markup after a call is not text.
            DeepSeekState::Between => out.text(std::mem::take(&mut self.held)),
            DeepSeekState::Name(name) => {
                let name = std::mem::take(name) + &rest;
                self.give_back(&name, out);
            }
            DeepSeekState::BeforeArguments(_) | DeepSeekState::Arguments(..) | DeepSeekState::BeforeFenceEnd => {}
        }
    }
}

impl DeepSeekParser {
    /// Takes one step. Returns false if it needs more text.
    fn step(&mut self, out: &mut ParsedPieces) -> bool {
        match &mut self.state {
            DeepSeekState::Outside => {
                let (text, tag) = self.pending.take_until(&[CALLS, CALL]);
                out.text(text);
                match tag {
                    None => return false,
                    Some(0) => self.mark(CALLS, DeepSeekState::Between),
                    Some(_) => self.mark(CALL, DeepSeekState::Name(String::new())),
                }
            }
            DeepSeekState::Between => {
                if !self.held.is_empty() {
                    let space = self.pending.0.len() - self.pending.0.trim_start().len();
                    self.held.push_str(&self.pending.0[..space]);
                }
                self.pending.skip_space();
                match self.pending.take_front(&[CALL, CALL_END, CALLS_END]) {
                    Front::Unknown => return false,
                    Front::Tag(0) => self.mark(CALL, DeepSeekState::Name(String::new())),
                    Front::Tag(1) => {}
                    Front::Tag(_) => {
                        self.held.clear();
                        self.state = DeepSeekState::Outside;
                    }
                    Front::Other => self.give_back("", out),
                }
            }
            DeepSeekState::Name(name) => {
                let (more, end) = self.pending.take_until(&[SEPARATOR]);
                name.push_str(&more);
                // Too long for a name, so it is text. The rest may contain markers.
                if let Some((at, _)) = name.char_indices().nth(MAX_NAME_CHARS) {
                    let rest = name.split_off(at) + end.map_or("", |_| SEPARATOR);
                    self.pending.0.insert_str(0, &rest);
                    let name = std::mem::take(name);
                    self.give_back(&name, out);
                    return true;
                }
                if end.is_none() {
                    return false;
                }
                let name = std::mem::take(name);
                if is_callable(name.trim(), &self.tools) {
                    out.begin(name.trim());
                    self.held.clear();
                    self.state = DeepSeekState::BeforeArguments(Fence::None);
                } else {
                    self.give_back(&(name + SEPARATOR), out);
                }
            }
            DeepSeekState::BeforeArguments(fence @ Fence::Language) => match self.pending.0.chars().next() {
                None => return false,
                Some(c) if c.is_alphanumeric() => _ = self.pending.next(),
                Some(_) => *fence = Fence::Open,
            },
            DeepSeekState::BeforeArguments(fence) => {
                self.pending.skip_space();
                match self.pending.take_front(&["{", FENCE]) {
                    Front::Unknown => return false,
                    Front::Tag(0) => {
                        let mut extent = Extent::default();
                        extent.take('{');
                        out.arguments("{");
                        self.state = DeepSeekState::Arguments(extent, *fence);
                    }
                    Front::Tag(_) if *fence == Fence::None => *fence = Fence::Language,
                    Front::Tag(_) | Front::Other => {
                        out.arguments("{}");
                        out.end();
                        self.state = DeepSeekState::Between;
                    }
                }
            }
            DeepSeekState::Arguments(extent, fence) => {
                let Some(c) = self.pending.next() else { return false };
                let place = extent.take(c);
                out.arguments(c.encode_utf8(&mut [0; 4]));
                if place != JsonPlace::Inside {
                    out.end();
                    self.state = match fence {
                        Fence::None => DeepSeekState::Between,
                        Fence::Language | Fence::Open => DeepSeekState::BeforeFenceEnd,
                    };
                }
            }
            DeepSeekState::BeforeFenceEnd => {
                self.pending.skip_space();
                match self.pending.take_front(&[FENCE]) {
                    Front::Unknown => return false,
                    Front::Tag(_) | Front::Other => self.state = DeepSeekState::Between,
                }
            }
        }
        true
    }

    /// Holds markup before a call.
    fn mark(&mut self, markup: &str, state: DeepSeekState) {
        self.held.push_str(markup);
        self.state = state;
    }

    /// What was held is not a call, so it is text.
    fn give_back(&mut self, name: &str, out: &mut ParsedPieces) {
        out.text(std::mem::take(&mut self.held));
        out.text(name);
        self.state = DeepSeekState::Outside;
    }
}
