//! gpt-oss's format, called harmony: a reply is messages in channels. `analysis` is reasoning, `final` is text, and a
//! message to `functions.name` is a call.
//!
//! ```text
//! <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}
//! ```

use std::sync::Arc;

use baton_schemas::constraint::Rule;
use baton_schemas::generate::Conversation;
use baton_schemas::thinking::has_channels;
use baton_schemas::tools::{Tool, ToolUse};
use serde_json::Value;

use super::one_call::split_calls;
use super::pending::Pending;
use super::{CallParser, Calls, ParsedPieces, ToolFormat, is_callable};

const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const RECIPIENT: &str = "to=functions.";

/// The tokens that end a message's text. The last two also end the reply.
const ENDS: [&str; 4] = ["<|end|>", "<|start|>", "<|call|>", "<|return|>"];

/// The longest header. Longer text means that the model does not follow its format.
const MAX_HEADER_CHARS: usize = 512;

#[derive(Debug)]
pub(super) struct Harmony;

impl ToolFormat for Harmony {
    fn name(&self) -> &'static str {
        "harmony"
    }

    fn is_of(&self, template: &str) -> bool {
        has_channels(template)
    }

    fn markers(&self) -> &'static [&'static str] {
        &["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>", "<|constrain|>"]
    }

    /// The template appends every description to a text. Of an assistant's message it renders the first call, and either
    /// its text or its reasoning; the reasoning of a turn that is still going on belongs to the prompt.
    fn present(&self, conversation: &mut Conversation, tools: &ToolUse, _template: &str) {
        conversation.tools = tools.listed().map(definition).collect();
        split_calls(conversation);
        for message in conversation.messages.iter_mut().filter(|message| !message.tool_calls.is_empty()) {
            let reasoning = message.reasoning_content.take();
            message.thinking = reasoning.filter(|_| message.content.is_empty());
        }
    }

    /// One call: it ends the reply.
    fn calls(&self, calls: &Calls<'_>) -> Rule {
        Rule::Sequence(vec![analyses(), call(calls)])
    }

    fn text_or_calls(&self, calls: &Calls<'_>, text: Option<Rule>) -> Rule {
        Rule::Sequence(vec![analyses(), Rule::OneOf(vec![call(calls), answer(text.unwrap_or_else(Rule::text))])])
    }

    fn answer(&self, text: Rule) -> Rule {
        Rule::Sequence(vec![analyses(), answer(text)])
    }

    fn is_always_read(&self) -> bool {
        true
    }

    fn parser(&self, tools: &Arc<[Tool]>) -> Box<dyn CallParser> {
        let state = HarmonyState::Header(String::new());
        Box::new(HarmonyParser { tools: Arc::clone(tools), pending: Pending::default(), state })
    }
}

/// A tool as the template takes it: with a description, and with default values that it can append to a text.
fn definition(tool: &Tool) -> Value {
    let mut definition = tool.definition();
    let function = &mut definition["function"];
    if let Some(fields) = function.as_object_mut() {
        fields.entry("description").or_insert_with(|| "".into());
    }
    let properties = function.pointer_mut("/parameters/properties").and_then(Value::as_object_mut);
    for field in properties.into_iter().flat_map(|all| all.values_mut()).filter_map(Value::as_object_mut) {
        let is_joined = field.contains_key("enum") || field.contains_key("oneOf");
        if is_joined && field.get("default").is_some_and(|value| !value.is_string()) {
            field.remove("default");
        }
    }
    definition
}

/// The rule of the reasoning at the start of a reply.
fn analyses() -> Rule {
    let analysis = Rule::Sequence(vec![
        Rule::literal("<|channel|>analysis<|message|>"),
        Rule::Until("<|end|>".to_owned()),
        Rule::literal("<|start|>assistant"),
    ]);
    Rule::Repeat { rule: Box::new(analysis), min: 0, max: Some(4) }
}

fn call(calls: &Calls<'_>) -> Rule {
    calls.one_of(|name, arguments| {
        let header = format!("{CHANNEL}commentary {RECIPIENT}{name} <|constrain|>json{MESSAGE}");
        Rule::Sequence(vec![Rule::literal(header), arguments.clone()])
    })
}

fn answer(text: Rule) -> Rule {
    Rule::Sequence(vec![Rule::literal("<|channel|>final<|message|>"), text])
}

