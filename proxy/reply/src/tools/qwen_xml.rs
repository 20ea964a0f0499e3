//! Qwen3-Coder's format: arguments are text between tags, and only the tool's schema defines their types.
//!
//! ```text
//! <tool_call>
//! <function=name>
//! <parameter=key>
//! value
//! </parameter>
//! </function>
//! </tool_call>
//! ```

use std::sync::Arc;

use baton_schemas::constraint::Rule;
use baton_schemas::tools::Tool;
use baton_schemas::written_number;
use serde_json::{Map, Value};

use super::hermes::{tagged_calls, text_or_tagged_calls};
use super::pending::{Front, Pending};
use super::xml_values::{is_text, parameters};
use super::{CallParser, Calls, ParsedPieces, ToolFormat, is_callable};

const OPEN: &str = "<tool_call>";
const FUNCTION: &str = "<function=";

#[derive(Debug)]
pub(super) struct QwenXml;

impl ToolFormat for QwenXml {
    fn name(&self) -> &'static str {
        "qwen-xml"
    }

    fn is_of(&self, template: &str) -> bool {
        template.contains(FUNCTION) && template.contains("<parameter=")
    }

    fn markers(&self) -> &'static [&'static str] {
        &[OPEN, "</tool_call>"]
    }

    fn calls(&self, calls: &Calls<'_>) -> Rule {
        tagged_calls(calls, call)
    }

    fn text_or_calls(&self, calls: &Calls<'_>, text: Option<Rule>) -> Rule {
        text_or_tagged_calls(calls, text, call)
    }

    fn parser(&self, tools: &Arc<[Tool]>) -> Box<dyn CallParser> {
        Box::new(QwenXmlParser {
            tools: Arc::clone(tools),
            pending: Pending::default(),
            state: QwenXmlState::Outside,
            tool: None,
            has_values: false,
        })
    }
}

fn call(before: &str, name: &str, arguments: &Rule) -> Rule {
    Rule::Sequence(vec![
        Rule::literal(format!("{before}<function={name}>\n")),
        parameters(arguments),
        Rule::literal("</function>\n</tool_call>"),
    ])
}

enum QwenXmlState {
    /// In text.
    Outside,
    /// After `<tool_call>`.
    Opened,
    /// In the function's name.
    Name(String),
    /// Before a parameter or the function's end.
    Between,
    /// In a parameter's name.
    Key(String),
    /// Before a value.
    Start { is_text: bool },
    /// In a text value, which is passed on at once.
    Text,
    /// In a value whose type is only clear at its end.
    Value(String),
    /// After `</function>`.
    Closing,
}

struct QwenXmlParser {
    tools: Arc<[Tool]>,
    pending: Pending,
    state: QwenXmlState,
    /// The tool that is being called, unless the model invented its name.
    tool: Option<usize>,
    has_values: bool,
}

const CLOSE_VALUE: [&str; 2] = ["\n</parameter>", "</parameter>"];

impl CallParser for QwenXmlParser {
    fn feed(&mut self, text: String, out: &mut ParsedPieces) {
        self.pending.push(text);
        while !self.pending.is_empty() && self.step(out) {}
    }

    fn finish(&mut self, out: &mut ParsedPieces) {
        match &mut self.state {
            QwenXmlState::Outside => out.text(self.pending.take()),
            QwenXmlState::Opened => out.text(format!("{OPEN}{}", self.pending.take())),
            QwenXmlState::Name(name) => out.text(format!("{FUNCTION}{name}{}", self.pending.take())),
            QwenXmlState::Text => {
                let rest = self.pending.take();
                out.arguments(escaped(&rest));
            }
            QwenXmlState::Between
            | QwenXmlState::Key(_)
            | QwenXmlState::Start { .. }
            | QwenXmlState::Value(_)
            | QwenXmlState::Closing => {}
        }
    }
}

