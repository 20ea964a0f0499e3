//! The choices of a plain completion: texts, each after its prompt if `echo` is set.

use baton_reply::TokenLogprobs;
use baton_schemas::FinishReason;
use baton_schemas::openai::chat_response::finish_reason;
use baton_schemas::openai::completion_response::{TextChoice, TextLogprobs, prompt_entry};
use baton_schemas::sequence::GeneratedToken;

use super::choices::Choices;

/// What the choices of a plain completion have besides their texts.
pub(super) struct TextForm {
    /// `Some(k)`: log-probabilities, and those of the k most likely tokens.
    pub(super) top_logprobs: Option<u32>,
    /// The text to echo for each prompt; empty without `echo`.
    pub(super) echoes: Vec<String>,
    /// `Some(k)`: the prompt's log-probabilities in vLLM's shape, with those of the k most likely tokens.
    pub(super) prompt_logprobs: Option<u32>,
}

/// Writes the choices of a plain completion.
pub(super) struct TextChoices {
    form: TextForm,
    choices_per_prompt: u32,
    /// The offset of each choice's next token, in characters.
    offsets: Vec<u32>,
}

impl TextChoices {
    /// `n` choices of each of `n_prompts` prompts. There is an echo for each prompt, or none.
    pub(super) fn new(n_prompts: u32, n: u32, form: TextForm) -> Self {
        TextChoices { form, choices_per_prompt: n.max(1), offsets: vec![0; n_prompts.saturating_mul(n) as usize] }
    }

    fn echo(&self, index: u32) -> Option<&String> {
        self.form.echoes.get((index / self.choices_per_prompt) as usize)
    }

    /// Writes the `logprobs` of a choice's next tokens; null unless requested.
    fn logprobs_of(&mut self, index: u32, tokens: &[TokenLogprobs]) -> Option<TextLogprobs> {
        let n_top = self.form.top_logprobs? as usize;
        let offset = self.offsets.get_mut(index as usize)?;
        let mut logprobs = TextLogprobs::default();
        for token in tokens {
            *offset = logprobs.push(&token.bytes, Some(&token.logprobs), n_top, *offset);
        }
        Some(logprobs)
    }

    /// Writes the `logprobs` of a choice's echoed prompt; null unless requested.
    fn logprobs_of_echo(&mut self, index: u32, tokens: &[GeneratedToken]) -> Option<TextLogprobs> {
        let n_top = self.form.top_logprobs? as usize;
        // A token that the tokenizer put before the text is not in the text.
        let is_added =
            |token: &GeneratedToken, echo: &String| token.special && !echo.as_bytes().starts_with(&token.bytes);
        let echo = self.echo(index)?;
        let n_added = tokens.iter().take(1).filter(|token| is_added(token, echo)).count();
        let offset = self.offsets.get_mut(index as usize)?;
        let mut logprobs = TextLogprobs::default();
        for (idx, token) in tokens.iter().enumerate() {
            let next = logprobs.push(&token.bytes, token.logprobs.as_ref(), n_top, *offset);
            *offset = if idx < n_added { *offset } else { next };
        }
        Some(logprobs)
    }
}

impl Choices for TextChoices {
    type Whole = TextChoice<'static>;
    type Delta<'a> = TextChoice<'a>;

    fn unfinished(&self, index: u32) -> TextChoice<'static> {
        let echo = self.echo(index).cloned().unwrap_or_default();
        TextChoice::text(index, echo, self.form.top_logprobs.map(|_| TextLogprobs::default()))
    }

    fn append(&mut self, whole: &mut TextChoice<'static>, text: &str, tokens: &[TokenLogprobs]) {
        whole.text.to_mut().push_str(text);
        if let (Some(all), Some(new)) = (&mut whole.logprobs, self.logprobs_of(whole.index, tokens)) {
            all.extend(new);
        }
    }

    fn append_prompt(&mut self, whole: &mut TextChoice<'static>, tokens: &[GeneratedToken]) {
        if let (Some(all), Some(echoed)) = (&mut whole.logprobs, self.logprobs_of_echo(whole.index, tokens)) {
            all.extend(echoed);
        }
        let entries = |n_top| tokens.iter().map(|token| prompt_entry(token, n_top as usize)).collect();
        whole.prompt_logprobs = self.form.prompt_logprobs.map(entries);
    }

    fn end(&self, whole: &mut TextChoice<'static>, reason: FinishReason) {
        whole.finish_reason = Some(finish_reason(reason));
    }

    fn opening(&self, index: u32) -> Option<TextChoice<'_>> {
        // With log-probabilities the echo comes with them, as soon as they are known.
        self.echo(index).filter(|_| self.form.top_logprobs.is_none()).map(|echo| TextChoice::text(index, echo, None))
    }

    fn prompt(&mut self, index: u32, tokens: &[GeneratedToken]) -> Option<TextChoice<'_>> {
        let logprobs = self.logprobs_of_echo(index, tokens)?;
        self.echo(index).map(|echo| TextChoice::text(index, echo, Some(logprobs)))
    }

    fn delta<'a>(&mut self, index: u32, text: &'a str, tokens: &[TokenLogprobs]) -> TextChoice<'a> {
        let logprobs = self.logprobs_of(index, tokens);
        TextChoice::text(index, text, logprobs)
    }

    fn finish(&self, index: u32, reason: FinishReason) -> TextChoice<'static> {
        TextChoice::finish(index, reason)
    }
}
