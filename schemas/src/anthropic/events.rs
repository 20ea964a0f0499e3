//! The events of a streamed message.

use bytes::BytesMut;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;

use super::reply::{Block, Counts, MessageReply, MessageUsage, SIGNATURE, Stop};
use crate::json_output::{TypedEvent, write_typed_event};
use crate::tools::ToolCallDelta;

/// Writes the events of one message. Each method writes server-sent events at the end of `out`.
#[derive(Debug, Default)]
pub struct MessageEventWriter {
    /// The kind of the open block.
    open: Option<BlockKind>,
    /// The number of closed blocks, which is the index of the open one.
    n_closed: u32,
    /// The ping after the first block's start was sent, as Anthropic sends it.
    has_pinged: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockKind {
    Thinking,
    Text,
    Refusal,
    ToolUse,
}

#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
enum MessageEvent<'a> {
    MessageStart { message: &'a MessageReply },
    ContentBlockStart { index: u32, content_block: &'a Block },
    Ping,
    ContentBlockDelta { index: u32, delta: BlockDelta<'a> },
    ContentBlockStop { index: u32 },
    MessageDelta { delta: MessageEnd<'a>, usage: &'a Counts },
    MessageStop,
}

impl TypedEvent for MessageEvent<'_> {
    fn name(&self) -> &'static str {
        match self {
            MessageEvent::MessageStart { .. } => "message_start",
            MessageEvent::ContentBlockStart { .. } => "content_block_start",
            MessageEvent::Ping => "ping",
            MessageEvent::ContentBlockDelta { .. } => "content_block_delta",
            MessageEvent::ContentBlockStop { .. } => "content_block_stop",
            MessageEvent::MessageDelta { .. } => "message_delta",
            MessageEvent::MessageStop => "message_stop",
        }
    }
}

#[derive(Serialize, JsonSchema)]
#[serde(tag = "type")]
#[schemars(rename = "MessageDelta")]
enum BlockDelta<'a> {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "signature_delta")]
    Signature { signature: &'a str },
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: &'a str },
}

#[derive(Serialize, JsonSchema)]
struct MessageEnd<'a> {
    stop_reason: &'static str,
    stop_sequence: Option<&'a str>,
    stop_details: Option<()>,
    container: Option<()>,
}

impl MessageEventWriter {
    /// Returns the schema of one event's data.
    pub fn schema(generator: &mut SchemaGenerator) -> Schema {
        generator.subschema_for::<MessageEvent<'_>>()
    }

    /// Writes the first event.
    pub fn begun(&mut self, out: &mut BytesMut, message: &MessageReply) {
        write_typed_event(out, &MessageEvent::MessageStart { message });
    }

    /// Writes more text.
    pub fn text(&mut self, out: &mut BytesMut, text: &str) {
        self.add_text(out, BlockKind::Text, text);
    }

    /// Writes more of a refusal, which is a block of text of its own.
    pub fn refusal(&mut self, out: &mut BytesMut, text: &str) {
        self.add_text(out, BlockKind::Refusal, text);
    }

    fn add_text(&mut self, out: &mut BytesMut, kind: BlockKind, text: &str) {
        if text.is_empty() {
            return;
        }
        if self.open != Some(kind) {
            self.open(out, kind, &Block::text(String::new()));
        }
        self.delta(out, BlockDelta::Text { text });
    }

    /// Writes more of the model's reasoning.
    pub fn thinking(&mut self, out: &mut BytesMut, thinking: &str) {
        if self.open != Some(BlockKind::Thinking) {
            // The signature follows as a delta of its own, at the end of the block.
            let block = Block::Thinking { thinking: String::new(), signature: "" };
            self.open(out, BlockKind::Thinking, &block);
        }
        self.delta(out, BlockDelta::Thinking { thinking });
    }

    /// Writes a step of a call.
    pub fn call(&mut self, out: &mut BytesMut, step: &ToolCallDelta) {
        match step {
            ToolCallDelta::Begin { id, name, .. } => {
                self.open(out, BlockKind::ToolUse, &Block::call(id.clone(), name.clone()));
            }
            ToolCallDelta::Arguments { fragment, .. } => {
                self.delta(out, BlockDelta::InputJson { partial_json: fragment });
            }
            ToolCallDelta::End { .. } => self.close(out),
        }
    }

    /// Writes a ping, which clients skip: it only keeps the connection alive.
    pub fn ping(out: &mut BytesMut) {
        write_typed_event(out, &MessageEvent::Ping);
    }

    /// Closes the open block and ends the message.
    pub fn ended(&mut self, out: &mut BytesMut, stop: &Stop, usage: MessageUsage) {
        let stop_sequence = stop.sequence.as_deref();
        let delta = MessageEnd { stop_reason: stop.reason(), stop_sequence, stop_details: None, container: None };
        self.close(out);
        write_typed_event(out, &MessageEvent::MessageDelta { delta, usage: usage.counts() });
        write_typed_event(out, &MessageEvent::MessageStop);
    }

    /// Closes the open block and opens the block `begun`.
    fn open(&mut self, out: &mut BytesMut, kind: BlockKind, begun: &Block) {
        self.close(out);
        self.open = Some(kind);
        write_typed_event(out, &MessageEvent::ContentBlockStart { index: self.n_closed, content_block: begun });
        if !std::mem::replace(&mut self.has_pinged, true) {
            MessageEventWriter::ping(out);
        }
    }

    fn delta(&self, out: &mut BytesMut, delta: BlockDelta<'_>) {
        write_typed_event(out, &MessageEvent::ContentBlockDelta { index: self.n_closed, delta });
    }

