//! Finds a conversation again by its text. Upstreams render prompts themselves, so their tokens are not known here.

use std::fmt::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use baton_planner::cache_reach::PrefixRun;
use baton_schemas::generate::{Input, Thinking};
use baton_schemas::held::HeldHasher;
use baton_schemas::written_number::AsWritten;
use baton_schemas::{CacheScope, GenerateRequest, Token};
use baton_upstream::ModelCapability;

use super::nodes::{RoutedPrefixes, prefix_key};

/// Bytes of a token, as estimates of prompts count them.
const TOKEN_BYTES: usize = size_of::<Token>();

/// Tokens between two hashes.
const BLOCK_TOKENS: usize = 64;

/// Texts are compared up to this length: a million tokens.
const MAX_BYTES: usize = 4 << 20;

/// The size of a prompt, and hashes of its beginnings in its caller's scope.
#[derive(Debug, Clone, Default)]
pub struct PromptOutline {
    /// The estimated number of its tokens.
    pub n_tokens: u32,
    /// The client's limit of new tokens.
    pub max_tokens: Option<u32>,
    /// The capabilities that the request needs.
    pub needs: Vec<ModelCapability>,
    blocks: Vec<u64>,
}

impl PromptOutline {
    /// The outline of a request for a model with this public name, whose prompt has about `n_tokens` tokens.
    pub fn new(model: &str, request: &GenerateRequest, scope: CacheScope, n_tokens: u32) -> PromptOutline {
        let mut text = TextHasher::new(scope);
        // The hasher refuses what is too long to be compared.
        let _ = write_prompt(&mut text, model, request);
        let tools = (!request.tools.offered().is_empty()).then_some(ModelCapability::Tools);
        let thinking = (request.thinking == Thinking::Required).then_some(ModelCapability::Thinking);
        let needs = tools.into_iter().chain(thinking).collect();
        PromptOutline { n_tokens, max_tokens: request.max_tokens, needs, blocks: text.blocks }
    }
}

/// Writes what engines compute of a request, in the order of most templates. The reasoning of earlier turns is left out, since
/// not every server gets it.
fn write_prompt(text: &mut TextHasher, model: &str, request: &GenerateRequest) -> fmt::Result {
    write!(text, "{model}\0")?;
    match &request.input {
        Input::Tokens(tokens) => tokens.iter().try_for_each(|token| text.bytes(&token.to_le_bytes())),
        Input::Text(prompt) => text.write_str(prompt),
        Input::Infill { prefix, suffix, .. } => write!(text, "{prefix}\0{suffix}"),
        Input::Chat(conversation) => {
            for tool in request.tools.offered() {
                write!(text, "{}\0", AsWritten(&tool.definition()))?;
            }
            for message in &conversation.messages {
                write!(text, "{}\0{}\0", message.role.as_str(), message.content)?;
                message.tool_calls.iter().try_for_each(|call| write!(text, "{}\0", AsWritten(call)))?;
            }
            Ok(())
        }
    }
}

/// Hashes a text after every block.
struct TextHasher {
    hasher: HeldHasher,
    part: Vec<u8>,
    n_bytes: usize,
    blocks: Vec<u64>,
}

impl TextHasher {
    fn new(scope: CacheScope) -> TextHasher {
        let hasher = HeldHasher::new(prefix_key(), scope);
        TextHasher { hasher, part: Vec::with_capacity(BLOCK_TOKENS * TOKEN_BYTES), n_bytes: 0, blocks: Vec::new() }
    }

    /// Errors: the text is too long to be compared.
    fn bytes(&mut self, mut bytes: &[u8]) -> fmt::Result {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at((BLOCK_TOKENS * TOKEN_BYTES - self.part.len()).min(bytes.len()));
            self.part.extend_from_slice(now);
            bytes = later;
            if self.part.len() == BLOCK_TOKENS * TOKEN_BYTES {
                let mut tokens = [0; BLOCK_TOKENS];
                for (token, bytes) in tokens.iter_mut().zip(self.part.chunks_exact(TOKEN_BYTES)) {
                    *token = bytes.iter().rev().fold(0, |word: Token, byte| (word << 8) | Token::from(*byte));
                }
                self.hasher.extend(&tokens);
                self.blocks.push(self.hasher.hash());
                self.n_bytes += self.part.len();
                self.part.clear();
            }
            if self.n_bytes >= MAX_BYTES {
                return Err(fmt::Error);
            }
        }
        Ok(())
    }
}

impl Write for TextHasher {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.bytes(text.as_bytes())
    }
}

/// The conversations that were sent to one place.
#[derive(Debug, Default)]
pub struct TextPrefixes(Mutex<RoutedPrefixes>);

impl TextPrefixes {
    /// Remembers a prompt that was sent there.
    pub fn remember(&self, prompt: &PromptOutline) {
        self.lock().remember(&prompt.blocks, None);
    }

    /// The parts of a prompt's beginning that were sent there before.
    pub fn runs(&self, prompt: &PromptOutline) -> Vec<PrefixRun> {
        let runs = self.lock().runs(&prompt.blocks);
        let run = |(n_blocks, distance): (usize, u64)| PrefixRun {
            n_tokens: u32::try_from(n_blocks * BLOCK_TOKENS).unwrap_or(u32::MAX).min(prompt.n_tokens),
            distance: distance.saturating_mul(BLOCK_TOKENS as u64),
        };
        runs.into_iter().map(run).collect()
    }

    /// Tokens at the start of a prompt that were sent there before.
    pub fn n_held(&self, prompt: &PromptOutline) -> u32 {
        self.runs(prompt).last().map_or(0, |run| run.n_tokens)
    }

    fn lock(&self) -> MutexGuard<'_, RoutedPrefixes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::generate::Conversation;
    use serde_json::json;

    use super::*;
    use crate::observe::tests::request;

    fn outline(scope: CacheScope, model: &str, messages: &[&str]) -> PromptOutline {
        let messages: Vec<_> = messages.iter().map(|text| json!({ "role": "user", "content": text })).collect();
        let conversation: Conversation = serde_json::from_value(json!({ "messages": messages })).unwrap();
        let input = Input::Chat(conversation);
        PromptOutline::new(model, &GenerateRequest { input, ..request("m") }, scope, 10_000)
    }

    #[tokio::test]
    async fn a_conversation_is_found_by_its_beginning_in_its_own_scope() {
        let prefixes = TextPrefixes::default();
        let (first, second) = ("word ".repeat(200), "more ".repeat(200));
        prefixes.remember(&outline(CacheScope(1), "m", &[&first]));
        let held =
            |scope: u64, model: &str, messages: &[&str]| prefixes.n_held(&outline(CacheScope(scope), model, messages));
        assert_eq!(held(1, "m", &[&first, &second]), 192, "three whole blocks of a thousand bytes");
        assert_eq!(held(1, "m", &[&second, &first]), 0);
        assert_eq!(held(2, "m", &[&first, &second]), 0, "another key's");
        assert_eq!(held(1, "n", &[&first, &second]), 0, "another model's");
        let changed = first.replacen("word", "Word", 80);
        assert_eq!(held(1, "m", &[&changed]), 0);
    }

    #[tokio::test]
    async fn a_long_text_is_compared_up_to_a_bound() {
        let text = "x".repeat(MAX_BYTES + 1_000_000);
        assert_eq!(outline(CacheScope(1), "m", &[&text]).blocks.len(), MAX_BYTES / (BLOCK_TOKENS * TOKEN_BYTES));
    }
}
