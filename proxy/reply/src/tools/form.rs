//! The form of one request's reply: the description of tools in the prompt, the rules for the text, and its reader.

use std::borrow::Cow;
use std::sync::Arc;

use baton_schemas::constraint::{Constraint, Rule};
use baton_schemas::generate::{Conversation, Input, Thinking};
use baton_schemas::thinking::{ThinkTags, thinks};
use baton_schemas::tools::{Strictness, Tool, ToolChoice, ToolUse};
use baton_schemas::{GenerateRequest, MessageRole, Token};
use serde_json::{Value, json};

use super::reader::{Holds, ReplyReader};
use super::thought::Thought;
use super::{Calls, FIELD, ToolFormat, format_of};

/// The maximum number of calls in one reply.
const MAX_CALLS: u32 = 16;

/// Tokens at the end of a prompt that surely include a tag at its end.
const TAIL_TOKENS: usize = 16;

/// The state of reasoning at the end of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReasoningState {
    /// The model may begin with reasoning.
    None,
    /// The prompt has begun reasoning.
    Open,
    /// The prompt has closed reasoning, so there is none.
    Closed,
}

/// Prepares a conversation for this template: adds the description of the tools, and converts earlier calls to the form
/// that the template reads.
pub fn present<'a>(conversation: &'a Conversation, tools: &ToolUse, template: &str) -> Cow<'a, Conversation> {
    let has_calls = || conversation.messages.iter().any(|m| !m.tool_calls.is_empty() || m.role == MessageRole::Tool);
    if tools.offered().is_empty() && !has_calls() {
        return Cow::Borrowed(conversation);
    }
    let mut conversation = conversation.clone();
    format_of(template).present(&mut conversation, tools, template);
    Cow::Owned(conversation)
}

/// The request wants thinking, and the model's chat template has no form for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the model's chat template has no form for thinking")]
pub struct NoThinking;

/// See the module.
#[derive(Debug, Clone)]
pub struct ReplyForm {
    /// `None` for prompts that are not conversations, whose replies are plain text.
    format: Option<&'static dyn ToolFormat>,
    thought: Option<ThinkTags>,
    opening: ReasoningState,
    tools: ToolUse,
    /// The tools whose calls are read.
    called: Arc<[Tool]>,
    template: String,
}

impl ReplyForm {
    /// The form that a model's template gives the reply to a request.
    ///
    /// Errors: the request wants thinking and the model's template has no form for it.
    pub fn of(request: &GenerateRequest, template: &str) -> Result<ReplyForm, NoThinking> {
        if request.thinking == Thinking::Required && !thinks(template) {
            return Err(NoThinking);
        }
        let is_chat = matches!(request.input, Input::Chat(_));
        let format = is_chat.then(|| format_of(template));
        // In formats with channels, reasoning is a channel.
        let has_channels = format.is_some_and(|format| format.is_always_read());
        let tools = if is_chat { request.tools.clone() } else { ToolUse::default() };
        Ok(ReplyForm {
            format,
            thought: ThinkTags::of(template).filter(|_| is_chat && !has_channels),
            opening: ReasoningState::None,
            called: if tools.offered().is_empty() { Arc::default() } else { Arc::clone(&tools.tools) },
            tools,
            template: template.to_owned(),
        })
    }