impl QwenXmlParser {
    /// Takes one step. Returns false if it needs more text.
    fn step(&mut self, out: &mut ParsedPieces) -> bool {
        match &mut self.state {
            QwenXmlState::Outside => {
                let (text, tag) = self.pending.take_until(&[OPEN, FUNCTION]);
                out.text(text);
                match tag {
                    None => return false,
                    Some(0) => self.state = QwenXmlState::Opened,
                    Some(_) => self.state = QwenXmlState::Name(String::new()),
                }
            }
            QwenXmlState::Opened => {
                self.pending.skip_space();
                match self.pending.take_front(&[FUNCTION]) {
                    Front::Unknown => return false,
                    Front::Tag(_) => self.state = QwenXmlState::Name(String::new()),
                    Front::Other => {
                        out.text(OPEN);
                        self.state = QwenXmlState::Outside;
                    }
                }
            }
            QwenXmlState::Name(name) => {
                let (more, end) = self.pending.take_until(&[">"]);
                name.push_str(&more);
                if end.is_none() {
                    return false;
                }
                let name = std::mem::take(name);
                self.begin(&name, out);
            }
            QwenXmlState::Between => {
                self.pending.skip_space();
                match self.pending.take_front(&["<parameter=", "</function>", "</tool_call>"]) {
                    Front::Unknown => return false,
                    Front::Tag(0) => self.state = QwenXmlState::Key(String::new()),
                    Front::Tag(_) | Front::Other => {
                        out.arguments("}");
                        out.end();
                        self.state = QwenXmlState::Closing;
                    }
                }
            }
            QwenXmlState::Key(key) => {
                let (more, end) = self.pending.take_until(&[">"]);
                key.push_str(&more);
                if end.is_none() {
                    return false;
                }
                let key = std::mem::take(key);
                self.begin_value(&key, out);
            }
            QwenXmlState::Start { is_text } => {
                let is_text = *is_text;
                self.pending.take_front(&["\n"]);
                self.state = if is_text { QwenXmlState::Text } else { QwenXmlState::Value(String::new()) };
            }
            QwenXmlState::Text => {
                let (text, end) = self.pending.take_until(&CLOSE_VALUE);
                out.arguments(escaped(&text));
                if end.is_none() {
                    return false;
                }
                out.arguments("\"");
                self.state = QwenXmlState::Between;
            }
            QwenXmlState::Value(raw) => {
                let (text, end) = self.pending.take_until(&CLOSE_VALUE);
                raw.push_str(&text);
                if end.is_none() {
                    return false;
                }
                let raw = std::mem::take(raw);
                out.arguments(as_json(&raw));
                self.state = QwenXmlState::Between;
            }
            QwenXmlState::Closing => {
                self.pending.skip_space();
                match self.pending.take_front(&["</tool_call>"]) {
                    Front::Unknown => return false,
                    Front::Tag(_) | Front::Other => self.state = QwenXmlState::Outside,
                }
            }
        }
        true
    }

    fn begin(&mut self, name: &str, out: &mut ParsedPieces) {
        if is_callable(name.trim(), &self.tools) {
            self.tool = self.tools.iter().position(|tool| tool.name == name.trim());
            self.has_values = false;
            out.begin(name.trim());
            out.arguments("{");
            self.state = QwenXmlState::Between;
        } else {
            out.text(format!("{FUNCTION}{name}>"));
            self.state = QwenXmlState::Outside;
        }
    }

    fn begin_value(&mut self, key: &str, out: &mut ParsedPieces) {
        let tool = self.tool.map(|tool| &self.tools[tool]);
        let properties = tool.and_then(|tool| tool.parameters.get("properties")?.as_object());
        let is_text = properties.and_then(|all: &Map<String, Value>| all.get(key)).is_some_and(is_text);
        if std::mem::replace(&mut self.has_values, true) {
            out.arguments(", ");
        }
        out.arguments(format!("\"{}\": ", escaped(key)));
        if is_text {
            out.arguments("\"");
        }
        self.state = QwenXmlState::Start { is_text };
    }
}

/// The inside of a JSON string.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Returns the value unchanged if it is JSON, otherwise as a JSON string.
fn as_json(raw: &str) -> String {
    let raw = raw.trim();
    match written_number::parse(raw) {
        Some(_) => raw.to_owned(),
        // Models trained on Python write its constants.
        None => match raw {
            "True" => "true".to_owned(),
            "False" => "false".to_owned(),
            "None" => "null".to_owned(),
            text => Value::from(text).to_string(),
        },
    }
}