enum HarmonyState {
    /// Before a message's text.
    Header(String),
    /// In reasoning.
    Thought,
    /// In text for the user.
    Text,
    /// In a call's arguments; `begun` once their first character has come.
    Arguments { begun: bool },
}

struct HarmonyParser {
    tools: Arc<[Tool]>,
    pending: Pending,
    state: HarmonyState,
}

impl CallParser for HarmonyParser {
    fn feed(&mut self, text: String, out: &mut ParsedPieces) {
        self.pending.push(text);
        while !self.pending.is_empty() && self.step(out) {}
    }

    fn finish(&mut self, out: &mut ParsedPieces) {
        let rest = self.pending.take();
        match &mut self.state {
            HarmonyState::Header(header) => {
                let header = std::mem::take(header) + &rest;
                if !header.contains(CHANNEL) {
                    out.text(strip_role(&header));
                }
            }
            HarmonyState::Thought => out.thought(rest),
            HarmonyState::Text => out.text(rest),
            HarmonyState::Arguments { .. } => {
                self.arguments(&rest, out);
                // The reply ends with the token that ends the call, which has no text.
                self.end(out);
            }
        }
    }

    fn is_thinking(&self) -> bool {
        matches!(self.state, HarmonyState::Thought)
    }
}

impl HarmonyParser {
    /// Takes one step. Returns false if it needs more text.
    fn step(&mut self, out: &mut ParsedPieces) -> bool {
        if let HarmonyState::Header(header) = &mut self.state {
            let (more, message) = self.pending.take_until(&[MESSAGE]);
            header.push_str(&more);
            // Too long for a header, so it is text. The rest may contain markers.
            if let Some((end, _)) = header.char_indices().nth(MAX_HEADER_CHARS) {
                let rest = header.split_off(end) + message.map_or("", |_| MESSAGE);
                self.pending.0.insert_str(0, &rest);
                out.text(std::mem::take(header));
                self.state = HarmonyState::Text;
                return true;
            }
            if message.is_some() {
                let header = std::mem::take(header);
                self.begin(&header, out);
            }
            return message.is_some();
        }
        let (text, end) = self.pending.take_until(&ENDS);
        match self.state {
            HarmonyState::Thought => out.thought(text),
            HarmonyState::Text => out.text(text),
            HarmonyState::Arguments { .. } => self.arguments(&text, out),
            HarmonyState::Header(_) => {}
        }
        if end.is_some() {
            self.end(out);
            self.state = HarmonyState::Header(String::new());
        }
        end.is_some()
    }

    /// Begins the message that the header announces.
    fn begin(&mut self, header: &str, out: &mut ParsedPieces) {
        let word = |after: &str| {
            let rest = &header[header.find(after)? + after.len()..];
            Some(&rest[..rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len())])
        };
        // Names may contain spaces, and one name may begin another.
        let recipient = header.find(RECIPIENT).map_or("", |at| &header[at + RECIPIENT.len()..]);
        let ends = |rest: &str| rest.is_empty() || rest.starts_with(|c: char| c.is_whitespace() || c == '<');
        let named = self.tools.iter().filter(|tool| recipient.strip_prefix(&*tool.name).is_some_and(ends));
        let offered = named.map(|tool| &*tool.name).max_by_key(|name| name.len());
        let called = offered.or_else(|| word(RECIPIENT).filter(|name| is_callable(name, &self.tools)));
        self.state = match (called, word(CHANNEL)) {
            (Some(name), _) => {
                out.begin(name);
                HarmonyState::Arguments { begun: false }
            }
            (None, Some("analysis")) => HarmonyState::Thought,
            (None, _) => HarmonyState::Text,
        };
    }

    fn arguments(&mut self, text: &str, out: &mut ParsedPieces) {
        let HarmonyState::Arguments { begun } = &mut self.state else { return };
        let text = if *begun { text } else { text.trim_start() };
        *begun |= !text.is_empty();
        out.arguments(text);
    }

    /// A message is complete.
    fn end(&mut self, out: &mut ParsedPieces) {
        if let HarmonyState::Arguments { begun } = self.state {
            if !begun {
                out.arguments("{}");
            }
            out.end();
        }
    }
}

/// Removes the role from the text of a model that does not follow the format.
fn strip_role(header: &str) -> &str {
    header.strip_prefix("assistant").unwrap_or(header)
}
