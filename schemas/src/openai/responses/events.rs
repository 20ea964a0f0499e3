//! The events of a streamed response. Each has a sequence number.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;

use super::output::{Output, OutputItem, OutputKind, OutputPart, OutputStatus, last_status};
use super::response::{Response, ResponseEnd, ResponseFailure, ResponseHead, ResponseUsage};
use crate::openai::logprobs::TokenLogprob;
use crate::sampling::Sampling;
use crate::sequence::FinishReason;
use crate::server_sent_event::{TypedEvent, typed_event};
use crate::tools::ToolCallDelta;

/// Writes the events of one response. Each method returns server-sent events.
///
/// The first part of an item opens it; the first part of another item closes it.
#[derive(Debug)]
pub struct ResponseEventWriter {
    head: ResponseHead,
    output: Output,
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
    #[serde(rename = "response.content_part.done")]
    PartDone { item_id: &'a str, output_index: usize, content_index: usize, part: &'a OutputPart },
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta { item_id: &'a str, output_index: usize, delta: &'a str },
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone { item_id: &'a str, output_index: usize, name: &'a str, arguments: &'a str },
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
            ResponseEvent::PartDone { .. } => "response.content_part.done",
            ResponseEvent::ArgumentsDelta { .. } => "response.function_call_arguments.delta",
            ResponseEvent::ArgumentsDone { .. } => "response.function_call_arguments.done",
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
        ResponseEventWriter { head, output, n_written: 0 }
    }

    /// Sets the sampling that is in effect. Call it before any event is written.
    pub fn samples_with(&mut self, sampling: &Sampling) {
        self.head.echo.samples_with(sampling);
    }

    /// Writes the first two events.
    pub fn created(&mut self) -> String {
        let response = self.head.in_progress();
        self.write(&ResponseEvent::Created { response: &response })
            + &self.write(&ResponseEvent::InProgress { response: &response })
    }

    /// Writes more text, with the log-probabilities of its tokens if requested.
    pub fn text(&mut self, delta: &str, logprobs: &[TokenLogprob]) -> String {
        if delta.is_empty() && (logprobs.is_empty() || !self.output.is_in(OutputKind::Message)) {
            return String::new();
        }
        let is_new = !self.output.is_in(OutputKind::Message);
        let closing = if is_new { self.close(OutputStatus::Completed) } else { String::new() };
        self.output.text(delta, logprobs);
        let opening = if is_new { self.opened() } else { String::new() };
        let (output_index, item_id) = self.place();
        closing
            + &opening
            + &self.write(&ResponseEvent::TextDelta {
                item_id: &item_id,
                output_index,
                content_index: 0,
                delta,
                logprobs,
            })
    }

    /// Writes more of the model's reasoning.
    pub fn reasoning(&mut self, delta: &str) -> String {
        let is_new = !self.output.is_in(OutputKind::Reasoning);
        let closing = if is_new { self.close(OutputStatus::Completed) } else { String::new() };
        self.output.reasoning(delta);
        let opening = if is_new { self.opened() } else { String::new() };
        let (output_index, item_id) = self.place();
        let event = ResponseEvent::ReasoningDelta { item_id: &item_id, output_index, content_index: 0, delta };
        closing + &opening + &self.write(&event)
    }

    /// Writes a step of a call.
    pub fn call(&mut self, step: &ToolCallDelta) -> String {
        match step {
            ToolCallDelta::Begin { .. } => {
                let closing = self.close(OutputStatus::Completed);
                self.output.call(step);
                closing + &self.opened()
            }
            ToolCallDelta::Arguments { fragment, .. } => {
                self.output.call(step);
                let (output_index, item_id) = self.place();
                self.write(&ResponseEvent::ArgumentsDelta { item_id: &item_id, output_index, delta: fragment })
            }
            ToolCallDelta::End { .. } => self.close(OutputStatus::Completed),
        }
    }

    /// Closes the open item and ends the response.
    pub fn finished(&mut self, end: ResponseEnd, usage: ResponseUsage) -> String {
        let mut events = String::new();
        if self.output.items().is_empty() {
            self.output.open_message();
            events += &self.opened();
        }
        events += &self.close(last_status(end.reason));
        let response = &self.head.finished(end, self.output.items().to_vec(), usage);
        events
            + &match end.reason {
                FinishReason::Stop | FinishReason::ToolCalls => self.write(&ResponseEvent::Completed { response }),
                FinishReason::Length => self.write(&ResponseEvent::Incomplete { response }),
            }
    }

    /// Ends a response that failed.
    pub fn failed(&mut self, failure: ResponseFailure) -> String {
        let response = self.head.failed(failure);
        self.write(&ResponseEvent::Failed { response: &response })
    }

