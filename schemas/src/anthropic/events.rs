//! The events of a streamed message.

use serde::Serialize;

use super::reply::{Block, Reply, Stop, Usage};

/// Writes one message's events; each method gives server-sent events.
#[derive(Debug, Default)]
pub struct EventWriter {
    /// A text block is open; its index is 0, as that of the only one.
    is_open: bool,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event<'a> {
    MessageStart { message: &'a Reply },
    ContentBlockStart { index: u32, content_block: &'a Block },
    Ping,
    ContentBlockDelta { index: u32, delta: Delta<'a> },
    ContentBlockStop { index: u32 },
    MessageDelta { delta: End<'a>, usage: &'a Usage },
    MessageStop,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Delta<'a> {
    TextDelta { text: &'a str },
}

#[derive(Serialize)]
struct End<'a> {
    stop_reason: &'static str,
    stop_sequence: Option<&'a str>,
}

impl EventWriter {
    /// Always the first.
    pub fn begun(&mut self, message: &Reply) -> String {
        write(&Event::MessageStart { message })
    }

    /// More text.
    pub fn text(&mut self, text: &str) -> String {
        let mut events = String::new();
        if !std::mem::replace(&mut self.is_open, true) {
            events +=
                &write(&Event::ContentBlockStart { index: 0, content_block: &Block::Text { text: String::new() } });
            events += &EventWriter::ping();
        }
        events + &write(&Event::ContentBlockDelta { index: 0, delta: Delta::TextDelta { text } })
    }

    /// A sign of life; clients skip it.
    pub fn ping() -> String {
        write(&Event::Ping)
    }

    /// The end.
    pub fn ended(&mut self, stop: &Stop, usage: Usage) -> String {
        let mut events = String::new();
        if std::mem::replace(&mut self.is_open, false) {
            events += &write(&Event::ContentBlockStop { index: 0 });
        }
        let delta = End { stop_reason: stop.reason(), stop_sequence: stop.sequence.as_deref() };
        events + &write(&Event::MessageDelta { delta, usage: &usage }) + &write(&Event::MessageStop)
    }
}

fn write(event: &Event<'_>) -> String {
    let name = match event {
        Event::MessageStart { .. } => "message_start",
        Event::ContentBlockStart { .. } => "content_block_start",
        Event::Ping => "ping",
        Event::ContentBlockDelta { .. } => "content_block_delta",
        Event::ContentBlockStop { .. } => "content_block_stop",
        Event::MessageDelta { .. } => "message_delta",
        Event::MessageStop => "message_stop",
    };
    let json = serde_json::to_string(event).expect("plain structs with string keys always serialize");
    format!("event: {name}\ndata: {json}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence::FinishReason;

    #[test]
    fn a_transcript_has_anthropics_order_and_shapes() {
        let mut writer = EventWriter::default();
        let begun = Reply::begun("msg_1".into(), "m".into(), Usage::new(9, 4, 0));
        let mut transcript = writer.begun(&begun) + &writer.text("Hi") + &writer.text(" \u{1F600}");
        let stop = Stop { reason: FinishReason::Stop, sequence: Some("END".into()) };
        transcript += &writer.ended(&stop, Usage::new(9, 4, 3));
        assert_eq!(transcript, include_str!("golden/events.sse"));
    }

    #[test]
    fn a_whole_message_has_its_shape() {
        let begun = || Reply::begun("msg_1".into(), "m".into(), Usage::new(9, 4, 3));
        let ended = begun().ended("Hi".into(), Stop { reason: FinishReason::Length, sequence: None });
        assert_eq!(
            serde_json::to_string(&ended).unwrap(),
            r#"{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"Hi"}],"stop_reason":"max_tokens","stop_sequence":null,"usage":{"input_tokens":5,"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":3}}"#
        );
        let nothing = begun().ended(String::new(), Stop { reason: FinishReason::Stop, sequence: None });
        assert!(serde_json::to_string(&nothing).unwrap().contains(r#""content":[],"stop_reason":"end_turn""#));
    }
}
