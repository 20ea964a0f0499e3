//! A model that codecs are tried on.

use std::sync::Arc;

use baton_engines::llama::trial::KvTrial;
use baton_schemas::Token;
use baton_schemas::kv::CodecProfile;

/// Tokens of the text from the start of one prompt to that of the next.
pub(super) const PROMPT_STRIDE: usize = 419;

/// A model with the text of its prompts.
pub(super) struct TriedModel<'m> {
    pub(super) trial: KvTrial<'m>,
    pub(super) profile: Option<Arc<CodecProfile>>,
    /// The tokens that every prompt begins with.
    pub(super) beginning: Vec<Token>,
    pub(super) text: Vec<Token>,
}

impl TriedModel<'_> {
    /// Prompt number `n`, and the text's own tokens after it.
    pub(super) fn prompt(&self, n: usize, length: usize, n_next: usize) -> (Vec<Token>, Vec<Token>) {
        let text = self.text.iter().cycle().skip(PROMPT_STRIDE * n);
        let mut tokens: Vec<Token> = self.beginning.iter().chain(text).copied().take(length + n_next).collect();
        let next = tokens.split_off(length);
        (tokens, next)
    }
}
