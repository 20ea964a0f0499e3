//! Answers questions about tokens: tokenize, detokenize, and the rendered prompt of a chat as text or as tokens.

use std::sync::Arc;

use baton_schemas::Token;
use baton_schemas::image::Image;
use baton_schemas::node::{NodeInfo, TokenizeRequest};
use baton_upstream::{TokenAnswer, TokenQuestion};

use super::caller::Caller;
use super::failover;
use super::prompt::{self, PromptNode};
use crate::admission::{Admission, RequestAdmission};
use crate::error::RequestError;
use crate::targets::model_loading::KeepWish;
use crate::targets::models::ServedModel;
use crate::targets::nodes::Node;
use crate::targets::{Target, Targets, upstreams};

/// Answers a question about tokens. Without a name, the first model that the caller may use answers.
pub async fn ask(
    admission: &Admission,
    targets: &Targets,
    model: Option<&str>,
    question: TokenQuestion<'_>,
    caller: &Caller,
) -> Result<TokenAnswer, RequestError> {
    let target = targets.resolve(model, &caller.account)?;
    // The rate before memory, and memory before admission, as for generation.
    caller.account.take_request()?;
    let _lease = targets.lease(&target, KeepWish::Unsaid).await?;
    let counted = match &target {
        Target::Nodes { model: served, .. } => {
            let _permit = admission.admit_brief(&caller.account).await?;
            ask_nodes(served, model, question, caller).await?
        }
        Target::Upstreams(serving) => {
            // It needs one of the upstream's places, so that questions to an upstream that hangs keep nobody from others.
            let permit = admission.enter(&caller.account, &RequestAdmission::default());
            let answer =
                upstreams::tokens(serving, &permit.places(&Arc::default()), question, &caller.request_id).await?;
            CountedAnswer { n_tokens: n_tokens(question, &answer), answer }
        }
    };
    // Counting the tokens of a prompt costs as much as preparing it.
    caller.account.charge_tokens(counted.n_tokens as u64);
    Ok(counted.answer)
}

/// An answer, and the tokens that were counted for it.
struct CountedAnswer {
    answer: TokenAnswer,
    n_tokens: usize,
}

/// Characters of a token, about, where an upstream returns only text.
const CHARS_PER_TOKEN: usize = 4;

fn n_tokens(question: TokenQuestion<'_>, answer: &TokenAnswer) -> usize {
    match (question, answer) {
        (_, TokenAnswer::Tokens(tokens)) => tokens.len(),
        (TokenQuestion::Detokenize(tokens), TokenAnswer::Text(_)) => tokens.len(),
        (_, TokenAnswer::Pieces(pieces)) => pieces.len(),
        (_, TokenAnswer::Text(text)) => text.len().div_ceil(CHARS_PER_TOKEN),
    }
}

async fn ask_nodes(
    served: &ServedModel,
    name: Option<&str>,
    question: TokenQuestion<'_>,
    caller: &Caller,
) -> Result<CountedAnswer, RequestError> {
    let key = caller.account.tag();
    let answer = |node: Arc<Node>, info: Arc<NodeInfo>| async move {
        let answer = match question {
            TokenQuestion::Tokenize(text) => {
                let tokens = node.engine.tokenize(&TokenizeRequest { key, ..text.clone() }).await;
                TokenAnswer::Tokens(tokens.map_err(|error| RequestError::from(error).about_text("content"))?)
            }
            TokenQuestion::Detokenize(tokens) => {
                check_vocabulary(tokens, &info)?;
                TokenAnswer::Text(node.engine.detokenize(tokens).await?)
            }
            TokenQuestion::Pieces(tokens) => {
                check_vocabulary(tokens, &info)?;
                TokenAnswer::Pieces(node.engine.pieces(tokens).await?)
            }
            TokenQuestion::TokenizeChat(chat) => {
                TokenAnswer::Tokens(prompt::of_chat(PromptNode { node: &node, info: &info, key }, chat).await?)
            }
            // Render through tokens: this gives exactly the prompt that a chat would get.
            TokenQuestion::Render(chat) => {
                let tokens = prompt::of_chat(PromptNode { node: &node, info: &info, key }, chat).await?;
                let answer = TokenAnswer::Text(node.engine.detokenize(&tokens).await?);
                return Ok(CountedAnswer { answer, n_tokens: tokens.len() });
            }
        };
        Ok(CountedAnswer { n_tokens: n_tokens(question, &answer), answer })
    };
    failover::ask(served, name, images(question), &caller.poison, answer).await
}

fn images(question: TokenQuestion<'_>) -> &[Image] {
    match question {
        TokenQuestion::Render(chat) | TokenQuestion::TokenizeChat(chat) => &chat.conversation.images,
        TokenQuestion::Tokenize(_) | TokenQuestion::Detokenize(_) | TokenQuestion::Pieces(_) => &[],
    }
}

fn check_vocabulary(tokens: &[Token], info: &NodeInfo) -> Result<(), RequestError> {
    prompt::check_vocabulary("tokens", tokens.iter().copied(), info)
}
