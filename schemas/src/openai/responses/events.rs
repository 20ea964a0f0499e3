//! The events of a streamed response, each with a number that grows by one.
//!
//! All of a response's text is the one part of its one item, so both have index 0.

use serde::Serialize;

use super::response::{Failure, Head, Item, Part, Response, ResponseUsage};
use crate::openai::logprobs::TokenLogprob;
use crate::sequence::FinishReason;

/// Writes one response's events, in the order of its methods; each gives server-sent events.
#[derive(Debug)]
pub struct EventWriter {
    head: Head,
    n_written: u64,
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum Event<'a> {
    #[serde(rename = "response.created")]
    Created { response: &'a Response },
    #[serde(rename = "response.in_progress")]
    InProgress { response: &'a Response },
    #[serde(rename = "response.output_item.added")]
    ItemAdded { output_index: u32, item: &'a Item },
    #[serde(rename = "response.content_part.added")]
    PartAdded { item_id: &'a str, output_index: u32, content_index: u32, part: &'a Part },
    #[serde(rename = "response.output_text.delta")]
    TextDelta { item_id: &'a str, output_index: u32, content_index: u32, delta: &'a str, logprobs: &'a [TokenLogprob] },
    #[serde(rename = "response.output_text.done")]
    TextDone { item_id: &'a str, output_index: u32, content_index: u32, text: &'a str, logprobs: &'a [TokenLogprob] },
    #[serde(rename = "response.content_part.done")]
    PartDone { item_id: &'a str, output_index: u32, content_index: u32, part: &'a Part },
    #[serde(rename = "response.output_item.done")]
    ItemDone { output_index: u32, item: &'a Item },
    #[serde(rename = "response.completed")]
    Completed { response: &'a Response },
    #[serde(rename = "response.incomplete")]
    Incomplete { response: &'a Response },
    #[serde(rename = "response.failed")]
    Failed { response: &'a Response },
}

#[derive(Serialize)]
struct Numbered<'a> {
    #[serde(flatten)]
    event: &'a Event<'a>,
    sequence_number: u64,
}

impl EventWriter {
    /// Of a response with this head.
    pub fn new(head: Head) -> Self {
        EventWriter { head, n_written: 0 }
    }

    /// The first two events.
    pub fn created(&mut self) -> String {
        let response = self.head.in_progress();
        self.write(&Event::Created { response: &response }) + &self.write(&Event::InProgress { response: &response })
    }

    /// The message and its text begin.
    pub fn opened(&mut self) -> String {
        let (item, part, item_id) = (self.head.opened_item(), Part::default(), self.head.item_id.clone());
        self.write(&Event::ItemAdded { output_index: 0, item: &item })
            + &self.write(&Event::PartAdded { item_id: &item_id, output_index: 0, content_index: 0, part: &part })
    }

    /// More text, with the log-probabilities of its tokens if they were asked for.
    pub fn delta(&mut self, delta: &str, logprobs: &[TokenLogprob]) -> String {
        let item_id = self.head.item_id.clone();
        self.write(&Event::TextDelta { item_id: &item_id, output_index: 0, content_index: 0, delta, logprobs })
    }

    /// The end of the text, the message and the response.
    pub fn finished(&mut self, reason: FinishReason, part: Part, usage: ResponseUsage) -> String {
        let (item, item_id) = (self.head.item(reason, part.clone()), self.head.item_id.clone());
        let (output_index, content_index, item_id) = (0, 0, &*item_id);
        let (text, logprobs) = (&*part.text, &*part.logprobs);
        let mut events = self.write(&Event::TextDone { item_id, output_index, content_index, text, logprobs });
        events += &self.write(&Event::PartDone { item_id, output_index, content_index, part: &part });
        events += &self.write(&Event::ItemDone { output_index, item: &item });
        let response = &self.head.finished(reason, part, usage);
        events
            + &match reason {
                FinishReason::Stop | FinishReason::ToolCalls => self.write(&Event::Completed { response }),
                FinishReason::Length => self.write(&Event::Incomplete { response }),
            }
    }

    /// The end of a response that failed.
    pub fn failed(&mut self, failure: Failure) -> String {
        let response = self.head.failed(failure);
        self.write(&Event::Failed { response: &response })
    }

    fn write(&mut self, event: &Event<'_>) -> String {
        let json = serde_json::to_string(&Numbered { event, sequence_number: self.n_written });
        self.n_written += 1;
        let json = json.expect("plain structs with string keys always serialize");
        format!("event: {}\ndata: {json}\n\n", event.name())
    }
}

impl Event<'_> {
    fn name(&self) -> &'static str {
        match self {
            Event::Created { .. } => "response.created",
            Event::InProgress { .. } => "response.in_progress",
            Event::ItemAdded { .. } => "response.output_item.added",
            Event::PartAdded { .. } => "response.content_part.added",
            Event::TextDelta { .. } => "response.output_text.delta",
            Event::TextDone { .. } => "response.output_text.done",
            Event::PartDone { .. } => "response.content_part.done",
            Event::ItemDone { .. } => "response.output_item.done",
            Event::Completed { .. } => "response.completed",
            Event::Incomplete { .. } => "response.incomplete",
            Event::Failed { .. } => "response.failed",
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;
    use crate::openai::responses::Echo;
    use crate::sequence::Logprobs;

    fn head() -> Head {
        let echo = Echo {
            instructions: Some("be brief".into()),
            max_output_tokens: Some(5),
            metadata: Map::new(),
            temperature: 0.5,
            top_p: 1.0,
            format: json!({"type": "text"}),
            effort: None,
            parallel_tool_calls: true,
            top_logprobs: 0,
        };
        let (id, item_id, model) = ("resp_1".into(), "msg_1".into(), "m".into());
        Head { id, item_id, created_at: 1, model, echo }
    }

    #[test]
    fn a_transcript_has_openais_order_and_shapes() {
        let mut writer = EventWriter::new(head());
        let logprob = TokenLogprob::new(b"Hi", &Logprobs { chosen: -0.5, top: vec![] });
        let mut part = Part::default();
        part.text.push_str("Hi \u{1F600}");
        part.logprobs.push(logprob.clone());
        let mut transcript = writer.created() + &writer.opened() + &writer.delta("Hi", &[logprob]);
        transcript += &writer.delta(" \u{1F600}", &[]);
        transcript += &writer.finished(FinishReason::Length, part, ResponseUsage::new(9, 4, 2, 0));
        let mut writer = EventWriter::new(head());
        transcript += &writer.created();
        transcript += &writer.failed(Failure { code: "server_error", message: "The engine stopped.".into() });
        assert_eq!(transcript, include_str!("../golden/response_events.sse"));
    }
}
