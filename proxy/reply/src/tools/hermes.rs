//! Hermes's format, which Qwen 2.5 and 3 and many others took: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`,
//! once for each call. Some models write an array of calls between the tags.

use std::sync::Arc;

use baton_schemas::constraint::Rule;
use baton_schemas::tools::Tool;

use super::json_call::CallProgress;
use super::json_calls::JsonCalls;
use super::pending::{Front, Pending};
use super::{CallParser, Calls, ParsedPieces, ToolFormat};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// See the module.
#[derive(Debug)]
pub(super) struct Hermes;

impl ToolFormat for Hermes {
    fn name(&self) -> &'static str {
        "hermes"
    }

    fn is_of(&self, template: &str) -> bool {
        // GLM's tags are the same, but there are no objects between them.
        template.contains(OPEN) && template.contains("arguments") && !template.contains("<arg_key>")
    }

    fn markers(&self) -> &'static [&'static str] {
        &[OPEN, CLOSE]
    }

    fn calls(&self, calls: &Calls<'_>) -> Rule {
        let call = |before: &'static str| calls.one_of(|name, arguments| call(before, name, arguments));
        let more =
            Rule::Repeat { rule: Box::new(call("\n<tool_call>\n")), min: 0, max: Some(calls.max.saturating_sub(1)) };
        Rule::Sequence(vec![call("<tool_call>\n"), more])
    }

    fn text_or_calls(&self, calls: &Calls<'_>, text: Option<Rule>) -> Rule {
        if let Some(text) = text {
            return Rule::OneOf(vec![self.calls(calls), text]);
        }
        let call = Rule::Sequence(vec![
            Rule::Until(OPEN.to_owned()),
            calls.one_of(|name, arguments| call("\n", name, arguments)),
        ]);
        let calls = Rule::Repeat { rule: Box::new(call), min: 0, max: Some(calls.max) };
        Rule::Sequence(vec![calls, Rule::text()])
    }

    fn parser(&self, tools: &Arc<[Tool]>) -> Box<dyn CallParser> {
        Box::new(HermesParser { tools: Arc::clone(tools), pending: Pending::default(), state: HermesState::Outside })
    }
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
    /// Behind the opening tag.
    Calls(Box<JsonCalls>),
    /// Behind the calls, before the closing tag, which some models forget.
    Closing,
}

struct HermesParser {
    tools: Arc<[Tool]>,
    pending: Pending,
    state: HermesState,
}

impl CallParser for HermesParser {
    fn feed(&mut self, text: &str, out: &mut ParsedPieces) {
        self.pending.push(text);
        while !self.pending.is_empty() {
            match &mut self.state {
                HermesState::Outside => {
                    let (text, tag) = self.pending.take_until(&[OPEN]);
                    out.text(&text);
                    if tag.is_none() {
                        return;
                    }
                    self.state = HermesState::Calls(Box::new(JsonCalls::new(&self.tools)));
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
            HermesState::Outside => out.text(&self.pending.take()),
            HermesState::Calls(calls) => {
                let rest = calls.finish(out);
                if calls.is_untouched() {
                    out.text(OPEN);
                }
                out.text(&rest);
            }
            // A part of the closing tag is no text.
            HermesState::Closing => {}
        }
    }
}

/// What stood behind an opening tag was no call, so the tag is text too; unless a call was read before.
fn give_back(calls: &mut JsonCalls, out: &mut ParsedPieces) {
    if calls.is_untouched() {
        out.text(OPEN);
    }
    out.text(&calls.give_back());
}
