//! From a request's input to exact tokens, on the node that holds the model; and the check that they fit.

use baton_reply::tools::{self, ReplyForm};
use baton_schemas::generate::{ChatPrompt, Input};
use baton_schemas::image::Image;
use baton_schemas::node::{NodeInfo, TokenizeRequest};
use baton_schemas::{EngineError, GenerateRequest, Token};

use crate::error::RequestError;
use crate::targets::nodes::Node;

/// Renders and tokenizes. Context overflow is found here, before any stream starts: what no node of the model that is
/// up holds, `n_ctx` tokens at most, or what the client wants to be the context.
pub async fn prepare(
    node: &Node,
    (info, n_ctx): (&NodeInfo, u32),
    request: &GenerateRequest,
    form: &ReplyForm,
) -> Result<Vec<Token>, RequestError> {
    check_sight(request.images(), info)?;
    check_earlier(request.earlier_tokens(), info)?;
    let n_ctx = request.context_within(n_ctx);
    let tokens = match &request.input {
        Input::Chat(conversation) => {
            let rendered = node.engine.render(&form.present(conversation)).await?;
            go_on(node, info, request.earlier_tokens(), rendered).await?
        }
        // Who writes the whole prompt writes its control tokens too. A message may not: see the engine's `guard`.
        Input::Text(text) => tokenize(node, text, !begins(text, info), true).await?,
        Input::Infill { prefix, suffix } => infill(node, info, prefix, suffix).await?,
        Input::Tokens(tokens) => tokens.clone(),
    };
    // Room for one new token, unless the client wants none.
    let room_needed = usize::from(request.max_tokens != Some(0));
    if tokens.len() + room_needed > n_ctx as usize {
        return Err(EngineError::ContextOverflow { n_prompt: tokens.len() as u32, n_ctx }.into());
    }
    Ok(tokens)
}

/// The prompt of a chat that is not generated from. It may be longer than the context.
pub async fn of_chat(node: &Node, info: &NodeInfo, chat: &ChatPrompt) -> Result<Vec<Token>, RequestError> {
    check_sight(&chat.conversation.images, info)?;
    let presented = tools::present(&chat.conversation, &chat.tools, &info.facts.chat_template);
    Ok(node.engine.render(&presented).await?)
}

/// Refuses images for a model that sees none.
fn check_sight(images: &[Image], info: &NodeInfo) -> Result<(), RequestError> {
    match images.first() {
        Some(image) if info.projector.is_none() => {
            let why = "this model has no projector (--mmproj), with which it would see them";
            Err(RequestError::Blind { field: image.field().to_owned(), why })
        }
        _ => Ok(()),
    }
}

/// Refuses tokens that no reply of this model can have ended with.
fn check_earlier(tokens: &[Token], info: &NodeInfo) -> Result<(), RequestError> {
    let unknown = tokens.iter().find(|token| **token >= info.n_vocab);
    unknown.map_or(Ok(()), |token| {
        let problem = format!("token {token} is not in the model's vocabulary of {} tokens", info.n_vocab);
        Err(RequestError::InvalidField { field: "context", problem })
    })
}

/// A conversation's tokens behind those of an earlier one.
async fn go_on(
    node: &Node,
    info: &NodeInfo,
    earlier: &[Token],
    rendered: Vec<Token>,
) -> Result<Vec<Token>, RequestError> {
    if earlier.is_empty() {
        return Ok(rendered);
    }
    let bos = &info.facts.bos_token;
    let bos = if bos.is_empty() { Vec::new() } else { tokenize(node, bos, false, true).await? };
    Ok([earlier, without_beginning(&rendered, &bos)].concat())
}

/// A prompt without the token that begins one: it is not the beginning any more. Where every turn begins with that token,
/// as ChatML's do in some models, it is a part of the turn, and stays.
fn without_beginning<'a>(rendered: &'a [Token], bos: &[Token]) -> &'a [Token] {
    match (rendered, bos) {
        ([first, rest @ ..], [bos]) if first == bos && !rest.contains(bos) => rest,
        _ => rendered,
    }
}

/// Whether a text spells the token that begins a prompt, as one from a chat template does. A second one would make the
/// model answer worse.
fn begins(text: &str, info: &NodeInfo) -> bool {
    let bos = &info.facts.bos_token;
    !bos.is_empty() && text.starts_with(bos.as_str())
}

/// The prompt upon which a model writes what stands between two texts, in the order that llama.cpp's server and the
/// makers of these models use: prefix, suffix, middle.
async fn infill(node: &Node, info: &NodeInfo, prefix: &str, suffix: &str) -> Result<Vec<Token>, RequestError> {
    let Some(control) = info.facts.infill else {
        return Err(RequestError::InvalidField {
            field: "suffix",
            problem: "this model does not support insert: it has no tokens for it".to_owned(),
        });
    };
    // Only the three tokens below are control tokens.
    let before = tokenize(node, prefix, false, false).await?;
    let after = tokenize(node, suffix, false, false).await?;
    Ok([&[control.prefix], &before[..], &[control.suffix], &after[..], &[control.middle]].concat())
}

async fn tokenize(node: &Node, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<Token>, RequestError> {
    let request = TokenizeRequest { text: text.to_owned(), add_special, parse_special };
    Ok(node.engine.tokenize(&request).await?)
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
