//! Tokens of texts, texts of tokens, and prompts of chats, from upstreams that have routes for them besides OpenAI's
//! dialect: llama-server and vLLM.

use baton_schemas::generate::ChatPrompt;
use baton_schemas::node::TokenizeRequest;
use baton_schemas::{EngineError, Token};
use serde_json::Value;

use crate::kinds::openai::dialect;
use crate::{ApiCall, ApiPath, UpstreamError, UpstreamKind};

/// A question about tokens.
#[derive(Debug, Clone, Copy)]
pub enum TokenQuestion<'a> {
    /// A text's tokens.
    Tokenize(&'a TokenizeRequest),
    /// The text of tokens.
    Detokenize(&'a [Token]),
    /// The bytes of each token.
    Pieces(&'a [Token]),
    /// A chat's prompt, as text.
    Render(&'a ChatPrompt),
    /// A chat's prompt, as tokens.
    TokenizeChat(&'a ChatPrompt),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenAnswer {
    /// To [`TokenQuestion::Tokenize`] and [`TokenQuestion::TokenizeChat`].
    Tokens(Vec<Token>),
    /// To [`TokenQuestion::Detokenize`] and [`TokenQuestion::Render`].
    Text(String),
    /// To [`TokenQuestion::Pieces`].
    Pieces(Vec<Vec<u8>>),
}

/// A prompt's tokens, as the upstream counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptCount {
    pub n_tokens: u32,
    /// The size of the model's context, if the upstream says so.
    pub n_ctx: Option<u32>,
}

/// The error of a kind that has no routes for tokens.
pub(crate) fn unsupported(kind: UpstreamKind) -> UpstreamError {
    let feature = format!(
        "tokens, since an upstream of kind {} serves this model, whose API has no route for them \
         (llama-server's and vLLM's have)",
        kind.as_str()
    );
    UpstreamError::Refused(EngineError::Unsupported { feature })
}

/// The error of a kind that has no route for the bytes of tokens.
pub(crate) fn no_pieces(kind: UpstreamKind) -> UpstreamError {
    let kind = kind.as_str();
    let feature = format!("'with_pieces', since an upstream of kind {kind} serves this model");
    UpstreamError::Refused(EngineError::Unsupported { feature })
}

/// The request for a chat's prompt.
pub(crate) fn chat_prompt(path: ApiPath, model: &str, chat: &ChatPrompt) -> ApiCall {
    let conversation = &chat.conversation;
    let messages = dialect::messages(conversation, true, true).into();
    let mut call = ApiCall::new(path, [("model", model.into()), ("messages", messages)]);
    let tools: Vec<Value> = chat.tools.offered().iter().map(|tool| tool.definition()).collect();
    if !tools.is_empty() {
        call.body.set("tools", tools);
    }
    if !conversation.template_args.is_empty() {
        call.body.set("chat_template_kwargs", conversation.template_args.clone());
    }
    call
}

pub(crate) fn read(question: TokenQuestion<'_>, reply: &Value) -> Result<TokenAnswer, UpstreamError> {
    let answer = match question {
        TokenQuestion::Tokenize(_) | TokenQuestion::TokenizeChat(_) => {
            let tokens = reply.get("tokens").and_then(Value::as_array);
            let token = |token: &Value| Token::try_from(token.as_u64()?).ok();
            tokens.and_then(|tokens| tokens.iter().map(token).collect()).map(TokenAnswer::Tokens)
        }
        // llama-server's field, and vLLM's.
        TokenQuestion::Detokenize(_) | TokenQuestion::Render(_) => {
            let text = reply.get("content").or_else(|| reply.get("prompt")).and_then(Value::as_str);
            text.map(|text| TokenAnswer::Text(text.to_owned()))
        }
        // No kind is asked.
        TokenQuestion::Pieces(_) => None,
    };
    answer.ok_or_else(|| UpstreamError::malformed("a reply without what was asked for"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kinds::openai::tests::settings;

    fn call(kind: UpstreamKind, model: &str, question: TokenQuestion<'_>) -> Result<(ApiPath, Value), UpstreamError> {
        let call = kind.protocol().token_call(&settings(kind), model, question)?;
        Ok((call.path, call.body.into()))
    }

    #[test]
    fn two_kinds_have_routes_for_tokens_and_the_others_are_refused() {
        let text =
            TokenizeRequest { text: "hi".into(), add_special: true, parse_special: false, key: Default::default() };
        let ask = TokenQuestion::Tokenize(&text);
        let back = TokenQuestion::Detokenize(&[1]);
        let (path, body) = call(UpstreamKind::LlamaServer, "m", ask).unwrap();
        let route = ApiPath::Root("tokenize");
        assert_eq!((path, &body["content"], &body["add_special"]), (route, &json!("hi"), &json!(true)));
        assert_eq!(call(UpstreamKind::Vllm, "m", ask).unwrap().1["prompt"], "hi");
        assert_eq!(read(ask, &json!({"tokens": [1, 2]})), Ok(TokenAnswer::Tokens(vec![1, 2])));
        for text in [json!({"content": "x"}), json!({"prompt": "x"})] {
            assert_eq!(read(back, &text), Ok(TokenAnswer::Text("x".into())));
        }
        for wrong in [json!({}), json!({"tokens": [-1]}), json!({"tokens": [1.5]}), json!({"tokens": "1"})] {
            assert!(read(ask, &wrong).is_err(), "{wrong}");
        }
        let chat = ChatPrompt::default();
        assert_eq!(
            call(UpstreamKind::LlamaServer, "m", TokenQuestion::Render(&chat)).unwrap().0,
            ApiPath::Root("apply-template")
        );
        let (path, body) = call(UpstreamKind::Vllm, "m", TokenQuestion::TokenizeChat(&chat)).unwrap();
        assert_eq!((path, &body["messages"], body.get("tools")), (route, &json!([]), None));
        assert!(call(UpstreamKind::Vllm, "m", TokenQuestion::Render(&chat)).is_err());
        for kind in [UpstreamKind::Ollama, UpstreamKind::OpenAi] {
            let refused = call(kind, "m", ask);
            assert!(matches!(refused, Err(UpstreamError::Refused(EngineError::Unsupported { .. }))));
        }
    }
}
