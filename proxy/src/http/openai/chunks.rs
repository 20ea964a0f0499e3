//! Steps → the text of chunk events, in the order that clients rely on: every choice's role first, by index (an SDK
//! helper indexes its list by it), then text, one end a choice, the usage if asked for, `[DONE]`.

use baton_schemas::openai::chat_response::{ChatChunk, ChunkChoice};
use baton_schemas::openai::usage::{TimingsReport, Usage};
use serde::Serialize;

use super::ReplyShape;
use super::tally::Tally;
use crate::generate::Event;
use crate::http::steps::Step;

/// Writes one stream.
pub(super) struct ChunkWriter {
    shape: ReplyShape,
    tally: Tally,
    roles_sent: bool,
    n_open: u32,
}

impl ChunkWriter {
    pub(super) fn new(shape: ReplyShape) -> Self {
        let n_open = shape.n;
        ChunkWriter { shape, tally: Tally::default(), roles_sent: false, n_open }
    }

    /// The events of a step; often one, sometimes none.
    pub(super) fn write(&mut self, step: &Step) -> String {
        self.tally.record(step);
        let mut out = String::new();
        match step {
            Step::Accepted { .. } | Step::Event(Event::Started { .. } | Event::Handoff { .. }) => {}
            Step::Event(Event::Text { choice, text, tokens }) => {
                self.write_roles(&mut out);
                if !text.is_empty() || !tokens.is_empty() {
                    let logprobs = self.shape.logprobs_of(tokens);
                    self.write_choice(&mut out, ChunkChoice::content(*choice, text.clone(), logprobs), None);
                }
            }
            Step::Event(Event::Finished { choice, reason, .. }) => {
                self.write_roles(&mut out);
                self.n_open = self.n_open.saturating_sub(1);
                let is_last_chunk = self.n_open == 0 && !self.shape.include_usage;
                let timings = is_last_chunk.then(|| self.tally.timings());
                self.write_choice(&mut out, ChunkChoice::finish(*choice, *reason), timings);
            }
        }
        out
    }

    /// What follows the last step of a success.
    pub(super) fn finish(&self) -> String {
        let mut out = String::new();
        if self.shape.include_usage {
            let (usage, timings) = (self.tally.usage(), self.tally.timings());
            out += &self.chunk(Vec::new(), Some(usage), Some(timings));
        }
        out + "data: [DONE]\n\n"
    }

    fn write_roles(&mut self, out: &mut String) {
        if !std::mem::replace(&mut self.roles_sent, true) {
            for index in 0..self.shape.n {
                self.write_choice(out, ChunkChoice::role(index), None);
            }
        }
    }

    fn write_choice(&self, out: &mut String, choice: ChunkChoice, timings: Option<TimingsReport>) {
        *out += &self.chunk(vec![choice], None, timings);
    }

    fn chunk(&self, choices: Vec<ChunkChoice>, usage: Option<Usage>, timings: Option<TimingsReport>) -> String {
        let usage = self.shape.include_usage.then_some(usage);
        event(&ChatChunk { head: &self.shape.head, choices, usage, timings })
    }
}

/// One event with this JSON. It has no line break of its own, since JSON escapes them.
pub(super) fn event(data: &impl Serialize) -> String {
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

    fn text(choice: u32, text: &str) -> Step {
        Step::Event(Event::Text { choice, text: text.into(), tokens: vec![] })
    }

    fn finished(choice: u32) -> Step {
        let timings = Timings { prompt_n: 4, prompt_ms: 2.0, predicted_n: 3, predicted_ms: 6.0, ..Timings::default() };
        Step::Event(Event::Finished { choice, reason: FinishReason::Stop, n_completion: 3, timings })
    }

    /// Each event as `index:role`, `index+text`, `index=reason`, `usage` or `[DONE]`.
    fn check(n: u32, include_usage: bool, steps: &[Step], expected: &str) {
        let head = ReplyHead {
            id: "chatcmpl-1".into(),
            object: ReplyHead::CHUNK,
            created: 1,
            model: "m".into(),
            system_fingerprint: "f".into(),
        };
        let mut writer = ChunkWriter::new(ReplyShape { head, n, logprobs: false, include_usage });
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
        let (index, delta) = (&choice["index"], &choice["delta"]);
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
        let accepted = || Step::Accepted { n_prompt: 5, route: "direct".into() };
        let started = |choice| Step::Event(Event::Started { choice, n_cached: 1 });
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
}
