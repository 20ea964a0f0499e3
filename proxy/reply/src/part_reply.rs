//! One choice's reply that arrives in parts: upstreams send it already split into text, reasoning and calls.

use baton_schemas::FinishReason;

use crate::choice::{FedStep, ReplyPart, ReplyParts};
use crate::part_content::PartContents;
use crate::part_filter::PartFilter;
use crate::tools::PartContent;

/// The state of one choice's reply: like [`ChoiceReply`](crate::ChoiceReply), for parts.
#[derive(Debug, Clone)]
pub struct PartReply {
    filter: PartFilter,
    n_reasoning: u32,
    /// The model has refused to answer.
    has_refused: bool,
}

impl PartReply {
    /// A reply that ends before the earliest of `stops`, and after its first call if `one_call`.
    pub fn new(stops: Vec<String>, one_call: bool) -> Self {
        PartReply { filter: PartFilter::new(stops, one_call), n_reasoning: 0, has_refused: false }
    }

    /// Takes the next part. After the reply has stopped, nothing is released.
    pub fn feed(&mut self, part: ReplyPart) -> FedStep {
        let mut parts = ReplyParts::new();
        if !self.filter.is_stopped() {
            match part.content {
                PartContent::Text(text) => {
                    let text = self.filter.text(text);
                    // The tokens may spell a part of the stop string.
                    let tokens = if self.filter.is_stopped() { Vec::new() } else { part.tokens };
                    if !text.is_empty() || !tokens.is_empty() {
                        parts.push(ReplyPart { content: PartContent::Text(text), tokens });
                    }
                }
                PartContent::Reasoning(text) => {
                    self.n_reasoning += 1;
                    parts.push(ReplyPart { content: PartContent::Reasoning(text), tokens: Vec::new() });
                }
                PartContent::Refusal(text) => {
                    parts.extend(text_part(self.filter.release()));
                    if !self.filter.is_stopped() {
                        self.has_refused = true;
                        parts.push(ReplyPart { content: PartContent::Refusal(text), tokens: Vec::new() });
                    }
                }
                PartContent::Call(call) => {
                    let mut released = PartContents::new();
                    self.filter.call(call, &mut released);
                    parts.extend(released.into_iter().map(|content| ReplyPart { content, tokens: Vec::new() }));
                }
            }
        }
        FedStep { parts, stopped: self.filter.is_stopped() }
    }

    /// Ends the reply, and releases everything held back.
    pub fn finish(&mut self) -> FedStep {
        let parts = text_part(self.filter.finish()).into_iter().collect();
        FedStep { parts, stopped: self.filter.is_stopped() }
    }

    /// The reply's finish reason, from that of its generation.
    pub fn reason(&self, reason: FinishReason) -> FinishReason {
        match self.filter.reason(reason) {
            _ if self.filter.stop_string().is_some() => FinishReason::Stop,
            FinishReason::Stop if self.has_refused => FinishReason::Refusal,
            reason => reason,
        }
    }

    /// The stop string that ended the reply, if one did.
    pub fn stop_string(&self) -> Option<String> {
        self.filter.stop_string()
    }

    /// The number of reasoning parts.
    pub fn n_reasoning(&self) -> u32 {
        self.n_reasoning
    }
}

fn text_part(text: String) -> Option<ReplyPart> {
    (!text.is_empty()).then(|| ReplyPart { content: PartContent::Text(text), tokens: Vec::new() })
}

#[cfg(test)]
mod tests {
    use baton_schemas::tools::ToolCallDelta;

    use super::*;

    fn text(text: &str) -> ReplyPart {
        ReplyPart { content: PartContent::Text(text.to_owned()), tokens: Vec::new() }
    }

    fn call(call: ToolCallDelta) -> ReplyPart {
        ReplyPart { content: PartContent::Call(call), tokens: Vec::new() }
    }

    fn begin() -> ReplyPart {
        call(ToolCallDelta::Begin { index: 0, id: "c".into(), name: "f".into() })
    }

    fn arguments(fragment: &str) -> ReplyPart {
        call(ToolCallDelta::Arguments { index: 0, fragment: fragment.to_owned() })
    }

    fn end() -> ReplyPart {
        call(ToolCallDelta::End { index: 0 })
    }

