//! Llama 3's format: a reply that is a JSON object, `{"name": …, "parameters": {…}}`, is a call. Any other reply is text.

use std::sync::Arc;

use baton_schemas::constraint::Rule;
use baton_schemas::tools::Tool;

use super::json_call::CallProgress;
use super::json_calls::JsonCalls;
use super::pending::{Front, Pending};
use super::{CallParser, Calls, ParsedPieces, ToolFormat};

/// Some models write it before a call.
const PYTHON_TAG: &str = "<|python_tag|>";

#[derive(Debug)]
pub(super) struct Llama3;

impl ToolFormat for Llama3 {
    fn name(&self) -> &'static str {
        "llama3"
    }

    fn is_of(&self, template: &str) -> bool {
        template.contains("<|start_header_id|>") && template.contains("\"parameters\"")
    }

    fn markers(&self) -> &'static [&'static str] {
        &[PYTHON_TAG]
    }

    /// One call: the templates refuse a history with more of them in one message.
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
    /// In text, to the end.
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
                Llama3State::Start => match self.pending.take_front(&[PYTHON_TAG, "{"]) {
                    Front::Unknown => return,
                    Front::Tag(0) => {}
                    Front::Tag(_) => self.begin(out),
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
                Llama3State::Between => match self.pending.next() {
                    Some('{') => self.begin(out),
                    Some(c) if c.is_whitespace() || c == ';' || c == ',' => {}
                    other => {
                        out.text(other.map(String::from).unwrap_or_default());
                        self.state = Llama3State::Text;
                    }
                },
                Llama3State::Text => out.text(self.pending.take()),
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
            Llama3State::Between | Llama3State::Text => {}
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
