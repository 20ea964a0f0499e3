//! Renders conversations and tokenizes text.

use std::sync::Arc;

use baton_model::template::{TemplateError, TemplatePiece};
use baton_model::vocabulary::{TextTokenizer, Vocabulary};
use baton_schemas::generate::{Conversation, Message};
use baton_schemas::image::{Image, Segment, segments};
use baton_schemas::node::{PairRequest, TokenizeRequest};
use baton_schemas::{EngineError, KeyTag, MessageRole, Token};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::ModelEngine;
use super::images::{ImageEncoder, no_projector};
use super::pair::{Joints, PairForm};
use super::template_process::Renderer;

impl ModelEngine {
    /// Renders and tokenizes a conversation. Only the template writes control tokens: text in a message that spells one
    /// is tokenized as plain text.
    pub(super) async fn render_prompt(
        &self,
        conversation: &Conversation,
        key: KeyTag,
    ) -> Result<Vec<Token>, EngineError> {
        let Some(template) = &self.template else {
            let feature = "chat: the model has no chat template, and its operator has not given it one".into();
            return Err(EngineError::Unsupported { feature });
        };
        let tokens = self.render_with(template, conversation, key).await?;
        // Most templates write BOS themselves, if the model needs it.
        match self.bos {
            Some(bos) if tokens.first() != Some(&bos) => Ok([&[bos], &tokens[..]].concat()),
            _ => Ok(tokens),
        }
    }

    /// Renders a conversation with `template` and tokenizes it, without adding BOS.
    pub(super) async fn render_with(
        &self,
        template: &Arc<Renderer>,
        conversation: &Conversation,
        key: KeyTag,
    ) -> Result<Vec<Token>, EngineError> {
        let template = Arc::clone(template);
        let mut conversation = conversation.clone();
        if let Some(link) = conversation.linked_images.first() {
            return Err(EngineError::not_fetched(link));
        }
        let images = std::mem::take(&mut conversation.images);
        let projector = self.images.clone();
        if !images.is_empty() && projector.is_none() {
            return Err(no_projector());
        }
        // A template may run for seconds, which would block other connections on an async thread.
        let max_bytes = self.max_bytes();
        let n_bytes = text_bytes(&conversation);
        let render = move || template.render_pieces(&conversation, max_bytes);
        let rendered = self.texts.run(key, n_bytes, render).await?;
        let pieces = match rendered {
            Ok(pieces) => pieces,
            Err(TemplateError::TooLong { prompt }) => return Err(self.overflow(prompt.into(), key).await),
            Err(TemplateError::Unavailable(reason)) => return Err(EngineError::Unavailable { reason }),
            Err(other) => return Err(EngineError::Template { message: other.to_string() }),
        };
        let tokenizer = Arc::clone(&self.tokenizer);
        let vocabulary = Arc::clone(&self.vocabulary);
        let turn = match &projector {
            Some(projector) if !images.is_empty() => projector.turn().await,
            _ => None,
        };
        let n_ctx = self.info.n_ctx;
        let is_abandoned = CancellationToken::new();
        // Stops decoding images if the caller is dropped.
        let _abandons = is_abandoned.clone().drop_guard();
        let n_bytes = pieces.iter().map(|piece| piece.text.len()).sum();
        let tokenized = self.texts.run(key, n_bytes, move || {
            let _turn = turn;
            let mut prompt = PromptTokens {
                tokenizer: &*tokenizer,
                vocabulary: &vocabulary,
                projector,
                n_ctx,
                is_abandoned,
                tokens: Vec::new(),
            };
            prompt.add(&pieces, &images).map(|()| prompt.tokens)
        });
        tokenized.await?
    }

