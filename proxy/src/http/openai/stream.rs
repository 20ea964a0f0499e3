//! Writes request steps as chunk events, in the order that clients rely on: first the opening of every choice, by index
//! (an SDK helper indexes its list by it), then text, one end per choice, the usage if requested, `[DONE]`.

use baton_schemas::openai::ErrorEnvelope;
use baton_schemas::openai::chat_response::CompletionChunk;
use baton_schemas::openai::usage::{TimingsReport, Usage};
use serde::Serialize;

use super::choices::Choices;
use super::{ReplyShape, timings, usage};
use crate::http::HttpFailure;
use crate::http::event_stream::comment;
use crate::http::reply_totals::ReplyTotals;
use crate::http::request_steps::RequestStep;
use crate::http::streamed::StreamWriter;
use crate::reply_event::{EventKind, ReplyEvent};

/// Writes the stream of one reply.
pub(super) struct ChunkWriter<C> {
    shape: ReplyShape,
    choices: C,
    totals: ReplyTotals,
    is_open: bool,
    n_unfinished: u32,
}

impl<C: Choices> ChunkWriter<C> {
    pub(super) fn new(shape: ReplyShape, choices: C) -> Self {
        let totals = ReplyTotals::new(shape.choices_per_prompt);
        let n_unfinished = shape.n_choices;
        ChunkWriter { shape, choices, totals, is_open: false, n_unfinished }
    }

    fn write_openings(&mut self, out: &mut String) {
        if !std::mem::replace(&mut self.is_open, true) {
            for index in 0..self.shape.n_choices {
                if let Some(opening) = self.choices.opening(index) {
                    self.write_choice(out, opening, None);
                }
            }
        }
    }

    fn write_optional(&self, out: &mut String, choice: Option<C::Delta>) {
        if let Some(choice) = choice {
            self.write_choice(out, choice, None);
        }
    }

    fn write_choice(&self, out: &mut String, choice: C::Delta, timings: Option<TimingsReport>) {
        *out += &self.chunk(vec![choice], None, timings);
    }

    fn chunk(&self, choices: Vec<C::Delta>, usage: Option<Usage>, timings: Option<TimingsReport>) -> String {
        let usage = self.shape.include_usage.then_some(usage);
        event(&CompletionChunk { head: &self.shape.head, choices, usage, timings })
    }
}

impl<C: Choices> StreamWriter for ChunkWriter<C> {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn write(&mut self, step: &RequestStep) -> String {
        self.totals.record(step);
        let mut out = String::new();
        let RequestStep::Event(ReplyEvent { choice, kind }) = step else { return out };
        match kind {
            EventKind::Text { text, tokens } => {
                self.write_openings(&mut out);
                if !text.is_empty() || !tokens.is_empty() {
                    let delta = self.choices.delta(*choice, text, tokens);
                    self.write_choice(&mut out, delta, None);
                }
            }
            EventKind::Reasoning { text } => {
                self.write_openings(&mut out);
                let delta = self.choices.reasoning(*choice, text);
                self.write_optional(&mut out, delta);
            }
            EventKind::ToolCall { call } => {
                self.write_openings(&mut out);
                let delta = self.choices.call(*choice, call);
                self.write_optional(&mut out, delta);
            }
            EventKind::Finished { reason, .. } => {
                self.write_openings(&mut out);
                self.n_unfinished = self.n_unfinished.saturating_sub(1);
                let is_last_chunk = self.n_unfinished == 0 && !self.shape.include_usage;
                let timings = is_last_chunk.then(|| timings(&self.totals));
                self.write_choice(&mut out, self.choices.finish(*choice, *reason), timings);
            }
            _ => {}
        }
        out
    }

    fn finish(&mut self) -> String {
        let mut out = String::new();
        if self.shape.include_usage {
            out += &self.chunk(Vec::new(), Some(usage(&self.totals)), Some(timings(&self.totals)));
        }
        out + "data: [DONE]\n\n"
    }

    /// Writes no `[DONE]`: a client that only looks for it must not take a failure for a success.
    fn fail(&mut self, failure: HttpFailure) -> String {
        event(&ErrorEnvelope { error: failure.error })
    }

    /// The heartbeat is a comment, which every SSE parser skips.
    fn heartbeat(&self, place: Option<usize>) -> String {
        comment(place)
    }
}

/// Writes JSON as one event. JSON escapes line breaks, so it contains none.
fn event(data: &impl Serialize) -> String {
    let json = serde_json::to_string(data).expect("plain structs with string keys always serialize");
    format!("data: {json}\n\n")
}

#[cfg(test)]
mod tests {
    use baton_schemas::FinishReason;
    use baton_schemas::openai::chat_response::ReplyHead;
    use baton_schemas::sequence::Timings;
    use serde_json::Value;

    use super::*;
    use crate::http::openai::chat_choices::ChatChoices;
    use crate::http::openai::text_choices::TextChoices;

    fn text(choice: u32, text: &str) -> RequestStep {
        RequestStep::Event(EventKind::Text { text: text.into(), tokens: vec![] }.of(choice))
    }

    fn finished(choice: u32) -> RequestStep {
        let timings = Timings { prompt_n: 4, prompt_ms: 2.0, predicted_n: 3, predicted_ms: 6.0, ..Timings::default() };
        RequestStep::Event(
            EventKind::Finished { reason: FinishReason::Stop, stop: None, n_completion: 3, n_reasoning: 0, timings }
                .of(choice),
        )
    }

    /// Each event as `index:role`, `index+text`, `index=reason`, `usage` or `[DONE]`.
    fn check(n: u32, include_usage: bool, steps: &[RequestStep], expected: &str) {
        let head = ReplyHead {
            id: "chatcmpl-1".into(),
            object: ReplyHead::CHUNK,
            created: 1,
            model: "m".into(),
            system_fingerprint: "f".into(),
        };
        let shape = ReplyShape { head, n_choices: n, choices_per_prompt: n, include_usage, stream: true };
        let mut writer = ChunkWriter::new(shape, ChatChoices { logprobs: false, has_functions: false });
        let mut stream: String = steps.iter().map(|step| writer.write(step)).collect();
        stream += &writer.finish();
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
        let accepted = || RequestStep::Accepted { n_prompt: 5, route: "direct".into(), sampling: Default::default() };
        let started = |choice| RequestStep::Event(EventKind::Started { n_cached: 1 }.of(choice));
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
            let shape = ReplyShape { head, n_choices: 2, choices_per_prompt: 1, include_usage: false, stream: true };
            let mut writer = ChunkWriter::new(shape, TextChoices::new(2, 1, false, echoes));
            let steps = [text(1, "b"), text(0, "a"), finished(0), finished(1)];
            let stream: String = steps.iter().map(|step| writer.write(step)).collect();
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