    /// Writes the events that open the last item.
    fn opened(&mut self) -> String {
        let Some(item) = self.output.items().last().map(OutputItem::begun) else { return String::new() };
        let (output_index, item_id) = self.place();
        let added = self.write(&ResponseEvent::ItemAdded { output_index, item: &item });
        let part = match item {
            OutputItem::Reasoning { .. } => OutputKind::Reasoning.empty_part(),
            OutputItem::Message { .. } => OutputKind::Message.empty_part(),
            OutputItem::FunctionCall { .. } => return added,
        };
        added
            + &self.write(&ResponseEvent::PartAdded { item_id: &item_id, output_index, content_index: 0, part: &part })
    }

    /// Closes the open item, if there is one.
    fn close(&mut self, status: OutputStatus) -> String {
        if !self.output.is_open() {
            return String::new();
        }
        self.output.close(status);
        let Some(item) = self.output.items().last().cloned() else { return String::new() };
        let (output_index, item_id) = self.place();
        let item_id = &*item_id;
        let mut events = String::new();
        match &item {
            OutputItem::Reasoning { content, .. } | OutputItem::Message { content, .. } => {
                for (content_index, part) in content.iter().enumerate() {
                    events += &self.write(&match part {
                        OutputPart::OutputText { text, logprobs, .. } => {
                            ResponseEvent::TextDone { item_id, output_index, content_index, text, logprobs }
                        }
                        OutputPart::ReasoningText { text } => {
                            ResponseEvent::ReasoningDone { item_id, output_index, content_index, text }
                        }
                    });
                    events += &self.write(&ResponseEvent::PartDone { item_id, output_index, content_index, part });
                }
            }
            OutputItem::FunctionCall { name, arguments, .. } => {
                events += &self.write(&ResponseEvent::ArgumentsDone { item_id, output_index, name, arguments });
            }
        }
        events + &self.write(&ResponseEvent::ItemDone { output_index, item: &item })
    }

    /// Returns the index and the id of the last item.
    fn place(&self) -> (usize, String) {
        let items = self.output.items();
        (items.len().saturating_sub(1), items.last().map(|item| item.id().to_owned()).unwrap_or_default())
    }

    fn write(&mut self, event: &ResponseEvent<'_>) -> String {
        let written = typed_event(&Numbered { event, sequence_number: self.n_written });
        self.n_written += 1;
        written
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;
    use crate::openai::responses::Echo;
    use crate::sequence::Logprobs;
    use crate::server_sent_event::checked_names;

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
        ResponseHead { stem: "1".into(), created_at: 1, model: "m".into(), echo }
    }

    #[test]
    fn a_transcript_has_openais_order_and_shapes() {
        let mut writer = ResponseEventWriter::new(head());
        let logprob = TokenLogprob::new(b"Hi", &Logprobs { chosen: -0.5, top: vec![] });
        let mut transcript = writer.created() + &writer.text("Hi", &[logprob]);
        transcript += &writer.text(" \u{1F600}", &[]);
        transcript +=
            &writer.finished(ResponseEnd { reason: FinishReason::Length, at: 2 }, ResponseUsage::new(9, 4, 2, 0));
        let mut writer = ResponseEventWriter::new(head());
        transcript += &writer.created();
        transcript += &writer.failed(ResponseFailure { code: "server_error", message: "The engine stopped.".into() });
        assert_eq!(transcript, include_str!("../golden/response_events.sse"));
    }

    #[test]
    fn reasoning_text_and_calls_are_items_one_after_the_other() {
        let mut writer = ResponseEventWriter::new(head());
        let begin = |index, id: &str| ToolCallDelta::Begin { index, id: id.into(), name: "f".into() };
        let arguments = |index, fragment: &str| ToolCallDelta::Arguments { index, fragment: fragment.into() };
        let mut transcript =
            writer.created() + &writer.reasoning("h") + &writer.reasoning("m") + &writer.text("So", &[]);
        for step in [
            begin(0, "call_1"),
            arguments(0, "{\"a\":"),
            arguments(0, "1}"),
            ToolCallDelta::End { index: 0 },
            begin(1, "call_2"),
            arguments(1, "{}"),
            ToolCallDelta::End { index: 1 },
        ] {
            transcript += &writer.call(&step);
        }
        transcript +=
            &writer.finished(ResponseEnd { reason: FinishReason::ToolCalls, at: 2 }, ResponseUsage::new(9, 4, 20, 3));
        assert_eq!(transcript, include_str!("../golden/response_calls.sse"));
    }

    #[test]
    fn every_event_is_named_after_its_type() {
        let transcripts =
            concat!(include_str!("../golden/response_events.sse"), include_str!("../golden/response_calls.sse"));
        let names = checked_names(transcripts);
        let expected = [
            "response.completed",
            "response.content_part.added",
            "response.content_part.done",
            "response.created",
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
        let mut output = Output::new("1".into());
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
