//! The requests of `/tokenize`, `/detokenize` and `/apply-template`.

use schemars::JsonSchema;
use serde::de::SeqAccess;
use serde_json::json;

use crate::generate::ChatPrompt;
use crate::key_tag::KeyTag;
use crate::node::TokenizeRequest;
use crate::openai;
use crate::openai::TemplateBody;
use crate::openai::messages::ChatMessage;
use crate::request::InvalidRequest;
use crate::request::field::{Field, Required, missing, object};
use crate::request::foreign::{Foreign, NoOwnFields, NoReplyFields};
use crate::request::history::MessageList;
use crate::request::read::{Read, Reading, ValueProblem, read};
use crate::request::tool_choice::ChatToolsBody;
use crate::request::values::{ModelName, Tokens};
use crate::token::Token;

object! {
    /// A text to tokenize.
    #[schemars(
        rename = "TokenizeRequest",
        example = json!({ "content": "a text" }),
        extend("oneOf" = [
            { "required": ["content"], "properties": { "content": { "type": "string" } } },
            { "required": ["prompt"], "properties": { "prompt": { "type": "string" } } },
        ])
    )]
    pub struct TokenizeBody {
        /// The model whose vocabulary to use; by default the first model.
        model: Field<String>,
        /// The text. A body has either this or `prompt`.
        content: Field<String>,
        /// The text, under vLLM's name.
        prompt: Field<String>,
        /// Add the tokens that begin and end a text. By default not.
        add_special: Field<bool>,
        /// The same under vLLM's name, for `prompt`. By default they are added.
        add_special_tokens: Field<bool>,
        /// False: treat the spelling of a control token as plain text.
        parse_special: Field<bool>,
        /// List each token as an object with its `id` and its `piece`.
        with_pieces: Field<bool>,
        #[schemars(skip)]
        foreign: Foreign<NoOwnFields>,
    }
}

object! {
    /// Tokens to convert to text.
    #[schemars(rename = "DetokenizeRequest", example = json!({ "tokens": [1, 2] }))]
    pub struct DetokenizeBody {
        /// The model whose vocabulary to use; by default the first model.
        model: Field<String>,
        /// The tokens.
        tokens: Required<TextTokens>,
        #[schemars(skip)]
        foreign: Foreign<NoOwnFields>,
    }
}

object! {
    /// A chat to render as a prompt.
    #[schemars(rename = "ApplyTemplateRequest", example = json!({ "messages": [{"role": "user", "content": "Hi."}] }))]
    pub struct ApplyTemplateBody {
        /// The model whose template to use; by default the first model.
        model: Field<String>,
        /// The conversation so far, oldest message first.
        messages: Required<MessageList<ChatMessage>>,
        /// The tools that the model may call.
        #[schemars(flatten)]
        tools: ChatToolsBody,
        /// Variables for the chat template.
        #[schemars(flatten)]
        template: TemplateBody,
        #[schemars(skip)]
        foreign: Foreign<NoReplyFields>,
    }
}

/// [`Tokens`] with this route's error for a wrong item.
#[derive(Debug, JsonSchema)]
#[schemars(inline)]
pub(crate) struct TextTokens(Tokens);

impl Read for TextTokens {
    const EXPECTED: &'static str = Tokens::EXPECTED;

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        let tokens = Tokens::array(items)?;
        Ok(tokens.map(TextTokens).map_err(|_| ValueProblem::value("must be an array of token ids")))
    }
}

/// A checked body of `POST /tokenize`.
#[derive(Debug, Clone, PartialEq)]
pub struct Tokenize {
    /// The model whose vocabulary to use; `None`: the first model.
    pub model: Option<String>,
    /// The text and how to tokenize it.
    pub text: TokenizeRequest,
    /// The form of the reply.
    pub form: TokenizeForm,
}

/// The form of the reply to `POST /tokenize`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenizeForm {
    /// Tokens.
    Tokens,
    /// Each token with its piece, as llama-server lists them.
    Pieces,
    /// Tokens and their number, as vLLM answers.
    Vllms,
}

/// A checked body of `POST /detokenize`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Detokenize {
    /// The model whose vocabulary to use; `None`: the first model.
    pub model: Option<String>,
    /// The tokens.
    pub tokens: Vec<Token>,
}

/// A checked body of `POST /apply-template`.
#[derive(Debug, Clone, PartialEq)]
pub struct ApplyTemplate {
    /// The model whose template to use; `None`: the first model.
    pub model: Option<String>,
    /// The chat to render.
    pub chat: ChatPrompt,
}

