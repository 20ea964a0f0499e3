//! Renders and tokenizes a request's input on a node that holds the model, and checks that it fits.

use std::sync::Arc;

use baton_reply::tools::{self, NoThinking, ReplyForm};
use baton_schemas::generate::{ChatPrompt, InfillNames, Input};
use baton_schemas::image::{Image, LinkedImage};
use baton_schemas::node::{NodeInfo, TokenizeRequest};
use baton_schemas::{EngineError, GenerateRequest, KeyTag, Token};

use crate::error::RequestError;
use crate::targets::nodes::Node;

/// Bytes of a client's prediction that are tokenized for each token that the reply may have. Few tokens are longer, and what is cut off
/// only is not guessed.
const BYTES_PER_PREDICTED_TOKEN: usize = 32;

/// A request's prompt, as sent to engines.
pub struct PreparedPrompt {
    /// The whole prompt.
    pub tokens: Vec<Token>,
    /// The format in which the model writes reasoning, tool calls and text.
    pub form: ReplyForm,
    /// The projector that encodes its images, if it has any.
    pub projector: Option<String>,
    /// The maximum number of new tokens, within the client's own context size.
    pub max_tokens: Option<u32>,
    /// The tokens of the reply that the client expects, no more than a reply can have.
    pub predicted: Vec<Token>,
}

/// A node that prepares prompts for a key.
#[derive(Clone, Copy)]
pub struct PromptNode<'a> {
    pub node: &'a Node,
    pub info: &'a NodeInfo,
    /// Whose prompts they are.
    pub key: KeyTag,
}

/// Renders and tokenizes a prompt on a node that holds the model. `n_ctx` is the longest context of the model's nodes.
///
/// Errors: the model does not support the request; or the prompt exceeds `n_ctx` or the context size that the client
/// chose. Thus a context overflow is reported before any stream starts.
pub async fn prepare(
    at: PromptNode<'_>,
    n_ctx: u32,
    request: &GenerateRequest,
) -> Result<PreparedPrompt, RequestError> {
    let info = at.info;
    check_vocabulary("logit_bias", request.sampling.logit_bias.iter().map(|(token, _)| *token), info)?;
    let form = ReplyForm::of(request, &info.facts.chat_template)
        .map_err(|NoThinking| RequestError::Incapable { model: request.model.clone(), capability: "thinking" })?;
    let tokens = tokens(at, n_ctx, request, &form).await;
    let tokens = tokens.map_err(|error| match request.input {
        Input::Chat(_) => error,
        Input::Text(_) | Input::Tokens(_) => error.about_text("prompt"),
        Input::Infill { names, .. } => error.about_text(names.prefix),
    })?;
    let projector = info.projector.clone().filter(|_| !request.images().is_empty());
    let max_tokens = request.max_tokens_after(tokens.len() as u32, n_ctx);
    let predicted = predicted(at, request, max_tokens.unwrap_or(n_ctx) as usize).await?;
    Ok(PreparedPrompt { tokens, form, projector, max_tokens, predicted })
}