    /// Prepares a conversation for the template.
    pub fn present<'a>(&self, conversation: &'a Conversation) -> Cow<'a, Conversation> {
        present(conversation, &self.tools, &self.template)
    }

    /// The end of the rendered prompt, for [`read_prompt_tail`](Self::read_prompt_tail); `None` if the model has no form
    /// for reasoning.
    pub fn prompt_tail<'a>(&self, prompt: &'a [Token]) -> Option<&'a [Token]> {
        self.thought.map(|_| &prompt[prompt.len().saturating_sub(TAIL_TOKENS)..])
    }

    /// Notes whether the rendered prompt, which ends with `text`, leaves reasoning open or closed.
    pub fn read_prompt_tail(&mut self, text: &str) {
        let Some(tags) = self.thought else { return };
        let text = text.trim_end();
        self.opening = match () {
            () if text.ends_with(tags.open) => ReasoningState::Open,
            () if text.ends_with(tags.close) => ReasoningState::Closed,
            () => ReasoningState::None,
        };
    }

    /// The constraint of the text: calls, if they are forced or have strict schemas, and the request's own constraint.
    pub fn constraint(&self, request: &GenerateRequest) -> Option<Arc<Constraint>> {
        let text = request.constraint.as_ref();
        let Some(format) = self.format else { return text.cloned() };
        let holds_calls = self.tools.is_forced() || !self.called.is_empty() && (text.is_some() || self.has_strict());
        let rule_of = |text: &Arc<Constraint>| Rule::from(Constraint::clone(text));
        let rule = match (holds_calls, text) {
            (true, _) if self.tools.is_forced() => format.calls(&self.grammar_of_calls()),
            (true, text) => format.text_or_calls(&self.grammar_of_calls(), text.map(rule_of)),
            (false, Some(text)) if self.thought.is_none() && !format.is_always_read() => return Some(Arc::clone(text)),
            (false, Some(text)) => format.answer(rule_of(text)),
            (false, None) => return None,
        };
        let field = text.filter(|_| !holds_calls).map_or(FIELD, |text| text.field()).to_owned();
        Some(Arc::new(Constraint::Grammar { rule: self.after_reasoning(rule), field }))
    }

    fn has_strict(&self) -> bool {
        self.called.iter().any(|tool| tool.strict != Strictness::Loose)
    }

    fn grammar_of_calls(&self) -> Calls<'_> {
        let is_forced = self.tools.is_forced();
        let callable = self.tools.callable();
        let is_named = matches!(self.tools.choice, ToolChoice::Named(_));
        let max = if is_named || !self.tools.parallel { 1 } else { MAX_CALLS };
        let held = |tool: &Tool| Rule::Json(arguments_schema(tool.held()));
        let free = || Rule::Json(json!({ "type": "object" }));
        let arguments = |tool: &Tool| match tool.strict {
            _ if is_forced => vec![held(tool)],
            Strictness::Strict => vec![held(tool)],
            Strictness::IfKnown => vec![held(tool), free()],
            Strictness::Loose => vec![free()],
        };
        Calls { tools: callable.into_iter().map(|tool| (tool.name.as_str(), arguments(tool))).collect(), max }
    }

    /// Applies `rule` to the text after the model's reasoning, which is not constrained.
    fn after_reasoning(&self, rule: Rule) -> Rule {
        let Some(tags) = self.thought else { return rule };
        let close = || vec![Rule::Until(tags.close.to_owned()), Rule::Pattern("[ \\n]{0,4}".to_owned())];
        let reasoning = match self.opening {
            ReasoningState::Closed => return rule,
            ReasoningState::Open => Rule::Sequence(close()),
            ReasoningState::None => Rule::optional(Rule::Sequence([vec![Rule::literal(tags.open)], close()].concat())),
        };
        Rule::Sequence(vec![reasoning, rule])
    }

    /// Control tokens whose spelling the reader needs.
    pub fn markers(&self) -> Vec<&'static str> {
        let tags = self.thought.into_iter().flat_map(|tags| [tags.open, tags.close]);
        let format = self.format.filter(|_| self.reads_calls()).map_or(&[][..], |format| format.markers());
        format.iter().copied().chain(tags).collect()
    }

    /// A reader of one choice's text, which then also finds the stop strings; `None` for plain text.
    pub fn reader(&self, stops: &[String]) -> Option<ReplyReader> {
        let thought = self.thought.map(|tags| Thought::new(tags, self.opening == ReasoningState::Open));
        let calls = self.format.filter(|_| self.reads_calls()).map(|format| format.parser(&self.called));
        if thought.is_none() && calls.is_none() {
            return None;
        }
        let holds = Holds { one_call: !self.tools.parallel, only_calls: self.tools.is_forced() };
        Some(ReplyReader::new(thought, calls, stops.to_vec(), holds))
    }

    fn reads_calls(&self) -> bool {
        !self.called.is_empty() || self.format.is_some_and(|format| format.is_always_read())
    }
}

/// The schema of a call's arguments: an object without unknown arguments, unless the tool's schema allows them.
fn arguments_schema(parameters: &Value) -> Value {
    let mut schema = parameters.clone();
    if let Some(fields) = schema.as_object_mut() {
        if !["type", "$ref", "anyOf", "oneOf", "allOf"].iter().any(|key| fields.contains_key(*key)) {
            fields.insert("type".to_owned(), "object".into());
        }
        if fields.contains_key("properties") {
            fields.entry("additionalProperties").or_insert(false.into());
        }
    }
    schema
}
