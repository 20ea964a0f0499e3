//! Keeps what a client wrote apart from what the template wrote, through rendering.
//!
//! A rendered prompt is one text, and a message that spells `<|im_end|>` looks in it like the end of a turn. So a
//! private-use character (the *mark*) is put behind the first character of what could become a control token in the
//! client's strings. It survives whatever a template does with them: trimming, splitting, slicing, joining. In the
//! rendered text the marks are taken out again; a spelling that had one inside came, at least in its beginning, from
//! the client, and is text. To a template, a client's text holds no control tokens.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::ops::Range;

use aho_corasick::AhoCorasick;
use baton_schemas::generate::{Conversation, Message};
use serde_json::Value;

use super::error::TemplateError;

/// A stretch of a rendered prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplatePiece {
    /// Its text.
    pub text: String,
    /// Whether control tokens that are spelled in it are meant as such.
    pub has_control: bool,
}

/// The spellings of a vocabulary's control tokens.
pub(super) struct ControlTokens {
    spellings: AhoCorasick,
    starts: HashSet<char>,
}

/// Where a conversation is marked.
#[derive(Debug, Clone, Copy)]
pub(super) enum Marking {
    /// Behind every character that a spelling begins with: also holds where a template joins or cuts strings so that
    /// a spelling comes into being. But a template that looks for `</think>` in a message does not find it.
    EveryStart,
    /// Behind the first character of each whole spelling.
    Spellings,
}

impl ControlTokens {
    pub(super) fn new(spellings: &[String]) -> Result<Self, TemplateError> {
        let spellings: Vec<&str> = spellings.iter().map(String::as_str).filter(|text| !text.is_empty()).collect();
        let starts = spellings.iter().filter_map(|text| text.chars().next()).collect();
        let spellings = AhoCorasick::new(spellings).map_err(|e| TemplateError::Failed(e.to_string()))?;
        Ok(ControlTokens { spellings, starts })
    }

    /// Every spelling in a text, those inside others included.
    fn find<'t>(&'t self, text: &'t str) -> impl Iterator<Item = Range<usize>> + 't {
        self.spellings.find_overlapping_iter(text).map(|found| found.range())
    }

    /// The same conversation with marks.
    pub(super) fn mark(&self, conversation: &Conversation, mark: char, marking: Marking) -> Conversation {
        let text = |text: &String| self.mark_text(text, mark, marking);
        let value = |value: &Value| map_strings(value, &text);
        let values = |values: &[Value]| values.iter().map(value).collect();
        let message = |message: &Message| Message {
            role: message.role,
            content: text(&message.content),
            reasoning_content: message.reasoning_content.as_ref().map(text),
            tool_calls: values(&message.tool_calls),
            tool_call_id: message.tool_call_id.as_ref().map(text),
            name: message.name.as_ref().map(text),
        };
        Conversation {
            messages: conversation.messages.iter().map(message).collect(),
            tools: values(&conversation.tools),
            template_args: conversation.template_args.iter().map(|(k, v)| (text(k), value(v))).collect(),
            images: conversation.images.clone(),
        }
    }

    fn mark_text(&self, text: &str, mark: char, marking: Marking) -> String {
        let mut marked = String::with_capacity(text.len());
        let mut from = 0;
        for place in self.places(text, marking) {
            marked.push_str(&text[from..place]);
            marked.push(mark);
            from = place;
        }
        marked + &text[from..]
    }

    /// Byte offsets at which a mark belongs, ascending.
    fn places(&self, text: &str, marking: Marking) -> Vec<usize> {
        match marking {
            Marking::EveryStart => {
                let starts = text.char_indices().filter(|(_, c)| self.starts.contains(c));
                starts.map(|(at, c)| at + c.len_utf8()).collect()
            }
            Marking::Spellings => {
                let mut places: Vec<usize> = self.find(text).map(|found| behind_first(text, found.start)).collect();
                places.sort_unstable();
                places.dedup();
                places
            }
        }
    }

    /// Cuts a text, in which marks stood at these ascending offsets. Every spelling with a mark behind its first
    /// character lies in a piece without control tokens. Cuts are made beside true control tokens alone, where a
    /// tokenizer cuts by itself, so that merges do not change.
    pub(super) fn pieces(&self, text: &str, marks: &[usize]) -> Vec<TemplatePiece> {
        let is_marked = |found: &Range<usize>| marks.binary_search(&behind_first(text, found.start)).is_ok();
        let (mut forged, mut meant): (Vec<_>, Vec<_>) = self.find(text).partition(is_marked);
        forged.sort_unstable_by_key(|found| found.start);
        // The leftmost first, and of those the longest: as tokenizers choose.
        meant.sort_unstable_by_key(|found| (found.start, Reverse(found.end)));
        let mut forged = forged.into_iter().peekable();

        let end = text.len();
        let mut pieces = Vec::new();
        let mut push = |range: Range<usize>, has_control| {
            if !range.is_empty() {
                pieces.push(TemplatePiece { text: text[range].to_owned(), has_control });
            }
        };
        let (mut begun, mut reached) = (0, 0);
        for control in meant.into_iter().chain(std::iter::once(end..end)) {
            if control.start < reached {
                continue;
            }
            let gap = reached..control.start;
            while forged.next_if(|forged| forged.end <= gap.start).is_some() {}
            if forged.peek().is_some_and(|forged| forged.start < gap.end) {
                push(begun..gap.start, true);
                push(gap.clone(), false);
                begun = gap.end;
            }
            reached = control.end;
        }
        push(begun..end, true);
        pieces
    }
}

fn behind_first(text: &str, start: usize) -> usize {
    start + text[start..].chars().next().map_or(0, char::len_utf8)
}

/// A private-use character that occurs nowhere in the conversation.
pub(super) fn unused_mark(conversation: &Conversation) -> Result<char, TemplateError> {
    let json = serde_json::to_string(conversation).map_err(|e| TemplateError::Failed(e.to_string()))?;
    let areas = || ('\u{E000}'..='\u{F8FF}').chain('\u{F0000}'..='\u{FFFFD}');
    let used: HashSet<char> = json.chars().filter(|&c| c >= '\u{E000}').collect();
    let crowded = || TemplateError::Rejected("the messages hold every private-use character there is".into());
    areas().find(|c| !used.contains(c)).ok_or_else(crowded)
}

/// The text without marks, and the offsets in it at which they stood, ascending.
pub(super) fn take_out(marked: &str, mark: char) -> (String, Vec<usize>) {
    let mut text = String::with_capacity(marked.len());
    let mut marks = Vec::new();
    for part in marked.split_inclusive(mark) {
        match part.strip_suffix(mark) {
            Some(part) => {
                text.push_str(part);
                marks.push(text.len());
            }
            None => text.push_str(part),
        }
    }
    (text, marks)
}

/// Applies `change` to every string of a value, keys included.
fn map_strings(value: &Value, change: &impl Fn(&String) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(change(text)),
        Value::Array(items) => items.iter().map(|item| map_strings(item, change)).collect(),
        Value::Object(fields) => {
            Value::Object(fields.iter().map(|(key, value)| (change(key), map_strings(value, change))).collect())
        }
        other => other.clone(),
    }
}

#[cfg(test)]
#[path = "guard_tests.rs"]
mod tests;