impl Tokenize {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let body: TokenizeBody = read(body)?;
        let with_pieces = body.with_pieces.get("")?.unwrap_or(false);
        body.foreign.check()?;
        let add_special = body.add_special.get("")?.unwrap_or(false);
        let add_special_tokens = body.add_special_tokens.get("")?.unwrap_or(true);
        let (text, is_vllms) = match (body.content.get("")?, body.prompt.get("")?) {
            (Some(_), Some(_)) => return Err(InvalidRequest::at("prompt", "is another name of 'content': send one")),
            (Some(text), None) => (text, false),
            (None, Some(text)) => (text, true),
            (None, None) => return Err(missing("", "content")),
        };
        let add_special = if is_vllms { add_special_tokens } else { add_special };
        let parse_special = body.parse_special.get("")?.unwrap_or(true);
        let text = TokenizeRequest { text: text.into(), add_special, parse_special, key: KeyTag::NONE };
        let form = match (with_pieces, is_vllms) {
            (false, false) => TokenizeForm::Tokens,
            (true, _) => TokenizeForm::Pieces,
            (false, true) => TokenizeForm::Vllms,
        };
        Ok(Tokenize { model: model(body.model)?, text, form })
    }
}

impl Detokenize {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let body: DetokenizeBody = read(body)?;
        body.foreign.check()?;
        Ok(Detokenize { tokens: body.tokens.get("")?.0.0, model: model(body.model)? })
    }
}

impl ApplyTemplate {
    /// Parses and checks a body. Messages and tools have OpenAI's form.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let body: ApplyTemplateBody = read(body)?;
        body.foreign.check()?;
        let conversation = openai::conversation(body.messages, body.template)?;
        Ok(ApplyTemplate { chat: ChatPrompt { conversation, tools: body.tools.check()? }, model: model(body.model)? })
    }
}

/// Checks the name of a model; `None`: the client named none.
pub(super) fn model(model: Field<String>) -> Result<Option<String>, InvalidRequest> {
    let Some(name) = model.get("")?.filter(|name| !name.is_empty()) else { return Ok(None) };
    ModelName::string(&name).map(|name| Some(name.0)).map_err(|problem| InvalidRequest::at("model", problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenize(body: &str) -> Option<(String, bool, bool)> {
        let text = Tokenize::parse(body.as_bytes()).ok()?.text;
        Some((text.text.to_string(), text.add_special, text.parse_special))
    }

    #[test]
    fn defaults_are_llama_servers() {
        assert_eq!(tokenize(r#"{"content": ""}"#), Some((String::new(), false, true)));
        let all = r#"{"content": "x", "add_special": true, "parse_special": false, "with_pieces": false}"#;
        assert_eq!(tokenize(all), Some(("x".into(), true, false)));
        for wrong in ["{}", r#"{"content": 1}"#, r#"{"content": "x", "with_pieces": 1}"#] {
            assert_eq!(tokenize(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn vllms_form_has_names_and_defaults_of_its_own() {
        assert_eq!(tokenize(r#"{"prompt": "x"}"#), Some(("x".into(), true, true)));
        assert_eq!(tokenize(r#"{"prompt": "x", "add_special_tokens": false}"#), Some(("x".into(), false, true)));
        assert_eq!(tokenize(r#"{"content": "x", "add_special_tokens": true}"#), Some(("x".into(), false, true)));
        let form = |body: &str| Tokenize::parse(body.as_bytes()).unwrap().form;
        assert_eq!(form(r#"{"prompt": ""}"#), TokenizeForm::Vllms);
        assert_eq!(form(r#"{"content": ""}"#), TokenizeForm::Tokens);
        assert_eq!(form(r#"{"content": "", "with_pieces": true}"#), TokenizeForm::Pieces);
        for wrong in [r#"{"prompt": "x", "content": "x"}"#, r#"{"prompt": "x", "return_token_strs": true}"#] {
            assert_eq!(tokenize(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn tokens_are_read_or_refused() {
        let tokens = |body: &str| Detokenize::parse(body.as_bytes()).ok().map(|request| request.tokens);
        assert_eq!(tokens(r#"{"tokens": [1, 2]}"#), Some(vec![1, 2]));
        assert_eq!(tokens(r#"{"tokens": []}"#), Some(vec![]));
        for wrong in ["{}", r#"{"tokens": [-1]}"#, r#"{"tokens": ["a"]}"#, r#"{"tokens": [4294967296]}"#] {
            assert_eq!(tokens(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_template_is_applied_to_messages_and_never_taken() {
        let parsed = |body: &str| ApplyTemplate::parse(body.as_bytes());
        let request = parsed(r#"{"messages": [{"role": "user", "content": "hi"}], "model": "m"}"#).unwrap();
        assert_eq!((request.chat.conversation.messages.len(), request.model.as_deref()), (1, Some("m")));
        let theirs = r#"{"messages": [{"role": "user", "content": "hi"}], "chat_template": "x"}"#;
        assert_eq!(parsed(theirs).unwrap_err().param.as_deref(), Some("chat_template"));
        assert!(parsed("{}").is_err());
    }
}
