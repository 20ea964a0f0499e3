//! Hermes's format, which Qwen 2.5, Qwen 3 and many others use: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`
//! for each call. Some models write an array of calls between the tags.

use std::sync::Arc;

use baton_schemas::constraint::Rule;
use baton_schemas::tools::Tool;

use super::json_call::CallProgress;
use super::json_calls::JsonCalls;
use super::pending::{Front, Pending};
use super::{CallParser, Calls, ParsedPieces, ToolFormat};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

#[derive(Debug)]
pub(super) struct Hermes;

impl ToolFormat for Hermes {
    fn name(&self) -> &'static str {
        "hermes"
    }

    fn is_of(&self, template: &str) -> bool {
        // GLM uses the same tags without JSON objects between them.
        template.contains(OPEN) && template.contains("arguments") && !template.contains("<arg_key>")
    }

    fn markers(&self) -> &'static [&'static str] {
        &[OPEN, CLOSE]
    }

    fn calls(&self, calls: &Calls<'_>) -> Rule {
        tagged_calls(calls, call)
    }

    fn text_or_calls(&self, calls: &Calls<'_>, text: Option<Rule>) -> Rule {
        text_or_tagged_calls(calls, text, call)
    }

    fn parser(&self, tools: &Arc<[Tool]>) -> Box<dyn CallParser> {
        Box::new(HermesParser { tools: Arc::clone(tools), pending: Pending::default(), state: HermesState::Outside })
    }
}

/// The rule of a call after its opening tag, from the text before the call, the tool's name and its arguments.
pub(super) type CallRule = fn(&str, &str, &Rule) -> Rule;

/// The rule of calls between `<tool_call>` tags.
pub(super) fn tagged_calls(calls: &Calls<'_>, call: CallRule) -> Rule {
    let call = |before: &str| calls.one_of(|name, arguments| call(before, name, arguments));
    let max = Some(calls.max.saturating_sub(1));
    let more = Rule::Repeat { rule: Box::new(call("\n<tool_call>\n")), min: 0, max };
    Rule::Sequence(vec![call("<tool_call>\n"), more])
}

/// The rule of text, with or without calls between `<tool_call>` tags.
pub(super) fn text_or_tagged_calls(calls: &Calls<'_>, text: Option<Rule>, call: CallRule) -> Rule {
    if let Some(text) = text {
        return Rule::OneOf(vec![tagged_calls(calls, call), text]);
    }
    let after_tag = calls.one_of(|name, arguments| call("\n", name, arguments));
    let call = Rule::Sequence(vec![Rule::Until(OPEN.to_owned()), after_tag]);
    let calls = Rule::Repeat { rule: Box::new(call), min: 0, max: Some(calls.max) };
    Rule::Sequence(vec![calls, Rule::text()])
}

fn call(before: &str, name: &str, arguments: &Rule) -> Rule {
    Rule::Sequence(vec![
        Rule::literal(format!("{before}{{\"name\": \"{name}\", \"arguments\": ")),
        arguments.clone(),
        Rule::literal("}\n</tool_call>"),
    ])
}

enum HermesState {
    /// In text.
    Outside,
    /// After the opening tag.
    Calls(Box<JsonCalls>),
    /// After the calls, before the closing tag, which some models omit.
    Closing,
}

struct HermesParser {
    tools: Arc<[Tool]>,
    pending: Pending,
    state: HermesState,
}

impl CallParser for HermesParser {
    fn feed(&mut self, text: String, out: &mut ParsedPieces) {
        self.pending.push(text);
        while !self.pending.is_empty() {
            match &mut self.state {
                HermesState::Outside => {
                    let (text, tag) = self.pending.take_until(&[OPEN]);
                    out.text(text);
                    if tag.is_none() {
                        return;
                    }
                    self.state = HermesState::Calls(Box::new(JsonCalls::marked(&self.tools)));
                }
                HermesState::Calls(calls) => {
                    let Some(c) = self.pending.next() else { return };
                    match calls.feed(c, out) {
                        CallProgress::Reading => {}
                        CallProgress::Done => self.state = HermesState::Closing,
                        CallProgress::NotACall => {
                            give_back(calls, out);
                            self.state = HermesState::Outside;
                        }
                    }
                }
                HermesState::Closing => {
                    self.pending.skip_space();
                    match self.pending.take_front(&[CLOSE]) {
                        Front::Unknown => return,
                        Front::Tag(_) | Front::Other => self.state = HermesState::Outside,
                    }
                }
            }
        }
    }

    fn finish(&mut self, out: &mut ParsedPieces) {
        match &mut self.state {
            HermesState::Outside => out.text(self.pending.take()),
            HermesState::Calls(calls) => {
                let rest = calls.finish(out);
                if calls.is_untouched() {
                    out.text(OPEN);
                }
                out.text(rest);
            }
            // A part of the closing tag is not text.
            HermesState::Closing => {}
        }
    }
}

/// The text after an opening tag is not a call, so the tag is text, too, unless a call was read before.
fn give_back(calls: &mut JsonCalls, out: &mut ParsedPieces) {
    if calls.is_untouched() {
        out.text(OPEN);
    }
    out.text(calls.give_back());
}
