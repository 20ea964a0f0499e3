//! Refusals in dialects that have no field for them: Ollama's, plain completions and llama-server's.

use futures::{StreamExt, stream};

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
    Box::pin(steps.flat_map(move |event| {
        let events = match event {
            Ok(event) => as_text(event, &mut choices).map(|event| event.map(Ok)),
            Err(error) => [None, Some(Err(error))],
        };
        stream::iter(events.into_iter().flatten())
    }))
}

/// The blank line before an event, if one belongs there, and the event. The line is no event's own text: an event's tokens
/// spell its text.
fn as_text(ReplyEvent { choice, kind }: ReplyEvent, choices: &mut Vec<LastWords>) -> [Option<ReplyEvent>; 2] {
    let without_tokens = |text: String| EventKind::Text { text, tokens: Vec::new() }.of(choice);
    let (words, event) = match kind {
        EventKind::Refusal { text } => (LastWords::Refusal, without_tokens(text)),
        EventKind::Text { ref text, .. } if !text.is_empty() => (LastWords::Text, kind.of(choice)),
        kind => return [None, Some(kind.of(choice))],
    };
    let index = choice as usize;
    if index >= choices.len() {
        choices.resize(index + 1, LastWords::None);
    }
    let before = std::mem::replace(&mut choices[index], words);
    let is_apart = before != LastWords::None && before != words;
    [is_apart.then(|| without_tokens(BLANK_LINE.to_owned())), Some(event)]
}

#[cfg(test)]
mod tests {
    use baton_reply::TokenLogprobs;
    use baton_schemas::sequence::Logprobs;

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
            for ReplyEvent { choice, kind } in as_text(event, &mut choices).into_iter().flatten() {
                let EventKind::Text { text, .. } = kind else { panic!("{kind:?}") };
                read[choice as usize].push_str(&text);
            }
        }
        assert_eq!(read, ["Well.\n\nI will not.\n\nElse?", "Not so."]);
    }

    #[test]
    fn the_blank_line_is_not_in_text_that_has_tokens() {
        let logprobs = Logprobs { chosen: -0.5, rank: None, top: Vec::new() };
        let token = TokenLogprobs { id: None, bytes: "Else?".into(), logprobs };
        let text = |text: &str, tokens: &[_]| EventKind::Text { text: text.to_owned(), tokens: tokens.to_vec() }.of(0);
        let mut choices = vec![LastWords::Refusal];
        let events = as_text(text("Else?", std::slice::from_ref(&token)), &mut choices);
        assert_eq!(events, [Some(text("\n\n", &[])), Some(text("Else?", &[token]))]);
    }
}