/// The tokens that the client expects of a reply with `n_max` tokens at most. A repeatable reply is not guessed.
async fn predicted(at: PromptNode<'_>, request: &GenerateRequest, n_max: usize) -> Result<Vec<Token>, RequestError> {
    let Some(text) = request.predicted.as_ref().filter(|_| !request.sampling.repeatable) else { return Ok(Vec::new()) };
    let n_bytes = n_max.saturating_mul(BYTES_PER_PREDICTED_TOKEN).min(text.len());
    let end = (0..=n_bytes).rev().find(|&end| text.is_char_boundary(end)).unwrap_or_default();
    let of_reply = if end == text.len() { Arc::clone(text) } else { text[..end].into() };
    let mut tokens = match at.tokenize(of_reply, false, false).await {
        Ok(tokens) => tokens,
        // No reply is so long, so it predicts none.
        Err(EngineError::ContextOverflow { .. }) => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    tokens.truncate(n_max);
    Ok(tokens)
}

impl PreparedPrompt {
    /// Finds out whether the prompt leaves reasoning open. Call it before a reply is read; it asks the node once more.
    pub async fn read_tail(&mut self, node: &Node) -> Result<(), EngineError> {
        if let Some(tail) = self.form.prompt_tail(&self.tokens) {
            self.form.read_prompt_tail(&node.engine.detokenize(tail).await?);
        }
        Ok(())
    }
}

/// Refuses tokens that are not in the model's vocabulary.
pub fn check_vocabulary(
    field: &'static str,
    mut tokens: impl Iterator<Item = Token>,
    info: &NodeInfo,
) -> Result<(), RequestError> {
    tokens.find(|token| *token >= info.n_vocab).map_or(Ok(()), |token| {
        let problem = format!("token {token} is not in the model's vocabulary of {} tokens", info.n_vocab);
        Err(RequestError::InvalidField { field, problem })
    })
}

/// Returns the prompt's tokens. Errors: there are more than `n_ctx`, or than the client chose.
async fn tokens(
    at: PromptNode<'_>,
    n_ctx: u32,
    request: &GenerateRequest,
    form: &ReplyForm,
) -> Result<Vec<Token>, RequestError> {
    let PromptNode { node, info, key } = at;
    refuse_linked(request.linked_images())?;
    check_image_support(request.images(), info)?;
    check_vocabulary("context", request.earlier_tokens().iter().copied(), info)?;
    let tokens = match &request.input {
        Input::Chat(conversation) => {
            let rendered = node.engine.render(&form.present(conversation), key).await?;
            continued(at, request.earlier_tokens(), rendered).await?
        }
        // A raw prompt may contain control tokens as text. A message may not: see the engine's `guard`.
        Input::Text(text) => at.tokenize(Arc::clone(text), !begins(text, info), true).await?,
        Input::Infill { prefix, suffix, names } => infill(at, [prefix, suffix], *names).await?,
        Input::Tokens(tokens) => {
            check_vocabulary("prompt", tokens.iter().copied(), info)?;
            tokens.clone()
        }
    };
    // Reserve room for one new token, unless the client wants none.
    let room_needed = usize::from(request.max_tokens != Some(0));
    let wanted = request.context_within(n_ctx);
    if tokens.len() + room_needed > wanted as usize {
        let n_prompt = tokens.len() as u32;
        return Err(match wanted < n_ctx {
            true => RequestError::ChosenContextExceeded { n_prompt, num_ctx: wanted, n_ctx },
            false => EngineError::ContextOverflow { n_prompt, n_ctx }.into(),
        });
    }
    Ok(tokens)
}

/// Renders the prompt of a chat, for counting or display. It may be longer than the context.
pub async fn of_chat(at: PromptNode<'_>, chat: &ChatPrompt) -> Result<Vec<Token>, RequestError> {
    let PromptNode { node, info, key } = at;
    refuse_linked(&chat.conversation.linked_images)?;
    check_image_support(&chat.conversation.images, info)?;
    let presented = tools::present(&chat.conversation, &chat.tools, &info.facts.chat_template);
    Ok(node.engine.render(&presented, key).await?)
}

/// Refuses linked images: nodes fetch none.
pub fn refuse_linked(linked: &[LinkedImage]) -> Result<(), RequestError> {
    linked.first().map_or(Ok(()), |link| Err(EngineError::not_fetched(link).into()))
}

/// Refuses images where the model has no projector.
fn check_image_support(images: &[Image], info: &NodeInfo) -> Result<(), RequestError> {
    match images.first() {
        Some(image) if info.projector.is_none() => {
            let why = "this model has no projector (--mmproj), with which it would see them";
            Err(RequestError::ImagesUnsupported { field: image.field().to_owned(), why })
        }
        _ => Ok(()),
    }
}

/// Appends a rendered conversation to the tokens of an earlier one.
async fn continued(at: PromptNode<'_>, earlier: &[Token], rendered: Vec<Token>) -> Result<Vec<Token>, RequestError> {
    if earlier.is_empty() {
        return Ok(rendered);
    }
    let bos = &at.info.facts.bos_token;
    let bos = if bos.is_empty() { Vec::new() } else { at.tokenize(bos.as_str(), false, true).await? };
    Ok([earlier, without_beginning(&rendered, &bos)].concat())
}

/// Removes the token that begins a prompt, so that the prompt can follow other tokens. If every turn begins with that
/// token, as with ChatML in some models, it is part of the turn and stays.
fn without_beginning<'a>(rendered: &'a [Token], bos: &[Token]) -> &'a [Token] {
    match (rendered, bos) {
        ([first, rest @ ..], [bos]) if first == bos && !rest.contains(bos) => rest,
        _ => rendered,
    }
}

/// Returns true if a text starts with the token that begins a prompt. A second such token would make the reply worse.
fn begins(text: &str, info: &NodeInfo) -> bool {
    let bos = &info.facts.bos_token;
    !bos.is_empty() && text.starts_with(bos.as_str())
}

/// Builds the prompt for infilling between two texts, in the order of llama.cpp's server and of these models' authors:
/// prefix, suffix, middle.
async fn infill(
    at: PromptNode<'_>,
    [prefix, suffix]: [&Arc<str>; 2],
    names: InfillNames,
) -> Result<Vec<Token>, RequestError> {
    let Some(control) = at.info.facts.infill else {
        return Err(RequestError::InvalidField {
            field: names.suffix,
            problem: "this model does not support insert: it has no tokens for it".to_owned(),
        });
    };
    // Only the three tokens below are control tokens.
    let before = at.tokenize(Arc::clone(prefix), false, false).await?;
    let after = at.tokenize(Arc::clone(suffix), false, false).await?;
    Ok([&[control.prefix], &before[..], &[control.suffix], &after[..], &[control.middle]].concat())
}

impl PromptNode<'_> {
    /// Tokenizes a text, as [`TokenizeRequest`] says.
    pub async fn tokenize(
        self,
        text: impl Into<Arc<str>>,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<Token>, EngineError> {
        let request = TokenizeRequest { text: text.into(), add_special, parse_special, key: self.key };
        self.node.engine.tokenize(&request).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_begins_the_prompt_alone_is_left_out_of_a_later_turn() {
        assert_eq!(without_beginning(&[1, 5, 6], &[1]), [5, 6]);
        assert_eq!(without_beginning(&[1, 5, 6, 1, 7], &[1]), [1, 5, 6, 1, 7], "each turn begins with it");
        assert_eq!(without_beginning(&[5, 1], &[1]), [5, 1]);
        assert_eq!(without_beginning(&[1, 5], &[]), [1, 5]);
        assert_eq!(without_beginning(&[], &[1]), [0; 0]);
    }
}
