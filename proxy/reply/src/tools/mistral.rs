//! Mistral's format: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`. Ids of calls have nine letters and digits.

use std::sync::Arc;

use baton_schemas::MessageRole;
use baton_schemas::constraint::Rule;
use baton_schemas::generate::Conversation;
use baton_schemas::tools::{MAX_NAME_CHARS, Tool, ToolUse};
use serde_json::Value;

use super::json_call::{CallProgress, Extent, JsonPlace};
use super::json_calls::JsonCalls;
use super::pending::Pending;
use super::{CallParser, Calls, ParsedPieces, ToolFormat, is_callable};

pub(super) const CALLS: &str = "[TOOL_CALLS]";
const ID: &str = "[CALL_ID]";
pub(super) const ARGUMENTS: &str = "[ARGS]";

/// Characters of an id.
const ID_CHARS: usize = 9;

/// The older format. Its parser also reads the newer one.
#[derive(Debug)]
pub(super) struct Mistral;

impl ToolFormat for Mistral {
    fn name(&self) -> &'static str {
        "mistral"
    }

    fn is_of(&self, template: &str) -> bool {
        template.contains(CALLS)
    }

    fn markers(&self) -> &'static [&'static str] {
        &[CALLS, ID, ARGUMENTS]
    }

    fn present(&self, conversation: &mut Conversation, tools: &ToolUse, _template: &str) {
        conversation.tools = tools.listed().map(Tool::definition).collect();
        name_calls(conversation);
    }

    fn calls(&self, calls: &Calls<'_>) -> Rule {
        let more = Rule::Sequence(vec![Rule::literal(", "), calls.one_of(call)]);
        let more = Rule::Repeat { rule: Box::new(more), min: 0, max: Some(calls.max.saturating_sub(1)) };
        Rule::Sequence(vec![Rule::literal("[TOOL_CALLS]["), calls.one_of(call), more, Rule::literal("]")])
    }

    fn text_or_calls(&self, calls: &Calls<'_>, text: Option<Rule>) -> Rule {
        text_or(self.calls(calls), text)
    }

    fn parser(&self, tools: &Arc<[Tool]>) -> Box<dyn CallParser> {
        Box::new(MistralParser { tools: Arc::clone(tools), pending: Pending::default(), state: MistralState::Outside })
    }
}

/// The rule of text with calls after it, or of text alone.
pub(super) fn text_or(calls: Rule, text: Option<Rule>) -> Rule {
    match text {
        Some(text) => Rule::OneOf(vec![calls, text]),
        // A control token ends a pattern, so text cannot hide the marker.
        None => Rule::Sequence(vec![Rule::text(), Rule::optional(calls)]),
    }
}

fn call(name: &str, arguments: &Rule) -> Rule {
    let before = Rule::literal(format!("{{\"name\": \"{name}\", \"arguments\": "));
    Rule::Sequence(vec![before, arguments.clone(), Rule::literal("}")])
}

/// Gives calls and their results ids in the form that the templates require. Results without an id answer the calls in
/// order.
fn name_calls(conversation: &mut Conversation) {
    let mut unanswered = std::collections::VecDeque::new();
    for (at, message) in conversation.messages.iter_mut().enumerate() {
        for (nth, call) in message.tool_calls.iter_mut().enumerate() {
            let given = call.get("id").and_then(Value::as_str);
            let id = given.map_or_else(|| short_id(&format!("{at} {nth}")), short_id);
            if let Some(call) = call.as_object_mut() {
                call.insert("id".to_owned(), id.clone().into());
            }
            unanswered.push_back(id);
        }
        if message.role == MessageRole::Tool {
            let id = message.tool_call_id.as_deref().map(short_id);
            if let Some(id) = &id {
                unanswered.retain(|open| open != id);
            }
            message.tool_call_id = id.or_else(|| unanswered.pop_front());
        }
    }
}

/// Returns the id if templates accept it, otherwise one that is derived from it.
fn short_id(id: &str) -> String {
    if id.len() == ID_CHARS && id.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return id.to_owned();
    }
    blake3::hash(id.as_bytes()).to_hex().chars().take(ID_CHARS).collect()
}

/// The texts that can follow a name.
const NAME_ENDS: [&str; 3] = [ID, ARGUMENTS, "{"];

enum MistralState {
    /// In text.
    Outside,
    /// After the marker.
    Marked,
    /// In an array of calls.
    Calls(Box<JsonCalls>),
    /// In a name before its arguments.
    Name(String),
    /// Between the name, or an id, and the arguments.
    BeforeArguments,
    Arguments(Extent),
}

struct MistralParser {
    tools: Arc<[Tool]>,
    pending: Pending,
    state: MistralState,
}

impl CallParser for MistralParser {
    fn feed(&mut self, text: String, out: &mut ParsedPieces) {
        self.pending.push(text);
        while !self.pending.is_empty() && self.step(out) {}
    }

