//! From a request's input to exact tokens, on the node that holds the model; and the check that they fit.

use baton_schemas::generate::Input;
use baton_schemas::node::{NodeInfo, TokenizeRequest};
use baton_schemas::{EngineError, GenerateRequest, Token};

use crate::error::RequestError;
use crate::pool::Node;

/// Renders and tokenizes. Context overflow is found here, before any stream starts.
pub async fn prepare(node: &Node, info: &NodeInfo, request: &GenerateRequest) -> Result<Vec<Token>, RequestError> {
    let tokens = match &request.input {
        Input::Chat(conversation) => node.engine.render(conversation).await?,
        Input::Text(text) => {
            let plain = TokenizeRequest { text: text.clone(), add_special: true, parse_special: false };
            node.engine.tokenize(&plain).await?
        }
        Input::Tokens(tokens) => tokens.clone(),
    };
    // Room for one new token, unless the client wants none.
    let room_needed = usize::from(request.max_tokens != Some(0));
    if tokens.len() + room_needed > info.n_ctx as usize {
        return Err(EngineError::ContextOverflow { n_prompt: tokens.len() as u32, n_ctx: info.n_ctx }.into());
    }
    Ok(tokens)
}
