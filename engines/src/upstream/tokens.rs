//! A text's tokens and their text, and a chat's prompt, from upstreams that tell them: llama-server and vLLM, on routes of
//! their own beside OpenAI's.

use baton_schemas::generate::ChatPrompt;
use baton_schemas::node::TokenizeRequest;
use baton_schemas::{EngineError, Token};
use serde_json::{Value, json};

use super::{Kind, UpstreamError, openai};

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub enum TokenQuestion<'a> {
    /// A text's tokens.
    Tokenize(&'a TokenizeRequest),
    /// The text of tokens.
    Detokenize(&'a [Token]),
    /// A chat's prompt, as text.
    Render(&'a ChatPrompt),
    /// A chat's prompt, as tokens.
    TokenizeChat(&'a ChatPrompt),
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenAnswer {
    /// To [`TokenQuestion::Tokenize`] and [`TokenQuestion::TokenizeChat`].
    Tokens(Vec<Token>),
    /// To [`TokenQuestion::Detokenize`] and [`TokenQuestion::Render`].
    Text(String),
}

/// The path behind the server's root, and the body; of a question that takes two, the first. Errors: this kind does not
/// tell.
pub(super) fn call(
    kind: Kind,
    model: &str,
    question: TokenQuestion<'_>,
) -> Result<(&'static str, Value), UpstreamError> {
    Ok(match (kind, question) {
        (Kind::LlamaServer, TokenQuestion::Tokenize(request)) => {
            let (special, parse) = (request.add_special, request.parse_special);
            let body = json!({"model": model, "content": request.text, "add_special": special, "parse_special": parse});
            ("tokenize", body)
        }
        (Kind::LlamaServer, TokenQuestion::Detokenize(tokens)) => {
            ("detokenize", json!({"model": model, "tokens": tokens}))
        }
        (Kind::Vllm, TokenQuestion::Tokenize(request)) => {
            let body = json!({"model": model, "prompt": request.text, "add_special_tokens": request.add_special});
            ("tokenize", body)
        }
        (Kind::Vllm, TokenQuestion::Detokenize(tokens)) => ("detokenize", json!({"model": model, "tokens": tokens})),
        (Kind::LlamaServer, TokenQuestion::Render(chat) | TokenQuestion::TokenizeChat(chat)) => {
            ("apply-template", chat_of(model, chat))
        }
        (Kind::Vllm, TokenQuestion::TokenizeChat(chat)) => ("tokenize", chat_of(model, chat)),
        (Kind::Vllm, TokenQuestion::Render(_)) => {
            let feature = "a chat's prompt as text, since an upstream of kind vllm serves this model, whose API has \
                           no route for it (llama-server's has)";
            let feature = feature.to_owned();
            return Err(UpstreamError::Refused(EngineError::Unsupported { feature }));
        }
        (Kind::Ollama | Kind::OpenAi, _) => {
            let feature = format!(
                "tokens, since an upstream of kind {} serves this model, whose API has no route for them \
                 (llama-server's and vLLM's have)",
                kind.as_str()
            );
            return Err(UpstreamError::Refused(EngineError::Unsupported { feature }));
        }
    })
}

/// A chat for which nothing is generated.
fn chat_of(model: &str, chat: &ChatPrompt) -> Value {
    let conversation = &chat.conversation;
    let mut body = json!({ "model": model, "messages": openai::messages(conversation, true) });
    let tools: Vec<Value> = chat.tools.offered().iter().map(|tool| tool.definition()).collect();
    if !tools.is_empty() {
        body["tools"] = tools.into();
    }
    if !conversation.template_args.is_empty() {
        body["chat_template_kwargs"] = conversation.template_args.clone().into();
    }
    body
}

/// Reads the reply.
pub(super) fn read(question: TokenQuestion<'_>, reply: &Value) -> Result<TokenAnswer, UpstreamError> {
    let answer = match question {
        TokenQuestion::Tokenize(_) | TokenQuestion::TokenizeChat(_) => {
            let tokens = reply.get("tokens").and_then(Value::as_array);
            let token = |token: &Value| Token::try_from(token.as_u64()?).ok();
            tokens.and_then(|tokens| tokens.iter().map(token).collect()).map(TokenAnswer::Tokens)
        }
        // llama-server's word, and vLLM's.
        TokenQuestion::Detokenize(_) | TokenQuestion::Render(_) => {
            let text = reply.get("content").or_else(|| reply.get("prompt")).and_then(Value::as_str);
            text.map(|text| TokenAnswer::Text(text.to_owned()))
        }
    };
    answer.ok_or_else(|| UpstreamError::malformed("a reply without what was asked for"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_kinds_tell_tokens_and_the_others_say_that_they_do_not() {
        let text = TokenizeRequest { text: "hi".into(), add_special: true, parse_special: false };
        let (ask, back) = (TokenQuestion::Tokenize(&text), TokenQuestion::Detokenize(&[1]));
        let (path, body) = call(Kind::LlamaServer, "m", ask).unwrap();
        assert_eq!((path, &body["content"], &body["add_special"]), ("tokenize", &json!("hi"), &json!(true)));
        assert_eq!(call(Kind::Vllm, "m", ask).unwrap().1["prompt"], "hi");
        assert_eq!(read(ask, &json!({"tokens": [1, 2]})), Ok(TokenAnswer::Tokens(vec![1, 2])));
        for text in [json!({"content": "x"}), json!({"prompt": "x"})] {
            assert_eq!(read(back, &text), Ok(TokenAnswer::Text("x".into())));
        }
        for wrong in [json!({}), json!({"tokens": [-1]}), json!({"tokens": [1.5]}), json!({"tokens": "1"})] {
            assert!(read(ask, &wrong).is_err(), "{wrong}");
        }
        let chat = ChatPrompt::default();
        assert_eq!(call(Kind::LlamaServer, "m", TokenQuestion::Render(&chat)).unwrap().0, "apply-template");
        let (path, body) = call(Kind::Vllm, "m", TokenQuestion::TokenizeChat(&chat)).unwrap();
        assert_eq!((path, &body["messages"], body.get("tools")), ("tokenize", &json!([]), None));
        assert!(call(Kind::Vllm, "m", TokenQuestion::Render(&chat)).is_err());
        for kind in [Kind::Ollama, Kind::OpenAi] {
            let refused = call(kind, "m", ask);
            assert!(matches!(refused, Err(UpstreamError::Refused(EngineError::Unsupported { .. }))));
        }
    }
}