    fn finish(&mut self, out: &mut ParsedPieces) {
        match &mut self.state {
            MistralState::Outside => out.text(self.pending.take()),
            MistralState::Calls(calls) => {
                let rest = calls.finish(out);
                out.text(rest);
            }
            MistralState::Name(name) => {
                let name = std::mem::take(name) + &self.pending.take();
                out.text(&name);
            }
            MistralState::Marked | MistralState::BeforeArguments | MistralState::Arguments(_) => {}
        }
    }
}

impl MistralParser {
    /// Takes one step. Returns false if it needs more text.
    fn step(&mut self, out: &mut ParsedPieces) -> bool {
        match &mut self.state {
            MistralState::Outside => {
                let (text, tag) = self.pending.take_until(&[CALLS]);
                out.text(text);
                if tag.is_some() {
                    self.state = MistralState::Marked;
                }
                tag.is_some()
            }
            MistralState::Marked => {
                self.pending.skip_space();
                match self.pending.0.chars().next() {
                    None => return false,
                    Some('[' | '{') => self.state = MistralState::Calls(Box::new(JsonCalls::marked(&self.tools))),
                    Some(_) => self.state = MistralState::Name(String::new()),
                }
                true
            }
            MistralState::Calls(calls) => {
                let Some(c) = self.pending.next() else { return false };
                match calls.feed(c, out) {
                    CallProgress::Reading => {}
                    CallProgress::Done => self.state = MistralState::Outside,
                    CallProgress::NotACall => {
                        out.text(calls.give_back());
                        self.state = MistralState::Outside;
                    }
                }
                true
            }
            MistralState::Name(_) => self.name(out),
            MistralState::BeforeArguments => {
                // Skip the model's id: the client gets one that is made here.
                let (_, brace) = self.pending.take_until(&["{"]);
                if brace.is_some() {
                    self.argument('{', Extent::default(), out);
                }
                brace.is_some()
            }
            MistralState::Arguments(extent) => {
                let extent = std::mem::take(extent);
                let Some(c) = self.pending.next() else { return false };
                self.argument(c, extent, out);
                true
            }
        }
    }

    fn name(&mut self, out: &mut ParsedPieces) -> bool {
        let MistralState::Name(name) = &mut self.state else { return false };
        let (more, tag) = self.pending.take_until(&NAME_ENDS);
        name.push_str(&more);
        // Too long for a name, so it is text. The rest may contain markers.
        if let Some((end, _)) = name.char_indices().nth(MAX_NAME_CHARS) {
            let rest = name.split_off(end) + tag.map_or("", |tag| NAME_ENDS[tag]);
            self.pending.0.insert_str(0, &rest);
            out.text(std::mem::take(name));
            self.state = MistralState::Outside;
            return true;
        }
        let Some(tag) = tag else { return false };
        if is_callable(name.trim(), &self.tools) {
            out.begin(name.trim());
            match tag {
                2 => self.argument('{', Extent::default(), out),
                _ => self.state = MistralState::BeforeArguments,
            }
        } else {
            out.text(std::mem::take(name));
            out.text(["", "", "{"][tag]);
            self.state = MistralState::Outside;
        }
        true
    }

    fn argument(&mut self, c: char, mut extent: Extent, out: &mut ParsedPieces) {
        let place = extent.take(c);
        out.arguments(c.encode_utf8(&mut [0; 4]));
        self.state = if place == JsonPlace::Inside {
            MistralState::Arguments(extent)
        } else {
            out.end();
            MistralState::Outside
        };
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::generate::Message;
    use serde_json::json;

    use super::*;

    #[test]
    fn calls_and_results_agree_on_ids_that_templates_take() {
        let call = |id: Value| json!({ "id": id, "type": "function", "function": { "name": "f", "arguments": {} } });
        let without = json!({ "type": "function", "function": { "name": "f", "arguments": {} } });
        let calls = Message {
            role: MessageRole::Assistant,
            tool_calls: vec![call(json!("call_17")), call(json!("abc123XYZ")), without],
            ..Message::default()
        };
        let result = |id: Option<&str>| Message {
            role: MessageRole::Tool,
            tool_call_id: id.map(str::to_owned),
            ..Message::default()
        };
        let messages = vec![calls, result(Some("abc123XYZ")), result(Some("call_17")), result(None)];
        let mut conversation = Conversation { messages, ..Conversation::default() };
        name_calls(&mut conversation);
        let made: Vec<&str> =
            conversation.messages[0].tool_calls.iter().map(|call| call["id"].as_str().unwrap()).collect();
        assert!(
            made.iter().all(|id| id.len() == ID_CHARS && id.bytes().all(|b| b.is_ascii_alphanumeric())),
            "{made:?}"
        );
        let answered: Vec<_> = conversation.messages[1..].iter().map(|m| m.tool_call_id.as_deref().unwrap()).collect();
        assert_eq!(answered, [made[1], made[0], made[2]]);
        assert_eq!(made[1], "abc123XYZ");
    }
}