    pub(super) async fn tokenize_text(&self, request: TokenizeRequest) -> Result<Vec<Token>, EngineError> {
        if request.text.len() > self.max_bytes() {
            return Err(self.overflow(request.text, request.key).await);
        }
        let tokenizer = Arc::clone(&self.tokenizer);
        let is_abandoned = CancellationToken::new();
        let _abandons = is_abandoned.clone().drop_guard();
        // A megabyte of text takes long enough to block other connections.
        let (key, n_bytes) = (request.key, request.text.len());
        let work = move || tokenizer.tokenize(&request.text, request.add_special, request.parse_special, &is_abandoned);
        self.texts.run(key, n_bytes, work).await?
    }

    /// Tokenizes a query and a document for a reranker.
    pub(super) async fn tokenize_pair(&self, request: &PairRequest) -> Result<Vec<Token>, EngineError> {
        let PairRequest { query, document, key } = request;
        match &self.pairs {
            None => Err(EngineError::Unsupported { feature: "reranking: its model is no reranker".into() }),
            Some(PairForm::Template(template)) => {
                let messages = [query, document.as_str()].map(|text| Message::new(MessageRole::User, text.to_owned()));
                let conversation = Conversation { messages: messages.into(), ..Conversation::default() };
                self.render_with(template, &conversation, *key).await
            }
            Some(PairForm::Joined(Joints { before, between, after })) => {
                let text = |text: &str| TokenizeRequest {
                    text: text.into(),
                    add_special: false,
                    parse_special: false,
                    key: *key,
                };
                let query = self.tokenize_text(text(query)).await?;
                let document = self.tokenize_text(text(document)).await?;
                Ok([&before[..], &query, between, &document, after].concat())
            }
        }
    }

    /// The longest text that can fit the context, bytes. Longer text is refused before it is tokenized, since that
    /// cannot be interrupted.
    fn max_bytes(&self) -> usize {
        self.vocabulary.longest_piece().max(1).saturating_mul(self.info.n_ctx as usize + 1)
    }

    /// The error for a text that cannot fit. Clients remove as much of a conversation as the number of tokens says. Here
    /// it is an estimate from samples of the text.
    async fn overflow(&self, text: Arc<str>, key: KeyTag) -> EngineError {
        let tokenizer = Arc::clone(&self.tokenizer);
        let n_ctx = self.info.n_ctx;
        let estimate = self.texts.run(key, SAMPLE_BYTES, move || estimate(&*tokenizer, &text)).await;
        match estimate.and_then(|estimate| estimate) {
            Ok(n_prompt) => EngineError::ContextOverflow { n_prompt: n_prompt.max(n_ctx.saturating_add(1)), n_ctx },
            Err(error) => error,
        }
    }
}

/// Samples from which the tokens of a long text are estimated.
const N_SAMPLES: usize = 32;

/// The length of a sample, bytes. The tokenizer works on so short a text in less than a millisecond.
const SAMPLE_BYTES: usize = 1000;

/// Estimates the number of tokens in a long text, from samples at equal distances.
fn estimate(tokenizer: &dyn TextTokenizer, text: &str) -> Result<u32, EngineError> {
    let (mut n_tokens, mut n_bytes) = (0, 0);
    for i in 0..N_SAMPLES {
        let start = char_start(text, text.len() / N_SAMPLES * i);
        let end = char_start(text, start + SAMPLE_BYTES.min(text.len() / N_SAMPLES));
        n_tokens += tokenizer.tokenize(&text[start..end], false, true, &CancellationToken::new())?.len();
        n_bytes += end - start;
    }
    let n_estimated = n_tokens as u64 * text.len() as u64 / n_bytes.max(1) as u64;
    Ok(u32::try_from(n_estimated).unwrap_or(u32::MAX))
}

/// Where the character begins that contains the byte at `index`.
fn char_start(text: &str, index: usize) -> usize {
    (0..=index).rev().find(|&start| text.is_char_boundary(start)).unwrap_or_default()
}

