//! Writes JSON at the end of a reply's buffer: as an object, as a line, or as a server-sent event.
//!
//! The events of a stream share one buffer, so that an event costs neither an allocation nor a second copy.

use bytes::{BufMut, BytesMut};
use serde::Serialize;

/// The first fields of all objects of one stream, serialized once.
#[derive(Debug, Clone)]
pub struct SharedFields {
    /// An object without its closing brace.
    opened: Vec<u8>,
}

impl SharedFields {
    /// Serializes the fields of a struct.
    pub fn of(fields: &impl Serialize) -> SharedFields {
        let mut opened = BytesMut::new();
        append(&mut opened, fields);
        opened.truncate(opened.len().saturating_sub(1));
        SharedFields { opened: opened.into() }
    }

    /// Writes an event: an object with the shared fields, and then those of `rest`, which has at least one.
    pub fn write_event(&self, out: &mut BytesMut, rest: &impl Serialize) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(&self.opened);
        let at = out.len();
        append(out, rest);
        // The opening brace of `rest` becomes the comma between the two objects' fields.
        out[at] = b',';
        out.extend_from_slice(b"\n\n");
    }
}

/// An event of which only one text changes, serialized once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextEvent {
    before: Vec<u8>,
    after: Vec<u8>,
}

impl TextEvent {
    /// Two characters that JSON always escapes, to six bytes that differ in the last: so [`TextEvent::of`] finds the text's
    /// place.
    pub const EXAMPLES: [&str; 2] = ["\u{1}", "\u{2}"];

    /// The form of two events that differ only in a text, which is each of [`TextEvent::EXAMPLES`]. `None` if they differ
    /// in more.
    pub fn of(events: [&[u8]; 2]) -> Option<TextEvent> {
        let [first, second] = events;
        // Both examples are written with the same number of bytes, of which the last one differs.
        let at = first.iter().zip(second).position(|(a, b)| a != b)?;
        let before = first[..at].strip_suffix(b"\"\\u000")?;
        let after = [&first[at + 1..], &second[at + 1..]].map(|rest| rest.strip_prefix(b"\""));
        match after {
            [Some(after), Some(same)] if after == same => {
                Some(TextEvent { before: before.to_vec(), after: after.to_vec() })
            }
            _ => None,
        }
    }

    /// Writes the event with this text.
    pub fn write(&self, out: &mut BytesMut, text: &str) {
        out.reserve(self.before.len() + text.len() + self.after.len() + 2);
        out.extend_from_slice(&self.before);
        append(out, &text);
        out.extend_from_slice(&self.after);
    }
}

/// An event whose JSON has a `type`. It is named after it, as in Anthropic's API and OpenAI's responses.
pub(crate) trait TypedEvent: Serialize {
    /// Returns the `type` of the event's JSON.
    fn name(&self) -> &'static str;
}

/// Writes an event with its name.
pub(crate) fn write_typed_event(out: &mut BytesMut, event: &impl TypedEvent) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(event.name().as_bytes());
    out.extend_from_slice(b"\n");
    write_event(out, event);
}

/// Writes an event without a name. JSON escapes line breaks, so the event has one line.
pub fn write_event(out: &mut BytesMut, data: &impl Serialize) {
    out.extend_from_slice(b"data: ");
    append(out, data);
    out.extend_from_slice(b"\n\n");
}

/// Writes a line.
pub fn write_line(out: &mut BytesMut, data: &impl Serialize) {
    append(out, data);
    out.extend_from_slice(b"\n");
}

fn append(out: &mut BytesMut, value: &impl Serialize) {
    serde_json::to_writer(out.writer(), value).expect("plain structs with string keys always serialize");
}

/// Returns the names of the events in a transcript, after checking that each is the `type` of its event's JSON.
#[cfg(test)]
pub(crate) fn checked_names(transcript: &str) -> std::collections::BTreeSet<String> {
    let events = transcript.split_terminator("\n\n").map(|event| {
        let (name, json) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let json: serde_json::Value = serde_json::from_str(json).unwrap();
        assert_eq!(json["type"], name, "{event}");
        name.to_owned()
    });
    events.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Head {
        id: &'static str,
        n: u32,
    }

    #[derive(Serialize)]
    struct Rest {
        text: &'static str,
    }

    #[test]
    fn shared_fields_come_first_in_every_event() {
        let shared = SharedFields::of(&Head { id: "}\"", n: 1 });
        let mut out = BytesMut::new();
        shared.write_event(&mut out, &Rest { text: "{\n" });
        shared.write_event(&mut out, &Rest { text: "" });
        let expected = concat!(
            "data: {\"id\":\"}\\\"\",\"n\":1,\"text\":\"{\\n\"}\n\n",
            "data: {\"id\":\"}\\\"\",\"n\":1,\"text\":\"\"}\n\n"
        );
        assert_eq!(out, expected);
    }

    #[test]
    fn an_event_is_the_same_whether_it_is_serialized_or_written_with_its_text() {
        let shared = SharedFields::of(&Head { id: "}\"", n: 1 });
        let serialized = |text: &'static str| {
            let mut out = BytesMut::new();
            shared.write_event(&mut out, &Rest { text });
            out
        };
        let [first, second] = TextEvent::EXAMPLES.map(serialized);
        let event = TextEvent::of([&first, &second]).unwrap();
        for text in ["", "a", "\"", "\\", "\u{1}\n\u{2028}", "grün 🦀"] {
            let mut out = BytesMut::new();
            event.write(&mut out, text);
            assert_eq!(out, serialized(text));
        }
        for other in [&b"data: {}"[..], &first, &serialized("b"), &[&second[..], b" "].concat()] {
            assert_eq!(TextEvent::of([&first, other]), None);
        }
    }
}
