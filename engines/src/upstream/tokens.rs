//! A text's tokens and their text, from upstreams that tell them: llama-server and vLLM, on routes of their own beside
//! OpenAI's.

use baton_schemas::node::TokenizeRequest;
use baton_schemas::{EngineError, Token};
use serde_json::{Value, json};

use super::{Kind, UpstreamError};

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub enum TokenQuestion<'a> {
    /// A text's tokens.
    Tokenize(&'a TokenizeRequest),
    /// The text of tokens.
    Detokenize(&'a [Token]),
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenAnswer {
    /// To [`TokenQuestion::Tokenize`].
    Tokens(Vec<Token>),
    /// To [`TokenQuestion::Detokenize`].
    Text(String),
}

/// The path behind the server's root, and the body. Errors: this kind does not tell.
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
        (Kind::Ollama | Kind::OpenAi, _) => {
            let feature = format!("tokens of a model that an upstream of kind {} serves", kind.as_str());
            return Err(UpstreamError::Refused(EngineError::Unsupported { feature }));
        }
    })
}

/// Reads the reply.
pub(super) fn read(question: TokenQuestion<'_>, reply: &Value) -> Result<TokenAnswer, UpstreamError> {
    let answer = match question {
        TokenQuestion::Tokenize(_) => {
            let tokens = reply.get("tokens").and_then(Value::as_array);
            let token = |token: &Value| Token::try_from(token.as_u64()?).ok();
            tokens.and_then(|tokens| tokens.iter().map(token).collect()).map(TokenAnswer::Tokens)
        }
        // llama-server's word, and vLLM's.
        TokenQuestion::Detokenize(_) => {
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
        for kind in [Kind::Ollama, Kind::OpenAi] {
            let refused = call(kind, "m", ask);
            assert!(matches!(refused, Err(UpstreamError::Refused(EngineError::Unsupported { .. }))));
        }
    }
}
