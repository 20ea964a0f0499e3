//! Answers questions about tokens: tokenize, detokenize, and the rendered prompt of a chat as text or as tokens.

use std::sync::Arc;

use baton_engines::upstream::{TokenAnswer, TokenQuestion};
use baton_schemas::Token;
use baton_schemas::image::Image;
use baton_schemas::node::NodeInfo;

use super::admission::Admission;
use super::caller::Caller;
use super::{failover, prompt};
use crate::error::RequestError;
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
    // Load before admission, as for generation.
    let _lease = targets.lease(&target, None).await?;
    let _permit = admission.admit_brief(&caller.account)?;
    match &target {
        Target::Nodes { model: served, .. } => ask_nodes(served, model, question).await,
        Target::Upstreams(serving) => upstreams::tokens(serving, question, &caller.request_id).await,
    }
}

async fn ask_nodes(
    served: &ServedModel,
    name: Option<&str>,
    question: TokenQuestion<'_>,
) -> Result<TokenAnswer, RequestError> {
    let answer = |node: Arc<Node>, info: Arc<NodeInfo>| async move {
        Ok(match question {
            TokenQuestion::Tokenize(text) => TokenAnswer::Tokens(node.engine.tokenize(text).await?),
            TokenQuestion::Detokenize(tokens) => {
                check_vocabulary(tokens, &info)?;
                TokenAnswer::Text(node.engine.detokenize(tokens).await?)
            }
            TokenQuestion::TokenizeChat(chat) => TokenAnswer::Tokens(prompt::of_chat(&node, &info, chat).await?),
            // Render through tokens: this gives exactly the prompt that a chat would get.
            TokenQuestion::Render(chat) => {
                let tokens = prompt::of_chat(&node, &info, chat).await?;
                TokenAnswer::Text(node.engine.detokenize(&tokens).await?)
            }
        })
    };
    failover::ask(served, name, images(question), answer).await
}

fn images(question: TokenQuestion<'_>) -> &[Image] {
    match question {
        TokenQuestion::Render(chat) | TokenQuestion::TokenizeChat(chat) => &chat.conversation.images,
        TokenQuestion::Tokenize(_) | TokenQuestion::Detokenize(_) => &[],
    }
}

fn check_vocabulary(tokens: &[Token], info: &NodeInfo) -> Result<(), RequestError> {
    let unknown = tokens.iter().find(|&&token| token >= info.n_vocab);
    unknown.map_or(Ok(()), |unknown| {
        let problem = format!("{unknown} is not in the model's vocabulary of {} tokens", info.n_vocab);
        Err(RequestError::InvalidField { field: "tokens", problem })
    })
}