    /// The parts' text and steps of calls, with `|` where the reply stopped.
    fn read(reply: &mut PartReply, parts: Vec<ReplyPart>) -> String {
        let mut steps: Vec<FedStep> = parts.into_iter().map(|part| reply.feed(part)).collect();
        steps.push(reply.finish());
        let show = |part: &ReplyPart| match &part.content {
            PartContent::Text(text) => text.clone(),
            PartContent::Reasoning(text) => format!("({text})"),
            PartContent::Refusal(text) => format!("!{text}"),
            PartContent::Call(ToolCallDelta::Begin { name, .. }) => format!("<{name}"),
            PartContent::Call(ToolCallDelta::Arguments { fragment, .. }) => fragment.clone(),
            PartContent::Call(ToolCallDelta::End { .. }) => ">".to_owned(),
        };
        let step =
            |step: &FedStep| step.parts.iter().map(show).collect::<String>() + if step.stopped { "|" } else { "" };
        steps.iter().map(step).collect()
    }

    #[test]
    fn a_stop_string_across_parts_ends_the_reply() {
        let mut reply = PartReply::new(vec!["STOP".to_owned()], false);
        assert_eq!(read(&mut reply, vec![text("go ST"), text("OP on")]), "go ||");
        assert_eq!(reply.stop_string().as_deref(), Some("STOP"));
        assert_eq!(reply.reason(FinishReason::Stop), FinishReason::Stop);
        let mut held = PartReply::new(vec!["STOP".to_owned()], false);
        assert_eq!(read(&mut held, vec![text("go ST")]), "go ST");
    }

    #[test]
    fn text_that_is_held_back_comes_before_a_refusal() {
        let refusal = |text: &str| ReplyPart { content: PartContent::Refusal(text.to_owned()), tokens: Vec::new() };
        let mut reply = PartReply::new(vec!["STOP".to_owned()], false);
        assert_eq!(
            read(&mut reply, vec![text("go ST"), refusal("OP "), refusal("no"), text("STOP")]),
            "go ST!OP !no||"
        );
    }

    #[test]
    fn a_whole_stop_string_in_text_that_is_held_back_ends_the_reply_before_a_refusal_or_a_call() {
        let refusal = ReplyPart { content: PartContent::Refusal("no".to_owned()), tokens: Vec::new() };
        for follows in [vec![refusal], vec![begin(), arguments("{}"), end()]] {
            let mut reply = PartReply::new(vec!["ab".to_owned(), "xabc".to_owned()], false);
            let parts = std::iter::once(text("xab")).chain(follows).collect();
            assert_eq!(read(&mut reply, parts).replace('|', ""), "x");
            assert_eq!(reply.stop_string().as_deref(), Some("ab"));
            assert_eq!(reply.reason(FinishReason::Stop), FinishReason::Stop);
        }
    }

    #[test]
    fn stop_strings_are_not_looked_for_in_arguments() {
        let mut reply = PartReply::new(vec!["STOP".to_owned()], false);
        let parts = vec![text("ST"), begin(), arguments("\"STOP\""), end(), text("x")];
        assert_eq!(read(&mut reply, parts), "ST<f\"STOP\">x");
        assert_eq!(reply.reason(FinishReason::Stop), FinishReason::ToolCalls);
        assert_eq!(reply.reason(FinishReason::Length), FinishReason::Length);
    }

    #[test]
    fn a_call_reaches_the_client_with_its_first_arguments_or_its_end() {
        let cut = vec![text("a"), begin(), arguments("")];
        assert_eq!(read(&mut PartReply::new(Vec::new(), false), cut), "a", "a limit cut it before its arguments");
        let cut = vec![begin(), arguments("{\"a")];
        assert_eq!(read(&mut PartReply::new(Vec::new(), false), cut), "<f{\"a");
        assert_eq!(read(&mut PartReply::new(Vec::new(), false), vec![begin(), end()]), "<f>");
    }

    #[test]
    fn a_reply_of_one_call_ends_with_it() {
        let mut reply = PartReply::new(Vec::new(), true);
        assert_eq!(read(&mut reply, vec![begin(), end(), text("x")]), "<f>|||");
    }
}
