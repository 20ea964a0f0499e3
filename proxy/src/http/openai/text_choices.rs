//! The choices of a plain completion: texts, each after its prompt if `echo` is set.

use baton_reply::TokenLogprobs;
use baton_schemas::FinishReason;
use baton_schemas::openai::chat_response::finish_reason;
use baton_schemas::openai::completion_response::{TextChoice, TextLogprobs};

use super::choices::Choices;

/// Writes the choices of a plain completion.
pub(super) struct TextChoices {
    logprobs: bool,
    /// The text to echo for each prompt; empty without `echo`.
    echoes: Vec<String>,
    choices_per_prompt: u32,
    /// The offset of each choice's next token, in characters.
    offsets: Vec<u32>,
}

impl TextChoices {
    /// `n` choices of each of `n_prompts` prompts. `echoes` has a text for each prompt, or none.
    pub(super) fn new(n_prompts: u32, n: u32, logprobs: bool, echoes: Vec<String>) -> Self {
        let offsets = vec![0; n_prompts.saturating_mul(n) as usize];
        TextChoices { logprobs, echoes, choices_per_prompt: n.max(1), offsets }
    }

    fn echo(&self, index: u32) -> Option<&String> {
        self.echoes.get((index / self.choices_per_prompt) as usize)
    }

    /// Writes the `logprobs` of a choice's next tokens; null unless requested.
    fn logprobs_of(&mut self, index: u32, tokens: &[TokenLogprobs]) -> Option<TextLogprobs> {
        let offset = self.offsets.get_mut(index as usize).filter(|_| self.logprobs)?;
        let mut logprobs = TextLogprobs::default();
        for token in tokens {
            *offset = logprobs.push(&token.bytes, &token.logprobs, *offset);
        }
        Some(logprobs)
    }
}

impl Choices for TextChoices {
    type Whole = TextChoice<'static>;
    type Delta<'a> = TextChoice<'a>;

    fn unfinished(&self, index: u32) -> TextChoice<'static> {
        let echo = self.echo(index).cloned().unwrap_or_default();
        TextChoice::text(index, echo, self.logprobs.then(TextLogprobs::default))
    }

    fn append(&mut self, whole: &mut TextChoice<'static>, text: &str, tokens: &[TokenLogprobs]) {
        whole.text.to_mut().push_str(text);
        if let (Some(all), Some(new)) = (&mut whole.logprobs, self.logprobs_of(whole.index, tokens)) {
            all.extend(new);
        }
    }

    fn end(&self, whole: &mut TextChoice<'static>, reason: FinishReason) {
        whole.finish_reason = Some(finish_reason(reason));
    }

    fn opening(&self, index: u32) -> Option<TextChoice<'_>> {
        self.echo(index).map(|echo| TextChoice::text(index, echo, None))
    }

    fn delta<'a>(&mut self, index: u32, text: &'a str, tokens: &[TokenLogprobs]) -> TextChoice<'a> {
        let logprobs = self.logprobs_of(index, tokens);
        TextChoice::text(index, text, logprobs)
    }

    fn finish(&self, index: u32, reason: FinishReason) -> TextChoice<'static> {
        TextChoice::finish(index, reason)
    }
}