/// The length of the texts that a template sees, without images.
fn text_bytes(conversation: &Conversation) -> usize {
    let Conversation { messages, tools, template_args, images: _, linked_images: _ } = conversation;
    let of_message = |message: &Message| {
        let Message { role: _, content, reasoning_content, thinking, tool_calls, tool_call_id, name } = message;
        let rest = [reasoning_content, thinking, tool_call_id, name].into_iter().flatten().map(String::len);
        content.len() + rest.sum::<usize>() + tool_calls.iter().map(value_bytes).sum::<usize>()
    };
    let args = template_args.values().map(value_bytes).sum::<usize>();
    messages.iter().map(of_message).sum::<usize>() + tools.iter().map(value_bytes).sum::<usize>() + args
}

/// The length of the texts in a JSON value. Parsers bound its depth.
fn value_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(value_bytes).sum(),
        Value::Object(fields) => fields.iter().map(|(name, value)| name.len() + value_bytes(value)).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

/// Tokenizes a rendered prompt, piece by piece. Its caller adds BOS if the template did not.
struct PromptTokens<'a> {
    tokenizer: &'a dyn TextTokenizer,
    vocabulary: &'a Vocabulary,
    projector: Option<Arc<dyn ImageEncoder>>,
    /// The most tokens; the check comes before each further image is decoded.
    n_ctx: u32,
    /// Cancelled when the caller has gone.
    is_abandoned: CancellationToken,
    tokens: Vec<Token>,
}

impl PromptTokens<'_> {
    /// Adds all pieces, with placeholders in place of the images' marks. Errors: the template left out an image or
    /// repeated one.
    fn add(&mut self, pieces: &[TemplatePiece], images: &[Image]) -> Result<(), EngineError> {
        let marks: Vec<String> = images.iter().map(Image::mark).collect();
        let mut n_images = 0;
        for piece in pieces {
            for segment in segments(&piece.text, &marks) {
                match segment {
                    Segment::Text(text) => self.add_text(text, piece.has_control)?,
                    Segment::Image(idx) => {
                        n_images += 1;
                        self.add_image(&images[idx])?;
                    }
                }
            }
        }
        if n_images != images.len() {
            let message = format!("its prompt would have {n_images} of {} images", images.len());
            return Err(EngineError::Template { message });
        }
        Ok(())
    }

    fn add_text(&mut self, text: &str, has_control: bool) -> Result<(), EngineError> {
        let tokens = match has_control {
            true => self.tokenizer.tokenize(text, false, true, &self.is_abandoned)?,
            false => self.tokenizer.tokenize_plain(text, &self.is_abandoned)?,
        };
        // Some tokenizers merge characters into any token of the vocabulary, even a control token.
        if !has_control && tokens.iter().any(|&t| self.vocabulary.is_control(t)) {
            let message = "a message spells a control token of this model, which its tokenizer cannot read as text";
            return Err(EngineError::invalid(message));
        }
        self.tokens.extend(tokens);
        Ok(())
    }

    fn add_image(&mut self, image: &Image) -> Result<(), EngineError> {
        let projector = self.projector.as_ref().ok_or_else(no_projector)?;
        if self.is_abandoned.is_cancelled() {
            return Err(EngineError::internal("the caller of the prompt has gone"));
        }
        self.tokens.extend(image.placeholders(&projector.shape(image)?));
        match u32::try_from(self.tokens.len()).unwrap_or(u32::MAX) {
            n_prompt if n_prompt > self.n_ctx => Err(EngineError::ContextOverflow { n_prompt, n_ctx: self.n_ctx }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_conversation_is_as_long_as_its_texts() {
        let message = Message {
            reasoning_content: Some("think".into()),
            tool_calls: vec![json!({ "arguments": { "a": ["bc", 1] } })],
            ..Message::new(MessageRole::Assistant, "text".into())
        };
        let image = Image::new(vec![0; 1 << 20], "image");
        let conversation = Conversation {
            messages: vec![message, Message::new(MessageRole::User, "\u{1}".repeat(1_000))],
            tools: vec![json!({ "name": "f" })],
            images: vec![image],
            ..Conversation::default()
        };
        assert_eq!(text_bytes(&conversation), 9 + 12 + 1_000 + 5);
    }
}
