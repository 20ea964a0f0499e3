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

/// Llama 3 may write the first before a call, Llama 4 the others around the text before its calls, or around a call.
const TAGS: [&str; 3] = ["<|python_tag|>", "<|python_start|>", "<|python_end|>"];

/// Begins each message of Llama 4. Its templates render several calls in one message, those of Llama 3 refuse it.
const LLAMA4_HEADER: &str = "<|header_start|>";

#[derive(Debug)]
pub(super) struct Llama3;

impl ToolFormat for Llama3 {
    fn name(&self) -> &'static str {
        "llama3"
    }

    fn is_of(&self, template: &str) -> bool {
        let is_llama = template.contains("<|start_header_id|>") || template.contains(LLAMA4_HEADER);
        is_llama && template.contains("\"parameters\"")
    }

    fn markers(&self) -> &'static [&'static str] {
        &TAGS
    }

    fn present(&self, conversation: &mut Conversation, tools: &ToolUse, template: &str) {
        conversation.tools = tools.listed().map(Tool::definition).collect();
        if !template.contains(LLAMA4_HEADER) {
            split_calls(conversation);
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
        let pending = Pending::default();
        Box::new(Llama3Parser { tools: Arc::clone(tools), pending, held: String::new(), state: Llama3State::Start })
    }
}

enum Llama3State {
    /// Before the first character that is not white space.
    Start,
    /// In a possible call.
    Calls(Box<JsonCalls>),
    /// After a call, before another call or text.
    Between,
    /// In text, to the end or the next tag.
    Text,
}

struct Llama3Parser {
    tools: Arc<[Tool]>,
    pending: Pending,
    /// White space before a possible call.
    held: String,
    state: Llama3State,
}

impl CallParser for Llama3Parser {
    fn feed(&mut self, text: String, out: &mut ParsedPieces) {
        self.pending.push(text);
        while !self.pending.is_empty() {
            match &mut self.state {
                Llama3State::Start => match self.pending.take_front(&["{", TAGS[0], TAGS[1], TAGS[2]]) {
                    Front::Unknown => return,
                    Front::Tag(0) => self.begin(out),
                    Front::Tag(_) => {}
                    Front::Other => match self.pending.next() {
                        Some(c) if c.is_whitespace() => self.held.push(c),
                        first => {
                            self.held.extend(first);
                            out.text(std::mem::take(&mut self.held));
                            self.state = Llama3State::Text;
                        }
                    },
                },
                Llama3State::Calls(calls) => {
                    let Some(c) = self.pending.next() else { return };
                    match calls.feed(c, out) {
                        CallProgress::Reading => {}
                        CallProgress::Done => {
                            self.held.clear();
                            self.state = Llama3State::Between;
                        }
                        CallProgress::NotACall => {
                            let rest = calls.give_back();
                            out.text(std::mem::take(&mut self.held));
                            out.text(rest);
                            self.state = Llama3State::Text;
                        }
                    }
                }
                Llama3State::Between => match self.pending.take_front(&["{", TAGS[0], TAGS[1], TAGS[2]]) {
                    Front::Unknown => return,
                    Front::Tag(0) => self.begin(out),
                    Front::Tag(_) => {}
                    Front::Other => match self.pending.next() {
                        Some(c) if c.is_whitespace() || c == ';' || c == ',' => {}
                        other => {
                            out.text(other.map(String::from).unwrap_or_default());
                            self.state = Llama3State::Text;
                        }
                    },
                },
                Llama3State::Text => {
                    let (text, tag) = self.pending.take_until(&TAGS);
                    out.text(text);
                    if tag.is_none() {
                        return;
                    }
                    self.state = Llama3State::Start;
                }
            }
        }
    }

    fn finish(&mut self, out: &mut ParsedPieces) {
        match &mut self.state {
            Llama3State::Start => out.text(&(std::mem::take(&mut self.held) + &self.pending.take())),
            Llama3State::Calls(calls) => {
                let rest = calls.finish(out);
                if calls.is_untouched() {
                    out.text(std::mem::take(&mut self.held));
                }
                out.text(rest);
            }
            // A part of a tag after a call is not text.
            Llama3State::Between => {}
            Llama3State::Text => out.text(self.pending.take()),
        }
    }
}

impl Llama3Parser {
    /// An object has opened.
    fn begin(&mut self, out: &mut ParsedPieces) {
        let mut calls = Box::new(JsonCalls::new(&self.tools));
        calls.feed('{', out);
        self.state = Llama3State::Calls(calls);
    }
}
