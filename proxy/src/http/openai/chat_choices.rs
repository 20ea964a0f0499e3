//! The choices of a chat, which are messages of the assistant.

use baton_reply::TokenLogprobs;
use baton_schemas::FinishReason;
use baton_schemas::openai::chat_response::{
    Choice, ChunkChoice, FunctionCall, ReplyMessage, ReplyToolCall, ToolCallFragment, finish_reason,
    function_finish_reason,
};
use baton_schemas::openai::logprobs::{ChoiceLogprobs, TokenLogprob};
use baton_schemas::tools::ToolCallDelta;

use super::choices::Choices;

/// Writes the choices of a chat.
pub(super) struct ChatChoices {
    /// The client wants log-probabilities.
    pub(super) logprobs: bool,
    /// The request uses the older `functions`, so calls are written in that form.
    pub(super) has_functions: bool,
}

impl ChatChoices {
    fn finish_reason(&self, reason: FinishReason) -> &'static str {
        if self.has_functions { function_finish_reason(reason) } else { finish_reason(reason) }
    }

    /// The arguments of the tool call that a message is writing.
    fn arguments<'a>(&self, message: &'a mut ReplyMessage) -> Option<&'a mut String> {
        let function = if self.has_functions {
            message.function_call.as_mut()
        } else {
            message.tool_calls.last_mut().map(|call| &mut call.function)
        };
        function.map(|function| &mut function.arguments)
    }

    /// Writes the `logprobs` of these tokens; null unless requested.
    fn logprobs_of(&self, tokens: &[TokenLogprobs]) -> Option<ChoiceLogprobs> {
        let content = || tokens.iter().map(|token| TokenLogprob::new(&token.bytes, &token.logprobs)).collect();
        self.logprobs.then(|| ChoiceLogprobs { content: content(), refusal: None })
    }
}

impl Choices for ChatChoices {
    type Whole = Choice;
    type Delta<'a> = ChunkChoice<'a>;

    fn unfinished(&self, index: u32) -> Choice {
        let logprobs = self.logprobs.then(ChoiceLogprobs::default);
        Choice { index, message: ReplyMessage::new(String::new()), logprobs, finish_reason: "" }
    }

    fn append(&mut self, whole: &mut Choice, text: &str, tokens: &[TokenLogprobs]) {
        whole.message.content.get_or_insert_default().push_str(text);
        if let (Some(all), Some(new)) = (&mut whole.logprobs, self.logprobs_of(tokens)) {
            all.content.extend(new.content);
        }
    }

    fn append_reasoning(&mut self, whole: &mut Choice, text: &str) {
        for name in [&mut whole.message.reasoning_content, &mut whole.message.reasoning] {
            name.get_or_insert_default().push_str(text);
        }
    }

    fn append_refusal(&mut self, whole: &mut Choice, text: &str) {
        whole.message.refusal.get_or_insert_default().push_str(text);
    }

    fn append_call(&mut self, whole: &mut Choice, call: &ToolCallDelta) {
        match call {
            ToolCallDelta::Begin { name, .. } if self.has_functions => {
                whole.message.function_call = Some(FunctionCall { name: name.clone(), arguments: String::new() });
            }
            ToolCallDelta::Begin { id, name, .. } => {
                whole.message.tool_calls.push(ReplyToolCall::new(id.clone(), name.clone()));
            }
            ToolCallDelta::Arguments { fragment, .. } => {
                if let Some(arguments) = self.arguments(&mut whole.message) {
                    arguments.push_str(fragment);
                }
            }
            ToolCallDelta::End { .. } => {}
        }
    }

    fn end(&self, whole: &mut Choice, reason: FinishReason) {
        whole.finish_reason = self.finish_reason(reason);
        let has_calls = !whole.message.tool_calls.is_empty() || whole.message.function_call.is_some();
        let has_other = has_calls || whole.message.refusal.is_some();
        if has_other && whole.message.content.as_ref().is_some_and(String::is_empty) {
            whole.message.content = None;
        }
    }

    fn opening(&self, index: u32) -> Option<ChunkChoice<'_>> {
        Some(ChunkChoice::role(index))
    }

    fn delta<'a>(&mut self, index: u32, text: &'a str, tokens: &[TokenLogprobs]) -> ChunkChoice<'a> {
        ChunkChoice::content(index, text, self.logprobs_of(tokens))
    }

    fn reasoning<'a>(&self, index: u32, text: &'a str) -> Option<ChunkChoice<'a>> {
        Some(ChunkChoice::reasoning(index, text))
    }

    fn refusal<'a>(&self, index: u32, text: &'a str) -> Option<ChunkChoice<'a>> {
        Some(ChunkChoice::refusal(index, text))
    }

    fn call<'a>(&self, index: u32, call: &'a ToolCallDelta) -> Option<ChunkChoice<'a>> {
        let fragment = ToolCallFragment::of(call)?;
        Some(match self.has_functions {
            true => ChunkChoice::function_call(index, fragment.function),
            false => ChunkChoice::tool_call(index, fragment),
        })
    }

    fn finish(&self, index: u32, reason: FinishReason) -> ChunkChoice<'static> {
        ChunkChoice::finish(index, self.finish_reason(reason))
    }
}
