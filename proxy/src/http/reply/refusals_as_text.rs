//! Refusals in dialects that have no field for them: Ollama's, plain completions and llama-server's.

use futures::StreamExt;

use crate::reply_event::{EventKind, ReplyEvent};
use crate::request::generate::EventStream;

/// Stands between a choice's text and its refusal, which would look like one sentence otherwise.
const BLANK_LINE: &str = "\n\n";

/// The kind of words that a choice ends with so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum LastWords {
    #[default]
    None,
    Text,
    Refusal,
}

/// Makes a text of each refusal, with a blank line between it and other text of its choice.
pub(in crate::http) fn refusals_as_text(steps: EventStream) -> EventStream {
    let mut choices = Vec::new();
    Box::pin(steps.map(move |event| event.map(|event| as_text(event, &mut choices))))
}

fn as_text(ReplyEvent { choice, mut kind }: ReplyEvent, choices: &mut Vec<LastWords>) -> ReplyEvent {
    let (words, text) = match &mut kind {
        EventKind::Text { text, .. } if !text.is_empty() => (LastWords::Text, text),
        EventKind::Refusal { text } => (LastWords::Refusal, text),
        _ => return kind.of(choice),
    };
    let index = choice as usize;
    if index >= choices.len() {
        choices.resize(index + 1, LastWords::None);
    }
    let before = std::mem::replace(&mut choices[index], words);
    if before != LastWords::None && before != words {
        text.insert_str(0, BLANK_LINE);
    }
    match kind {
        EventKind::Refusal { text } => EventKind::Text { text, tokens: Vec::new() }.of(choice),
        kind => kind.of(choice),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blank_line_stands_between_text_and_refusal_of_a_choice() {
        let text = |text: &str| EventKind::Text { text: text.to_owned(), tokens: Vec::new() };
        let refusal = |text: &str| EventKind::Refusal { text: text.to_owned() };
        let mut choices = Vec::new();
        let mut read = [String::new(), String::new()];
        for event in [
            text("We").of(0),
            refusal("No").of(1),
            text("ll.").of(0),
            text("").of(1),
            refusal("t so.").of(1),
            refusal("I will ").of(0),
            text("").of(0),
            refusal("not.").of(0),
            text("Else?").of(0),
        ] {
            let ReplyEvent { choice, kind } = as_text(event, &mut choices);
            let EventKind::Text { text, .. } = kind else { panic!("{kind:?}") };
            read[choice as usize].push_str(&text);
        }
        assert_eq!(read, ["Well.\n\nI will not.\n\nElse?", "Not so."]);
    }
}