    /// Closes the open block, if there is one.
    fn close(&mut self, out: &mut BytesMut) {
        let Some(kind) = self.open.take() else { return };
        match kind {
            BlockKind::Thinking => self.delta(out, BlockDelta::Signature { signature: SIGNATURE }),
            BlockKind::Text | BlockKind::Refusal | BlockKind::ToolUse => {}
        }
        write_typed_event(out, &MessageEvent::ContentBlockStop { index: self.n_closed });
        self.n_closed += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::anthropic::AnthropicErrorReply;
    use crate::anthropic::reply::MessageContent;
    use crate::json_output::checked_names;
    use crate::openai::{ErrorBody, ErrorKind};
    use crate::sequence::FinishReason;

    fn begun(n_completion: u32) -> MessageReply {
        MessageReply::begun("msg_1".into(), "m".into(), MessageUsage::new(9, 4, n_completion, 0))
    }

    fn calls() -> [ToolCallDelta; 7] {
        let begin = |index, id: &str| ToolCallDelta::Begin { index, id: id.into(), name: "f".into() };
        let arguments = |index, fragment: &str| ToolCallDelta::Arguments { index, fragment: fragment.into() };
        [
            begin(0, "call_1"),
            arguments(0, "{\"a\":"),
            arguments(0, "1}"),
            ToolCallDelta::End { index: 0 },
            begin(1, "call_2"),
            arguments(1, "{}"),
            ToolCallDelta::End { index: 1 },
        ]
    }

    #[test]
    fn a_transcript_has_anthropics_order_and_shapes() {
        let mut writer = MessageEventWriter::default();
        let mut transcript = BytesMut::new();
        writer.begun(&mut transcript, &begun(0));
        writer.text(&mut transcript, "Hi");
        writer.text(&mut transcript, " \u{1F600}");
        let stop = Stop { reason: FinishReason::Stop, sequence: Some("END".into()) };
        writer.ended(&mut transcript, &stop, MessageUsage::new(9, 4, 3, 0));
        assert_eq!(transcript, include_str!("golden/events.sse"));
    }

    #[test]
    fn thinking_text_and_calls_are_blocks_one_after_the_other() {
        let mut writer = MessageEventWriter::default();
        let mut transcript = BytesMut::new();
        writer.begun(&mut transcript, &begun(0));
        writer.thinking(&mut transcript, "h");
        writer.thinking(&mut transcript, "m");
        writer.text(&mut transcript, "So");
        for step in calls() {
            writer.call(&mut transcript, &step);
        }
        let stop = Stop { reason: FinishReason::ToolCalls, sequence: None };
        writer.ended(&mut transcript, &stop, MessageUsage::new(9, 4, 20, 2));
        assert_eq!(transcript, include_str!("golden/calls.sse"));
    }

    #[test]
    fn every_event_is_named_after_its_type() {
        let error = ErrorBody::new(ErrorKind::Server, "Oh.");
        let mut transcript = BytesMut::from(include_str!("golden/events.sse"));
        AnthropicErrorReply::new(500, error).write_event(&mut transcript);
        let names = checked_names(std::str::from_utf8(&transcript).unwrap());
        let expected = [
            "content_block_delta",
            "content_block_start",
            "content_block_stop",
            "error",
            "message_delta",
            "message_start",
            "message_stop",
            "ping",
        ];
        assert!(names.iter().eq(expected), "{names:?}");
    }

    #[test]
    fn a_whole_message_has_its_shape() {
        let mut content = MessageContent::default();
        content.text("H");
        content.text("i");
        let ended = begun(3).ended(content, Stop { reason: FinishReason::Length, sequence: None });
        assert_eq!(
            serde_json::to_string(&ended).unwrap(),
            r#"{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"Hi","citations":null}],"stop_reason":"max_tokens","stop_sequence":null,"stop_details":null,"container":null,"usage":{"input_tokens":5,"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":3,"output_tokens_details":{"thinking_tokens":0},"server_tool_use":null,"cache_creation":{"ephemeral_5m_input_tokens":0,"ephemeral_1h_input_tokens":0},"inference_geo":null,"service_tier":"standard"}}"#
        );
        let nothing = begun(3).ended(MessageContent::default(), Stop { reason: FinishReason::Stop, sequence: None });
        assert!(serde_json::to_string(&nothing).unwrap().contains(r#""content":[],"stop_reason":"end_turn""#));
    }

    #[test]
    fn a_whole_message_has_its_complete_calls_or_the_one_that_was_cut() {
        let cut = [
            ToolCallDelta::Begin { index: 2, id: "call_3".into(), name: "f".into() },
            ToolCallDelta::Arguments { index: 2, fragment: "{\"a".into() },
        ];
        let content = |steps: &[ToolCallDelta]| {
            let mut content = MessageContent::default();
            content.thinking("hm");
            steps.iter().for_each(|step| content.call(step));
            let ended = begun(3).ended(content, Stop { reason: FinishReason::Length, sequence: None });
            serde_json::to_value(&ended).unwrap()["content"].clone()
        };
        let thinking = serde_json::json!({"type": "thinking", "thinking": "hm", "signature": SIGNATURE});
        let call = |id: &str, input| {
            let caller = serde_json::json!({"type": "direct"});
            serde_json::json!({"type": "tool_use", "id": id, "name": "f", "input": input, "caller": caller})
        };
        let complete =
            [thinking.clone(), call("call_1", serde_json::json!({"a": 1})), call("call_2", serde_json::json!({}))];
        assert_eq!(content(&[&calls()[..], &cut].concat()), serde_json::json!(complete));
        let only = call("call_3", serde_json::json!({"INVALID_JSON": "{\"a"}));
        assert_eq!(content(&cut), serde_json::json!([thinking, only]));
    }
}
