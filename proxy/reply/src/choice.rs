//! Turns one choice's tokens into text, reasoning and tool calls.

use baton_schemas::sequence::GeneratedToken;
use baton_schemas::{FinishReason, Token};
use smallvec::SmallVec;

use crate::part_content::PartContents;
use crate::text::{ChoiceText, TextStep, TokenLogprobs};
use crate::tools::{PartContent, ReplyForm, ReplyReader};

/// The parts that one token, or one incoming part, released: one as a rule, which needs no allocation.
pub type ReplyParts = SmallVec<[ReplyPart; 1]>;

/// The outcome of one token, or of one incoming part.
#[derive(Debug, Default)]
pub struct FedStep {
    pub parts: ReplyParts,
    /// The choice is complete, and its sequence can be dropped.
    pub stopped: bool,
}

/// A part of a reply, and the tokens that became final with it.
#[derive(Debug)]
pub struct ReplyPart {
    /// Text, reasoning, or a step of a call.
    pub content: PartContent,
    /// Only with text, and only tokens with log-probabilities.
    pub tokens: Vec<TokenLogprobs>,
}

/// The state of one choice's reply.
pub struct ChoiceReply {
    text: ChoiceText,
    /// Reads reasoning and calls, and also finds the stop strings. `None` if the reply is plain text.
    reader: Option<ReplyReader>,
    n_reasoning: u32,
    /// Tokens of the prompt and the reply, if the client requested them.
    context: Option<Vec<Token>>,
}

impl ChoiceReply {
    /// A reply of this form, which ends before the earliest of `stops`.
    pub fn new(form: &ReplyForm, stops: &[String]) -> Self {
        let reader = form.reader(stops);
        let stops = if reader.is_some() { Vec::new() } else { stops.to_vec() };
        let text = ChoiceText::new(stops).with_markers(form.markers());
        ChoiceReply { text, reader, n_reasoning: 0, context: None }
    }

    /// Makes the reply collect its tokens after those of the prompt, if `context` holds these.
    pub fn after(self, context: Option<Vec<Token>>) -> Self {
        ChoiceReply { context, ..self }
    }

    /// Makes the reply list control tokens with their log-probabilities. They still have no text.
    pub fn with_control_tokens(self) -> Self {
        ChoiceReply { text: self.text.with_control_tokens(), ..self }
    }

    /// Takes the tokens of the prompt and the reply.
    pub fn take_context(&mut self) -> Option<Vec<Token>> {
        self.context.take()
    }

    /// Takes the next token.
    pub fn feed(&mut self, token: GeneratedToken) -> FedStep {
        if let Some(context) = &mut self.context {
            context.push(token.id);
        }
        let step = self.text.feed(token);
        let Some(reader) = &mut self.reader else { return plain(step) };
        let was_thinking = reader.is_thinking();
        let parts = reader.feed(step.text);
        self.n_reasoning += u32::from(was_thinking || reader.is_thinking());
        FedStep { parts: with_tokens(parts, step.tokens), stopped: reader.is_stopped() }
    }

    /// Ends the reply where the sequence ended, and releases everything held back.
    pub fn finish(&mut self, reason: FinishReason) -> FedStep {
        let step = self.text.finish();
        let Some(reader) = &mut self.reader else { return plain(step) };
        let mut parts = reader.feed(step.text);
        if !reader.is_stopped() {
            parts.extend(reader.finish(reason == FinishReason::Length));
        }
        FedStep { parts: with_tokens(parts, step.tokens), stopped: reader.is_stopped() }
    }

    /// The reply's finish reason, from that of its sequence.
    pub fn reason(&self, reason: FinishReason) -> FinishReason {
        self.reader.as_ref().map_or(reason, |reader| reader.reason(reason))
    }

    /// The stop string that ended the reply, if one did.
    pub fn stop_string(&self) -> Option<String> {
        match &self.reader {
            Some(reader) => reader.stop_string(),
            None => self.text.stop_string(),
        }
    }

    /// Tokens that were reasoning.
    pub fn n_reasoning(&self) -> u32 {
        self.n_reasoning
    }
}

fn plain(step: TextStep) -> FedStep {
    let mut parts = ReplyParts::new();
    if !step.is_empty() {
        parts.push(ReplyPart { content: PartContent::Text(step.text), tokens: step.tokens });
    }
    FedStep { parts, stopped: step.stopped }
}

/// Attaches the tokens to the first text, or to an empty one, because markup and reasoning have tokens, too.
fn with_tokens(parts: PartContents, tokens: Vec<TokenLogprobs>) -> ReplyParts {
    let mut parts: ReplyParts = parts.into_iter().map(|content| ReplyPart { content, tokens: Vec::new() }).collect();
    if !tokens.is_empty() {
        match parts.iter_mut().find(|part| matches!(part.content, PartContent::Text(_))) {
            Some(text) => text.tokens = tokens,
            None => parts.push(ReplyPart { content: PartContent::Text(String::new()), tokens }),
        }
    }
    parts
}
