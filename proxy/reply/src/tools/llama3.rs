//! The format of Llama 3 and 4: a reply that is a JSON object, `{"name": …, "parameters": {…}}`, is a call. Any other reply
//! is text, except that Llama 4 may write text between tags before its calls.

use std::sync::Arc;

use baton_schemas::constraint::Rule;
use baton_schemas::generate::Conversation;
use baton_schemas::tools::{Tool, ToolUse};

use super::json_call::CallProgress;
use super::json_calls::JsonCalls;
use super::one_call::split_calls;
use super::pending::{Front, Pending};
use super::{CallParser, Calls, ParsedPieces, ToolFormat};

/// What a call of Llama 3 may begin with.
const LLAMA3_FRONT: [&str; 2] = ["{", "<|python_tag|>"];

/// What a call of Llama 4 may begin with, or what follows it. The tags also stand around the text before its calls.
const LLAMA4_FRONT: [&str; 3] = ["{", "<|python_start|>", "<|python_end|>"];

/// Begins each message of Llama 4. Its templates render several calls in one message, those of Llama 3 refuse it.
const LLAMA4_HEADER: &str = "<|header_start|>";

#[derive(Debug, Clone, Copy)]
pub(super) enum LlamaVersion {
    V3,
    V4,
}

impl LlamaVersion {
    /// What a call may begin with: an object first, then tags.
    fn front(self) -> &'static [&'static str] {
        match self {
            LlamaVersion::V3 => &LLAMA3_FRONT,
            LlamaVersion::V4 => &LLAMA4_FRONT,
        }
    }

    /// The tags that end a text. Llama 3 has none, so a tag that its text mentions is text.
    fn text_ends(self) -> &'static [&'static str] {
        match self {
            LlamaVersion::V3 => &[],
            LlamaVersion::V4 => &LLAMA4_FRONT[1..],
        }
    }
}

impl ToolFormat for LlamaVersion {
    fn name(&self) -> &'static str {
        match self {
            LlamaVersion::V3 => "llama3",
            LlamaVersion::V4 => "llama4",
        }
    }

    fn is_of(&self, template: &str) -> bool {
        let header = match self {
            LlamaVersion::V3 => "<|start_header_id|>",
            LlamaVersion::V4 => LLAMA4_HEADER,
        };
        template.contains(header) && template.contains("\"parameters\"")
    }

    fn markers(&self) -> &'static [&'static str] {
        &self.front()[1..]
    }

    fn present(&self, conversation: &mut Conversation, tools: &ToolUse, _: &str) {
        conversation.tools = tools.listed().map(Tool::definition).collect();
        match self {
            LlamaVersion::V3 => split_calls(conversation),
            LlamaVersion::V4 => {}
        }
    }

    /// One call: the models are not trained for more in one reply.
    fn calls(&self, calls: &Calls<'_>) -> Rule {
        calls.one_of(|name, arguments| {
            Rule::Sequence(vec![
                Rule::literal(format!("{{\"name\": \"{name}\", \"parameters\": ")),
                arguments.clone(),
                Rule::literal("}"),
            ])
        })
    }

    fn text_or_calls(&self, calls: &Calls<'_>, text: Option<Rule>) -> Rule {
        let prose = || Rule::Pattern(r"([^{ \n](.|\n)*)?".to_owned());
        Rule::OneOf(vec![self.calls(calls), text.unwrap_or_else(prose)])
    }

    fn parser(&self, tools: &Arc<[Tool]>) -> Box<dyn CallParser> {
        Box::new(LlamaParser {
            tools: Arc::clone(tools),
            version: *self,
            pending: Pending::default(),
            held: String::new(),
            state: LlamaState::Start,
        })
    }
}

enum LlamaState {
    /// Before the first character that is not white space.
    Start,
    /// In a possible call.
    Calls(Box<JsonCalls>),
    /// After a call, before another call or text.
    Between,
    /// In text, to the end or the next tag.
    Text,
}

struct LlamaParser {
    tools: Arc<[Tool]>,
    version: LlamaVersion,
    pending: Pending,
    /// White space before a possible call.
    held: String,
    state: LlamaState,
}

impl CallParser for LlamaParser {
    fn feed(&mut self, text: String, out: &mut ParsedPieces) {
        self.pending.push(text);
        while !self.pending.is_empty() {
            match &mut self.state {
                LlamaState::Start => match self.pending.take_front(self.version.front()) {
                    Front::Unknown => return,
                    Front::Tag(0) => self.begin(out),
                    Front::Tag(_) => {}
                    Front::Other => match self.pending.next() {
                        Some(c) if c.is_whitespace() => self.held.push(c),
                        first => {
                            self.held.extend(first);
                            out.text(std::mem::take(&mut self.held));
                            self.state = LlamaState::Text;
                        }
                    },
                },
                LlamaState::Calls(calls) => {
                    let Some(c) = self.pending.next() else { return };
                    match calls.feed(c, out) {
                        CallProgress::Reading => {}
                        CallProgress::Done => {
                            self.held.clear();
                            self.state = LlamaState::Between;
                        }
                        CallProgress::NotACall => {
                            let rest = calls.give_back();
                            out.text(std::mem::take(&mut self.held));
                            out.text(rest);
                            self.state = LlamaState::Text;
                        }
                    }
                }
                LlamaState::Between => match self.pending.take_front(self.version.front()) {
                    Front::Unknown => return,
                    Front::Tag(0) => self.begin(out),
                    Front::Tag(_) => {}
                    Front::Other => match self.pending.next() {
                        Some(c) if c.is_whitespace() || c == ';' || c == ',' => {}
                        other => {
                            out.text(other.map(String::from).unwrap_or_default());
                            self.state = LlamaState::Text;
                        }
                    },
                },
                LlamaState::Text => {
                    let (text, tag) = self.pending.take_until(self.version.text_ends());
                    out.text(text);
                    if tag.is_none() {
                        return;
                    }
                    self.state = LlamaState::Start;
                }
            }
        }
    }

    fn finish(&mut self, out: &mut ParsedPieces) {
        match &mut self.state {
            LlamaState::Start => out.text(&(std::mem::take(&mut self.held) + &self.pending.take())),
            LlamaState::Calls(calls) => {
                let rest = calls.finish(out);
                if calls.is_untouched() {
                    out.text(std::mem::take(&mut self.held));
                }
                out.text(rest);
            }
            // A part of a tag after a call is not text.
            LlamaState::Between => {}
            LlamaState::Text => out.text(self.pending.take()),
        }
    }
}

impl LlamaParser {
    /// An object has opened.
    fn begin(&mut self, out: &mut ParsedPieces) {
        let mut calls = Box::new(JsonCalls::unmarked(&self.tools));
        calls.feed('{', out);
        self.state = LlamaState::Calls(calls);
    }
}
