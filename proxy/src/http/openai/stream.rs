//! Writes request steps as chunk events, in the order that clients rely on. First comes the opening of every choice, by index
//! (an SDK helper indexes its list by it), then text, one end per choice, the usage if requested, `[DONE]`.

use std::slice;

use baton_reply::TokenLogprobs;
use baton_schemas::json_output::{SharedFields, TextEvent, write_event};
use baton_schemas::openai::ErrorEnvelope;
use baton_schemas::openai::chat_response::ChunkStep;
use baton_schemas::openai::usage::TimingsReport;
use bytes::BytesMut;
use serde::Serialize;

use super::choices::Choices;
use super::{ReplyShape, timings, usage};
use crate::http::HttpFailure;
use crate::http::reply::event_stream::write_comment;
use crate::http::reply::reply_totals::ReplyTotals;
use crate::http::reply::streamed::StreamWriter;
use crate::reply_event::{EventKind, ReplyEvent};

/// Writes the stream of one reply.
pub(super) struct ChunkWriter<C> {
    shape: ReplyShape,
    head: SharedFields,
    choices: C,
    totals: ReplyTotals,
    /// A chunk with nothing but text, of a reply with one choice. `None` before the first one.
    text_event: Option<TextEvent>,
    is_open: bool,
    n_unfinished: u32,
}

impl<C: Choices> ChunkWriter<C> {
    pub(super) fn new(shape: ReplyShape, choices: C) -> Self {
        let head = SharedFields::of(&shape.head);
        let totals = ReplyTotals::new(shape.choices_per_prompt);
        let n_unfinished = shape.n_choices;
        ChunkWriter { shape, head, choices, totals, text_event: None, is_open: false, n_unfinished }
    }

    fn write_openings(&mut self, out: &mut BytesMut) {
        if !std::mem::replace(&mut self.is_open, true) {
            for index in 0..self.shape.n_choices {
                self.write_choice(out, self.choices.opening(index), None);
            }
        }
    }

    fn write_text(&mut self, out: &mut BytesMut, index: u32, text: &str, tokens: &[TokenLogprobs]) {
        let is_plain = self.shape.n_choices == 1 && tokens.is_empty();
        if is_plain && self.text_event.is_none() {
            let mut examples = [BytesMut::new(), BytesMut::new()];
            for (out, text) in examples.iter_mut().zip(TextEvent::EXAMPLES) {
                let delta = self.choices.delta(index, text, &[]);
                write_choice(&self.shape, &self.head, out, &delta, None);
            }
            self.text_event = TextEvent::of(examples.each_ref().map(|event| &event[..]));
        }
        match &self.text_event {
            Some(event) if is_plain => event.write(out, text),
            _ => {
                let delta = self.choices.delta(index, text, tokens);
                write_choice(&self.shape, &self.head, out, &delta, None);
            }
        }
    }

    fn write_choice(&self, out: &mut BytesMut, choice: Option<C::Delta<'_>>, timings: Option<TimingsReport>) {
        if let Some(choice) = choice {
            write_choice(&self.shape, &self.head, out, &choice, timings);
        }
    }
}

fn write_choice(
    shape: &ReplyShape,
    head: &SharedFields,
    out: &mut BytesMut,
    choice: &impl Serialize,
    timings: Option<TimingsReport>,
) {
    let usage = shape.include_usage.then_some(None);
    head.write_event(out, &ChunkStep { choices: slice::from_ref(choice), usage, timings });
}

impl<C: Choices> StreamWriter for ChunkWriter<C> {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn write(&mut self, out: &mut BytesMut, event: &ReplyEvent) {
        self.totals.record(event);
        let ReplyEvent { choice, kind } = event;
        match kind {
            EventKind::Text { text, tokens } => {
                self.write_openings(out);
                if !text.is_empty() || !tokens.is_empty() {
                    self.write_text(out, *choice, text, tokens);
                }
            }
            EventKind::Prompt { tokens } => {
                self.write_openings(out);
                for index in *choice..choice.saturating_add(self.shape.choices_per_prompt) {
                    let delta = self.choices.prompt(index, tokens);
                    if let Some(delta) = delta {
                        write_choice(&self.shape, &self.head, out, &delta, None);
                    }
                }
            }
            EventKind::Reasoning { text } => {
                self.write_openings(out);
                self.write_choice(out, self.choices.reasoning(*choice, text), None);
            }
            EventKind::Refusal { text } => {
                self.write_openings(out);
                self.write_choice(out, self.choices.refusal(*choice, text), None);
            }
            EventKind::ToolCall { call } => {
                self.write_openings(out);
                self.write_choice(out, self.choices.call(*choice, call), None);
            }
            EventKind::Finished { reason, .. } => {
                self.write_openings(out);
                self.n_unfinished = self.n_unfinished.saturating_sub(1);
                let is_last_chunk = self.n_unfinished == 0 && !self.shape.include_usage;
                let timings = is_last_chunk.then(|| timings(&self.totals));
                self.write_choice(out, Some(self.choices.finish(*choice, *reason)), timings);
            }
            _ => {}
        }
    }

