//! The events of a streamed response. Each has a sequence number.

use bytes::BytesMut;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;

use super::output::{Output, OutputItem, OutputKind, OutputPart, OutputStatus, last_status};
use super::response::{Response, ResponseEnd, ResponseFailure, ResponseHead, ResponseUsage};
use crate::json_output::{TypedEvent, write_typed_event};
use crate::openai::logprobs::TokenLogprob;
use crate::sampling::Sampling;
use crate::sequence::FinishReason;
use crate::tools::ToolCallDelta;

/// Writes the events of one response. Each method writes server-sent events at the end of `out`.
///
/// The first part of an item opens it; the first part of another item closes it.
#[derive(Debug)]
pub struct ResponseEventWriter {
    head: ResponseHead,
    output: Output,
    numbers: EventNumbers,
}

/// Numbers the events.
#[derive(Debug, Default)]
struct EventNumbers {
    n_written: u64,
}

#[derive(Serialize, JsonSchema)]
#[serde(tag = "type")]
enum ResponseEvent<'a> {
    #[serde(rename = "response.created")]
    Created { response: &'a Response },
    #[serde(rename = "response.in_progress")]
    InProgress { response: &'a Response },
    #[serde(rename = "response.output_item.added")]
    ItemAdded { output_index: usize, item: &'a OutputItem },
    #[serde(rename = "response.content_part.added")]
    PartAdded { item_id: &'a str, output_index: usize, content_index: usize, part: &'a OutputPart },
    #[serde(rename = "response.output_text.delta")]
    TextDelta {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        delta: &'a str,
        logprobs: &'a [TokenLogprob],
    },
    #[serde(rename = "response.output_text.done")]
    TextDone {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        text: &'a str,
        logprobs: &'a [TokenLogprob],
    },
    #[serde(rename = "response.reasoning_text.delta")]
    ReasoningDelta { item_id: &'a str, output_index: usize, content_index: usize, delta: &'a str },
    #[serde(rename = "response.reasoning_text.done")]
    ReasoningDone { item_id: &'a str, output_index: usize, content_index: usize, text: &'a str },
    #[serde(rename = "response.refusal.delta")]
    RefusalDelta { item_id: &'a str, output_index: usize, content_index: usize, delta: &'a str },
    #[serde(rename = "response.refusal.done")]
    RefusalDone { item_id: &'a str, output_index: usize, content_index: usize, refusal: &'a str },
    #[serde(rename = "response.content_part.done")]
    PartDone { item_id: &'a str, output_index: usize, content_index: usize, part: &'a OutputPart },
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta { item_id: &'a str, output_index: usize, delta: &'a str },
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone { item_id: &'a str, output_index: usize, name: &'a str, arguments: &'a str },
    #[serde(rename = "response.custom_tool_call_input.delta")]
    InputDelta { item_id: &'a str, output_index: usize, delta: &'a str },
    #[serde(rename = "response.custom_tool_call_input.done")]
    InputDone { item_id: &'a str, output_index: usize, input: &'a str },
    #[serde(rename = "response.output_item.done")]
    ItemDone { output_index: usize, item: &'a OutputItem },
    #[serde(rename = "response.completed")]
    Completed { response: &'a Response },
    #[serde(rename = "response.incomplete")]
    Incomplete { response: &'a Response },
    #[serde(rename = "response.failed")]
    Failed { response: &'a Response },
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "NumberedResponseEvent")]
struct Numbered<'a> {
    #[serde(flatten)]
    event: &'a ResponseEvent<'a>,
    sequence_number: u64,
}

impl TypedEvent for Numbered<'_> {
    fn name(&self) -> &'static str {
        match self.event {
            ResponseEvent::Created { .. } => "response.created",
            ResponseEvent::InProgress { .. } => "response.in_progress",
            ResponseEvent::ItemAdded { .. } => "response.output_item.added",
            ResponseEvent::PartAdded { .. } => "response.content_part.added",
            ResponseEvent::TextDelta { .. } => "response.output_text.delta",
            ResponseEvent::TextDone { .. } => "response.output_text.done",
            ResponseEvent::ReasoningDelta { .. } => "response.reasoning_text.delta",
            ResponseEvent::ReasoningDone { .. } => "response.reasoning_text.done",
            ResponseEvent::RefusalDelta { .. } => "response.refusal.delta",
            ResponseEvent::RefusalDone { .. } => "response.refusal.done",
            ResponseEvent::PartDone { .. } => "response.content_part.done",
            ResponseEvent::ArgumentsDelta { .. } => "response.function_call_arguments.delta",
            ResponseEvent::ArgumentsDone { .. } => "response.function_call_arguments.done",
            ResponseEvent::InputDelta { .. } => "response.custom_tool_call_input.delta",
            ResponseEvent::InputDone { .. } => "response.custom_tool_call_input.done",
            ResponseEvent::ItemDone { .. } => "response.output_item.done",
            ResponseEvent::Completed { .. } => "response.completed",
            ResponseEvent::Incomplete { .. } => "response.incomplete",
            ResponseEvent::Failed { .. } => "response.failed",
        }
    }
}

impl ResponseEventWriter {
    /// Returns the schema of one event's data.
    pub fn schema(generator: &mut SchemaGenerator) -> Schema {
        generator.subschema_for::<Numbered<'_>>()
    }

    /// Creates a writer for the response with this head.
    pub fn new(head: ResponseHead) -> Self {
        let output = head.no_output();
        ResponseEventWriter { head, output, numbers: EventNumbers::default() }
    }

    /// Sets the sampling that is in effect. Call it before any event is written.
    pub fn samples_with(&mut self, sampling: &Sampling) {
        self.head.echo.samples_with(sampling);
    }

    /// Writes the first two events.
    pub fn created(&mut self, out: &mut BytesMut) {
        let response = self.head.in_progress();
        self.numbers.write(out, &ResponseEvent::Created { response: &response });
        self.numbers.write(out, &ResponseEvent::InProgress { response: &response });
    }

    /// Writes more text, with the log-probabilities of its tokens if requested.
    pub fn text(&mut self, out: &mut BytesMut, delta: &str, logprobs: &[TokenLogprob]) {
        let is_new = !self.output.is_in(OutputKind::Message);
        if delta.is_empty() && (logprobs.is_empty() || is_new) {
            return;
        }
        self.add(out, OutputKind::Message, |output| output.text(delta, logprobs));
        let (output_index, item_id) = self.output.place();
        let event = ResponseEvent::TextDelta { item_id, output_index, content_index: 0, delta, logprobs };
        self.numbers.write(out, &event);
    }

    /// Writes more of the model's reasoning.
    pub fn reasoning(&mut self, out: &mut BytesMut, delta: &str) {
        self.add(out, OutputKind::Reasoning, |output| output.reasoning(delta));
        let (output_index, item_id) = self.output.place();
        let event = ResponseEvent::ReasoningDelta { item_id, output_index, content_index: 0, delta };
        self.numbers.write(out, &event);
    }

    /// Writes more of a refusal.
    pub fn refusal(&mut self, out: &mut BytesMut, delta: &str) {
        self.add(out, OutputKind::Refusal, |output| output.refusal(delta));
        let (output_index, item_id) = self.output.place();
        let event = ResponseEvent::RefusalDelta { item_id, output_index, content_index: 0, delta };
        self.numbers.write(out, &event);
    }

    /// Adds to an item of this kind, which is opened unless it is open.
    fn add(&mut self, out: &mut BytesMut, kind: OutputKind, add: impl FnOnce(&mut Output)) {
        let is_new = !self.output.is_in(kind);
        if is_new {
            self.close(out, OutputStatus::Completed);
        }
        add(&mut self.output);
        if is_new {
            self.opened(out);
        }
    }

    /// Writes a step of a call.
    pub fn call(&mut self, out: &mut BytesMut, step: &ToolCallDelta) {
        match step {
            ToolCallDelta::Begin { .. } => {
                self.close(out, OutputStatus::Completed);
                self.output.add_to_call(step);
                self.opened(out);
            }
            ToolCallDelta::Arguments { .. } => self.add_to_call(out, step),
            ToolCallDelta::End { .. } => {
                self.add_to_call(out, step);
                self.close(out, OutputStatus::Completed);
            }
        }
    }

    /// Writes what a step adds to the open call.
    fn add_to_call(&mut self, out: &mut BytesMut, step: &ToolCallDelta) {
        let delta = &*self.output.add_to_call(step);
        if delta.is_empty() {
            return;
        }
        let (output_index, item_id) = self.output.place();
        let event = match self.output.items().last() {
            Some(OutputItem::CustomToolCall { .. }) => ResponseEvent::InputDelta { item_id, output_index, delta },
            _ => ResponseEvent::ArgumentsDelta { item_id, output_index, delta },
        };
        self.numbers.write(out, &event);
    }

    /// Closes the open item and ends the response.
    pub fn finished(&mut self, out: &mut BytesMut, end: ResponseEnd, usage: ResponseUsage) {
        if self.output.items().is_empty() {
            self.output.open_message();
            self.opened(out);
        }
        self.close(out, last_status(end.reason));
        let response = &self.head.finished(end, self.output.items().to_vec(), usage);
        let event = match end.reason {
            FinishReason::Stop | FinishReason::ToolCalls | FinishReason::Refusal => {
                ResponseEvent::Completed { response }
            }
            FinishReason::Length | FinishReason::ContentFilter => ResponseEvent::Incomplete { response },
        };
        self.numbers.write(out, &event);
    }

    /// Closes the open item and ends a response that failed.
    pub fn failed(&mut self, out: &mut BytesMut, failure: ResponseFailure) {
        self.close(out, OutputStatus::Incomplete);
        let response = self.head.failed(failure, self.output.items().to_vec());
        self.numbers.write(out, &ResponseEvent::Failed { response: &response });
    }

    /// Writes the events that open the last item.
    fn opened(&mut self, out: &mut BytesMut) {
        let Some(item) = self.output.items().last().map(OutputItem::begun) else { return };
        let (output_index, item_id) = self.output.place();
        self.numbers.write(out, &ResponseEvent::ItemAdded { output_index, item: &item });
        let Some(part) = self.output.kind().map(OutputKind::empty_part) else { return };
        let event = ResponseEvent::PartAdded { item_id, output_index, content_index: 0, part: &part };
        self.numbers.write(out, &event);
    }

    /// Closes the open item, if there is one.
    fn close(&mut self, out: &mut BytesMut, status: OutputStatus) {
        if !self.output.is_open() {
            return;
        }
        self.output.close(status);
        let Some(item) = self.output.items().last() else { return };
        let (output_index, item_id) = self.output.place();
        match item {
            OutputItem::Reasoning { content, .. } | OutputItem::Message { content, .. } => {
                for (content_index, part) in content.iter().enumerate() {
                    let done = match part {
                        OutputPart::OutputText { text, logprobs, .. } => {
                            ResponseEvent::TextDone { item_id, output_index, content_index, text, logprobs }
                        }
                        OutputPart::ReasoningText { text } => {
                            ResponseEvent::ReasoningDone { item_id, output_index, content_index, text }
                        }
                        OutputPart::Refusal { refusal } => {
                            ResponseEvent::RefusalDone { item_id, output_index, content_index, refusal }
                        }
                    };
                    self.numbers.write(out, &done);
                    let done = ResponseEvent::PartDone { item_id, output_index, content_index, part };
                    self.numbers.write(out, &done);
                }
            }
            OutputItem::FunctionCall { name, arguments, .. } => {
                let done = ResponseEvent::ArgumentsDone { item_id, output_index, name, arguments };
                self.numbers.write(out, &done);
            }
            OutputItem::CustomToolCall { input, .. } => {
                self.numbers.write(out, &ResponseEvent::InputDone { item_id, output_index, input });
            }
        }
        self.numbers.write(out, &ResponseEvent::ItemDone { output_index, item });
    }
}

impl EventNumbers {
    /// Writes an event with the next number.
    fn write(&mut self, out: &mut BytesMut, event: &ResponseEvent<'_>) {
        write_typed_event(out, &Numbered { event, sequence_number: self.n_written });
        self.n_written += 1;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;
    use crate::json_output::checked_names;
    use crate::openai::responses::{ClientTools, Echo, ResponsesRequest};
    use crate::sequence::Logprobs;

    fn head() -> ResponseHead {
        let echo = Echo {
            instructions: Some("be brief".into()),
            max_output_tokens: Some(5),
            metadata: Map::new(),
            temperature: 0.5,
            top_p: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.5,
            format: json!({"type": "text"}),
            effort: None,
            parallel_tool_calls: true,
            tool_choice: json!("auto"),
            tools: vec![],
            top_logprobs: 0,
            max_tool_calls: Some(3),
            safety_identifier: Some("s".into()),
            prompt_cache_key: Some("k".into()),
            user: None,
        };
        ResponseHead { stem: "1".into(), created_at: 1, model: "m".into(), echo, tools: ClientTools::default() }
    }

    #[test]
    fn a_transcript_has_openais_order_and_shapes() {
        let mut writer = ResponseEventWriter::new(head());
        let logprob = TokenLogprob::new(b"Hi", &Logprobs { chosen: -0.5, rank: None, top: vec![] });
        let out = &mut BytesMut::new();
        writer.created(out);
        writer.text(out, "Hi", &[logprob]);
        writer.text(out, " \u{1F600}", &[]);
        writer.finished(out, ResponseEnd { reason: FinishReason::Length, at: 2 }, ResponseUsage::new(9, 4, 2, 0));
        let mut writer = ResponseEventWriter::new(head());
        writer.created(out);
        writer.failed(out, ResponseFailure { code: "server_error", message: "The engine stopped.".into() });
        assert_eq!(out, include_str!("../golden/response_events.sse"));
    }

    #[test]
    fn a_response_that_failed_has_what_was_streamed() {
        let mut writer = ResponseEventWriter::new(head());
        let out = &mut BytesMut::new();
        writer.created(out);
        writer.text(out, "Hi", &[]);
        writer.failed(out, ResponseFailure { code: "server_error", message: "The engine stopped.".into() });
        let out = std::str::from_utf8(out).unwrap();
        let last = out.trim_end().rsplit("data: ").next().unwrap();
        let last: serde_json::Value = serde_json::from_str(last).unwrap();
        assert_eq!(last["response"]["status"], "failed");
        let item = &last["response"]["output"][0];
        assert_eq!((&item["status"], &item["content"][0]["text"]), (&json!("incomplete"), &json!("Hi")));
    }

    #[test]
    fn reasoning_text_and_calls_are_items_one_after_the_other() {
        let mut writer = ResponseEventWriter::new(head());
        let begin = |index, id: &str| ToolCallDelta::Begin { index, id: id.into(), name: "f".into() };
        let arguments = |index, fragment: &str| ToolCallDelta::Arguments { index, fragment: fragment.into() };
        let out = &mut BytesMut::new();
        writer.created(out);
        writer.reasoning(out, "h");
        writer.reasoning(out, "m");
        writer.text(out, "So", &[]);
        for step in [
            begin(0, "call_1"),
            arguments(0, "{\"a\":"),
            arguments(0, "1}"),
            ToolCallDelta::End { index: 0 },
            begin(1, "call_2"),
            arguments(1, "{}"),
            ToolCallDelta::End { index: 1 },
        ] {
            writer.call(out, &step);
        }
        writer.finished(out, ResponseEnd { reason: FinishReason::ToolCalls, at: 2 }, ResponseUsage::new(9, 4, 20, 3));
        assert_eq!(out, include_str!("../golden/response_calls.sse"));
    }

    #[test]
    fn calls_have_the_clients_names_and_custom_tools_get_their_input() {
        let body = json!({"model": "m", "input": "hi", "tools": [{"type": "custom", "name": "patch"},
            {"type": "namespace", "name": "mcp__a", "tools": [{"type": "function", "name": "read"}]}]});
        let request = ResponsesRequest::parse(body.to_string().as_bytes(), 7).unwrap();
        let mut writer = ResponseEventWriter::new(ResponseHead { tools: request.tools, ..head() });
        let begin = |index, name: &str| ToolCallDelta::Begin { index, id: format!("call_{index}"), name: name.into() };
        let arguments = |index, fragment: &str| ToolCallDelta::Arguments { index, fragment: fragment.into() };
        let out = &mut BytesMut::new();
        for step in [
            begin(0, "mcp__a__read"),
            arguments(0, "{}"),
            ToolCallDelta::End { index: 0 },
            begin(1, "patch"),
            arguments(1, "{\"inp"),
            arguments(1, "ut\": \"a\\"),
            arguments(1, "nb\"}"),
            ToolCallDelta::End { index: 1 },
            begin(2, "patch"),
            arguments(2, "{\"other\": \"x\"}"),
            ToolCallDelta::End { index: 2 },
        ] {
            writer.call(out, &step);
        }
        assert_eq!(out, include_str!("../golden/response_custom_calls.sse"));
    }

    #[test]
    fn every_event_is_named_after_its_type() {
        let transcripts = concat!(
            include_str!("../golden/response_events.sse"),
            include_str!("../golden/response_calls.sse"),
            include_str!("../golden/response_custom_calls.sse")
        );
        let names = checked_names(transcripts);
        let expected = [
            "response.completed",
            "response.content_part.added",
            "response.content_part.done",
            "response.created",
            "response.custom_tool_call_input.delta",
            "response.custom_tool_call_input.done",
            "response.failed",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.in_progress",
            "response.incomplete",
            "response.output_item.added",
            "response.output_item.done",
            "response.output_text.delta",
            "response.output_text.done",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
        ];
        assert!(names.iter().eq(expected), "{names:?}");
    }

    #[test]
    fn what_a_limit_cuts_off_is_incomplete_and_what_came_before_is_not() {
        let mut output = Output::new("1".into(), ClientTools::default());
        output.reasoning("hm");
        output.text("", &[]);
        output.call(&ToolCallDelta::Begin { index: 0, id: "call_1".into(), name: "f".into() });
        output.call(&ToolCallDelta::Arguments { index: 0, fragment: "{".into() });
        output.finish(FinishReason::Length);
        let status: Vec<_> =
            output.items().iter().map(|item| serde_json::to_value(item).unwrap()["status"].clone()).collect();
        assert_eq!(status, ["completed", "incomplete"]);
    }
}
