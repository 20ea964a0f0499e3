//! Distinguishes, in a rendered prompt, the client's text from the template's.
//!
//! In the prompt's text, a message that spells `<|im_end|>` looks like the end of a turn. So before rendering, a
//! private-use character (the *mark*) is inserted after the first character of everything in the client's strings that
//! could become a control token. The mark survives trimming, splitting, slicing and joining. After rendering, the marks
//! are removed. A spelling with a mark inside came from the client, at least its beginning, and is tokenized as plain
//! text. To the template, a client's text contains no control tokens.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::ops::Range;

use aho_corasick::AhoCorasick;
use baton_schemas::generate::{Conversation, Message};
use baton_schemas::written_number::text_of;
use serde_json::Value;

use super::error::TemplateError;

/// A part of a rendered prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplatePiece {
    pub text: String,
    /// True if spellings of control tokens in the text stand for these tokens.
    pub has_control: bool,
}

/// The spellings of a vocabulary's control tokens.
pub(super) struct ControlTokens {
    spellings: AhoCorasick,
    starts: HashSet<char>,
}

/// Where marks are inserted.
#[derive(Debug, Clone, Copy)]
pub(super) enum Marking {
    /// After every character that begins some spelling. This also covers spellings that arise when a template joins or
    /// cuts strings. But a template that searches a message for `</think>` does not find it.
    EveryStart,
    /// After the first character of each complete spelling.
    Spellings,
}

impl ControlTokens {
    pub(super) fn new(spellings: &[String]) -> Result<Self, TemplateError> {
        let spellings: Vec<&str> = spellings.iter().map(String::as_str).filter(|text| !text.is_empty()).collect();
        let starts = spellings.iter().filter_map(|text| text.chars().next()).collect();
        let spellings = AhoCorasick::new(spellings).map_err(|e| TemplateError::Failed(e.to_string()))?;
        Ok(ControlTokens { spellings, starts })
    }

    /// Every spelling in a text, including those inside others.
    fn find<'t>(&'t self, text: &'t str) -> impl Iterator<Item = Range<usize>> + 't {
        self.spellings.find_overlapping_iter(text).map(|found| found.range())
    }

    /// The conversation with marks in all of its strings.
    pub(super) fn mark(&self, conversation: &Conversation, mark: char, marking: Marking) -> Conversation {
        let text = |text: &String| self.mark_text(text, mark, marking);
        let value = |value: &Value| map_strings(value, &text);
        let values = |values: &[Value]| values.iter().map(value).collect();
        let message = |message: &Message| Message {
            role: message.role,
            content: text(&message.content),
            reasoning_content: message.reasoning_content.as_ref().map(text),
            thinking: message.thinking.as_ref().map(text),
            tool_calls: values(&message.tool_calls),
            tool_call_id: message.tool_call_id.as_ref().map(text),
            name: message.name.as_ref().map(text),
        };
        Conversation {
            messages: conversation.messages.iter().map(message).collect(),
            tools: values(&conversation.tools),
            template_args: conversation.template_args.iter().map(|(k, v)| (text(k), value(v))).collect(),
            images: conversation.images.clone(),
            linked_images: conversation.linked_images.clone(),
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

    /// The byte offsets for marks, ascending.
    fn places(&self, text: &str, marking: Marking) -> Vec<usize> {
        match marking {
            Marking::EveryStart => {
                let starts = text.char_indices().filter(|(_, c)| self.starts.contains(c));
                starts.map(|(at, c)| at + c.len_utf8()).collect()
            }
            Marking::Spellings => {
                let mut places: Vec<usize> = self.find(text).map(|found| after_first(text, found.start)).collect();
                places.sort_unstable();
                places.dedup();
                places
            }
        }
    }

    /// Cuts a text that had marks at these ascending offsets. Every spelling with a mark after its first character ends
    /// up in a piece without control tokens. All cuts are next to real control tokens, where tokenizers cut anyway, so
    /// that merges do not change.
    pub(super) fn pieces(&self, text: &str, marks: &[usize]) -> Vec<TemplatePiece> {
        let is_marked = |found: &Range<usize>| marks.binary_search(&after_first(text, found.start)).is_ok();
        let (mut forged, mut meant): (Vec<_>, Vec<_>) = self.find(text).partition(is_marked);
        forged.sort_unstable_by_key(|found| found.start);
        // Like tokenizers: the leftmost first, and of those the longest.
        meant.sort_unstable_by_key(|found| (found.start, Reverse(found.end)));
        let mut forged = forged.into_iter().peekable();

        let end = text.len();
        let mut pieces = Vec::new();
        let mut push = |range: Range<usize>, has_control| {
            if !range.is_empty() {
                pieces.push(TemplatePiece { text: text[range].to_owned(), has_control });
            }
        };
        let mut begun = 0;
        let mut reached = 0;
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

fn after_first(text: &str, start: usize) -> usize {
    start + text[start..].chars().next().map_or(0, char::len_utf8)
}

/// A private-use character that the conversation does not contain. Errors: it contains all of them.
pub(super) fn unused_mark(conversation: &Conversation) -> Result<char, TemplateError> {
    let json = serde_json::to_string(conversation).map_err(|e| TemplateError::Failed(e.to_string()))?;
    let areas = || ('\u{E000}'..='\u{F8FF}').chain('\u{F0000}'..='\u{FFFFD}');
    let used: HashSet<char> = json.chars().filter(|&c| c >= '\u{E000}').collect();
    let crowded = || TemplateError::Rejected("the messages hold every private-use character there is".into());
    areas().find(|c| !used.contains(c)).ok_or_else(crowded)
}

/// Removes the marks from a text. Returns the text and the offsets of the marks in it, ascending.
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

/// Applies `change` to every string in a value, including keys.
fn map_strings(value: &Value, change: &impl Fn(&String) -> String) -> Value {
    match value {
        // A number.
        Value::Object(_) if text_of(value).is_some() => value.clone(),
        Value::String(text) => Value::String(change(text)),
        Value::Array(items) => items.iter().map(|item| map_strings(item, change)).collect(),
        Value::Object(fields) => {
            Value::Object(fields.iter().map(|(key, value)| (change(key), map_strings(value, change))).collect())
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests;