    fn finish(&mut self, out: &mut BytesMut) {
        if self.shape.include_usage {
            let choices: &[C::Delta<'_>] = &[];
            let (usage, timings) = (usage(&self.totals), timings(&self.totals));
            self.head.write_event(out, &ChunkStep { choices, usage: Some(Some(usage)), timings: Some(timings) });
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    /// Writes no `[DONE]`: a client that only looks for it must not take a failure for a success.
    fn fail(&mut self, out: &mut BytesMut, failure: HttpFailure) {
        write_event(out, &ErrorEnvelope { error: failure.error });
    }

    /// The heartbeat is a comment, which every SSE parser skips.
    fn heartbeat(&self, out: &mut BytesMut, place: Option<usize>) {
        write_comment(out, place);
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::FinishReason;
    use baton_schemas::openai::chat_response::ReplyHead;
    use baton_schemas::sequence::{CachedTokens, Timings};
    use serde_json::Value;

    use super::*;
    use crate::http::openai::chat_choices::ChatChoices;
    use crate::http::openai::text_choices::{TextChoices, TextForm};

    fn text(choice: u32, text: &str) -> ReplyEvent {
        EventKind::Text { text: text.into(), tokens: vec![] }.of(choice)
    }

    fn finished(choice: u32) -> ReplyEvent {
        let timings = Timings { prompt_n: 4, prompt_ms: 2.0, predicted_n: 3, predicted_ms: 6.0, ..Timings::default() };
        EventKind::Finished { reason: FinishReason::Stop, stop: None, n_completion: 3, n_reasoning: 0, timings }
            .of(choice)
    }

    /// Each event as `index:role`, `index+text`, `index=reason`, `usage` or `[DONE]`.
    fn check(n: u32, include_usage: bool, events: &[ReplyEvent], expected: &str) {
        let head = ReplyHead {
            id: "chatcmpl-1".into(),
            object: ReplyHead::CHUNK,
            created: 1,
            model: "m".into(),
            system_fingerprint: "f".into(),
        };
        let shape = ReplyShape { head, n_choices: n, choices_per_prompt: n, include_usage, is_streamed: true };
        let mut writer = ChunkWriter::new(shape, ChatChoices { logprobs: false, has_functions: false });
        let mut stream = BytesMut::new();
        events.iter().for_each(|event| writer.write(&mut stream, event));
        writer.finish(&mut stream);
        let stream = String::from_utf8(stream.into()).unwrap();
        let events: Vec<String> = stream.split_terminator("\n\n").map(summary).collect();
        assert_eq!(events.join(" "), expected);
    }

    fn summary(event: &str) -> String {
        let Ok(chunk) = serde_json::from_str::<Value>(&event["data: ".len()..]) else { return event[6..].into() };
        let Some(choice) = chunk["choices"].get(0) else {
            let usage = &chunk["usage"];
            return format!(
                "usage:{}+{} timings:{}",
                usage["prompt_tokens"], usage["completion_tokens"], chunk["timings"]["predicted_n"]
            );
        };
        let index = &choice["index"];
        let delta = &choice["delta"];
        if let Some(reason) = choice["finish_reason"].as_str() {
            let timings = if chunk["timings"].is_object() { "+timings" } else { "" };
            return format!("{index}={reason}{timings}");
        }
        match delta["role"].as_str() {
            Some(role) => format!("{index}:{role}"),
            None => format!("{index}+{}", delta["content"].as_str().unwrap()),
        }
    }

    #[test]
    fn roles_come_first_by_index_then_text_then_ends() {
        let accepted =
            || EventKind::Accepted { n_prompt: 5, route: "direct".into(), sampling: Default::default() }.of(0);
        let started = |choice| EventKind::Started(CachedTokens::in_slot(1)).of(choice);
        check(
            1,
            false,
            &[accepted(), started(0), text(0, "a"), text(0, "b"), finished(0)],
            "0:assistant 0+a 0+b 0=stop+timings [DONE]",
        );
        check(1, false, &[accepted(), started(0), finished(0)], "0:assistant 0=stop+timings [DONE]");
        check(
            2,
            true,
            &[accepted(), started(1), text(1, "x"), started(0), finished(1), text(0, ""), text(0, "y"), finished(0)],
            "0:assistant 1:assistant 1+x 1=stop 0+y 0=stop usage:5+6 timings:6 [DONE]",
        );
    }

    #[test]
    fn a_plain_completion_has_no_roles_and_may_echo_its_prompts() {
        let texts = |echoes: Vec<String>| {
            let head = super::super::head("cmpl", ReplyHead::TEXT, "m".into());
            let shape =
                ReplyShape { head, n_choices: 2, choices_per_prompt: 1, include_usage: false, is_streamed: true };
            let mut writer = ChunkWriter::new(
                shape,
                TextChoices::new(2, 1, TextForm { top_logprobs: None, echoes, prompt_logprobs: None }),
            );
            let events = [text(1, "b"), text(0, "a"), finished(0), finished(1)];
            let mut stream = BytesMut::new();
            events.iter().for_each(|event| writer.write(&mut stream, event));
            let stream = String::from_utf8(stream.into()).unwrap();
            let chunks = stream.split_terminator("\n\n").map(|event| {
                let choice = serde_json::from_str::<Value>(&event["data: ".len()..]).unwrap()["choices"][0].clone();
                format!("{}{}", choice["index"], choice["finish_reason"].as_str().or(choice["text"].as_str()).unwrap())
            });
            chunks.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(texts(vec![]), "1b 0a 0stop 1stop");
        assert_eq!(texts(vec!["P".into(), "Q".into()]), "0P 1Q 1b 0a 0stop 1stop");
    }
}
