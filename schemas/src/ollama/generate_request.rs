//! `POST /api/generate`: a body → one [`GenerateRequest`], or a request to only load the model.

use serde_json::json;

use super::chat_request::OllamaFields;
use super::common::{Common, CommonBody, LoadOnly};
use crate::generate::{Conversation, GenerateRequest, InfillNames, Input, Message};
use crate::image::MAX_IMAGES;
use crate::message_role::MessageRole;
use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, object};
use crate::request::foreign::Foreign;
use crate::request::images::{ImageFile, Images};
use crate::request::read::read;
use crate::request::values::{NOT_A_TOKEN, Tokens};
use crate::token::Token;

/// The most tokens in `context`: more than any model can hold.
const MAX_CONTEXT: usize = 1 << 20;

/// The largest token id. Larger numbers are placeholders of images.
const MAX_TOKEN: Token = (1 << 31) - 1;

object! {
    /// A text to answer or continue. Without one, the model is only loaded, or unloaded if `keep_alive` is 0.
    #[schemars(rename = "OllamaGenerateRequest", example = json!({
        "model": "smollm2", "options": {"num_predict": 8}, "prompt": "Say hello."
    }))]
    pub struct OllamaGenerateBody {
        /// The user's message, or the whole prompt if `raw` is true.
        prompt: Field<String>,
        /// The text after the gap to fill; `prompt` is the text before it. Needs a model with infilling tokens.
        suffix: Field<String>,
        /// The system message.
        system: Field<String>,
        /// Use `prompt` as it is, without the chat template.
        raw: Field<bool>,
        /// PNG, JPEG, WebP or GIF files in base64, for a model with a projector.
        #[schemars(length(max = MAX_IMAGES))]
        images: Field<Items<ImageFile>>,
        /// The `context` of an earlier reply, to continue from there. Not allowed with `raw`, `suffix` or `images`.
        #[schemars(length(max = MAX_CONTEXT), inner(range(max = MAX_TOKEN)))]
        context: Field<Tokens>,
        /// The fields that `/api/chat` and `/api/generate` share.
        #[schemars(flatten)]
        common: CommonBody,
        #[schemars(skip)]
        template: Field<String>,
        #[schemars(skip)]
        foreign: Foreign<OllamaFields>,
    }
}

/// A checked body of `/api/generate`.
#[derive(Debug, Clone, PartialEq)]
pub struct OllamaGenerateRequest {
    /// What to generate: a reply to one message, the continuation of a raw prompt, or the text before a suffix.
    pub generate: GenerateRequest,
    /// Set if there is no prompt. Nothing is generated then.
    pub load_only: Option<LoadOnly>,
}

impl OllamaGenerateRequest {
    /// Parses and checks a body. `drawn_seed` is used if the client sent no seed.
    pub fn parse(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        let body: OllamaGenerateBody = read(body)?;
        body.foreign.check()?;
        // A template is a program: it could write control tokens, which messages may not.
        if body.template.get("")?.is_some_and(|template| !template.is_empty()) {
            return Err(InvalidRequest::at("template", "a chat template is never taken from a client; use \"raw\""));
        }
        let prompt = body.prompt.get("")?.unwrap_or_default();
        let mut images = Images::default();
        let marks = images.add_list(body.images, "")?;
        let is_empty = prompt.is_empty();
        let suffix = body.suffix.get("")?.filter(|suffix| !suffix.is_empty());
        let raw = body.raw.get("")?.unwrap_or(false);
        if !marks.is_empty() && (raw || suffix.is_some()) {
            return Err(InvalidRequest::at(
                "images",
                "cannot go with \"raw\" or \"suffix\": only a chat template places them",
            ));
        }
        let Common { generate, template_args } = body.common.check(drawn_seed, false)?;
        let input = match (suffix, raw) {
            (Some(suffix), _) => {
                Input::Infill { prefix: prompt.into(), suffix: suffix.into(), names: InfillNames::COMMON }
            }
            (None, true) => Input::Text(prompt.into()),
            (None, false) => {
                let system = body.system.get("")?.filter(|text| !text.is_empty());
                let system = system.map(|text| Message::new(MessageRole::System, text));
                let user = Message::new(MessageRole::User, marks + &prompt);
                let messages = system.into_iter().chain([user]).collect();
                let (images, linked_images) = images.into_lists();
                Input::Chat(Conversation { messages, tools: Vec::new(), template_args, images, linked_images })
            }
        };
        let load_only = is_empty.then(|| LoadOnly::of(generate.keep_alive));
        let context = context(body.context.get("")?, &input)?;
        Ok(OllamaGenerateRequest { generate: GenerateRequest { input, context, ..generate }, load_only })
    }
}

/// Checks the tokens of an earlier reply. Returns `None` for prompts that a later request cannot continue: those that
/// are not a conversation, or that contain images. Their replies have no `context`.
fn context(tokens: Option<Tokens>, input: &Input) -> Result<Option<Vec<Token>>, InvalidRequest> {
    let tokens = tokens.map(|tokens| tokens.0).unwrap_or_default();
    if tokens.len() > MAX_CONTEXT {
        let problem = format!("has {} tokens, but may have at most {MAX_CONTEXT}", tokens.len());
        return Err(InvalidRequest::at("context", problem));
    }
    if tokens.iter().any(|token| *token > MAX_TOKEN) {
        return Err(InvalidRequest::at("context", NOT_A_TOKEN));
    }
    match input {
        Input::Chat(conversation) if conversation.images.is_empty() => Ok(Some(tokens)),
        _ if tokens.is_empty() => Ok(None),
        _ => Err(InvalidRequest::at("context", "cannot go with \"raw\", \"suffix\" or \"images\"")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn parsed(extra: Value) -> Result<OllamaGenerateRequest, InvalidRequest> {
        let mut body = json!({"model": "m", "prompt": "hi"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        OllamaGenerateRequest::parse(body.to_string().as_bytes(), 7)
    }

    fn check(extra: Value, expected: Value) {
        let input = parsed(extra.clone()).unwrap().generate.input;
        let got = match input {
            Input::Chat(conversation) => serde_json::to_value(conversation.messages).unwrap(),
            Input::Text(text) => json!(&*text),
            Input::Infill { prefix, suffix, .. } => json!([&*prefix, &*suffix]),
            Input::Tokens(_) => panic!("tokens"),
        };
        assert_eq!(got, expected, "{extra}");
    }

    #[test]
    fn a_prompt_is_one_message_unless_it_is_raw() {
        let user = json!({"role": "user", "content": "hi"});
        check(json!({}), json!([user]));
        check(json!({"system": "", "suffix": "", "template": "", "context": []}), json!([user]));
        check(json!({"system": "be brief"}), json!([{"role": "system", "content": "be brief"}, user]));
        check(json!({"raw": true, "system": "be brief"}), json!("hi"));
        check(json!({"suffix": "there"}), json!(["hi", "there"]));
        let is_streamed = |extra| parsed(extra).unwrap().generate.is_streamed;
        assert!(is_streamed(json!({})) && !is_streamed(json!({"stream": false})));
    }

    #[test]
    fn a_context_goes_before_a_conversation_and_comes_back_of_one() {
        let context = |extra: Value| parsed(extra).unwrap().generate.context;
        assert_eq!(context(json!({})), Some(vec![]));
        assert_eq!(context(json!({"context": null})), Some(vec![]));
        assert_eq!(context(json!({"context": [0, 5, MAX_TOKEN]})), Some(vec![0, 5, MAX_TOKEN]));
        assert_eq!(context(json!({"raw": true, "context": []})), None);
        assert_eq!(context(json!({"suffix": "there"})), None);
        assert_eq!(context(json!({"images": ["iVBORw0KGgo="]})), None);
    }

    #[test]
    fn without_a_prompt_the_model_is_loaded_or_unloaded() {
        let load = |extra: Value| parsed(extra).unwrap().load_only;
        assert_eq!(load(json!({})), None);
        assert_eq!(load(json!({"prompt": ""})), Some(LoadOnly::Load));
        assert_eq!(load(json!({"prompt": null, "keep_alive": "0s"})), Some(LoadOnly::Unload));
    }

    #[test]
    fn what_cannot_be_honoured_is_named() {
        let refused = |extra: Value, param: &str, part: &str| {
            let error = parsed(extra.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{extra}");
            assert!(error.message.contains(part), "{}", error.message);
        };
        refused(json!({"think": 3}), "think", "must be true, false");
        refused(json!({"template": "{{ .Prompt }}"}), "template", "never taken from a client");
        for item in [json!(-1), json!("1"), json!(0.5), json!(1_u64 << 31), json!(1_u64 << 40)] {
            refused(json!({"context": [1, item]}), "context", "not a token's id");
        }
        refused(json!({"context": vec![1; MAX_CONTEXT + 1]}), "context", "at most 1048576");
        refused(json!({"context": [1], "raw": true}), "context", "raw");
        refused(json!({"context": [1], "suffix": "there"}), "context", "suffix");
        refused(json!({"context": [1], "images": ["iVBORw0KGgo="]}), "context", "images");
        refused(json!({"context": 1}), "context", "an array");
        refused(json!({"prompt": ["hi"]}), "prompt", "string");
        refused(json!({"raw": 1}), "raw", "true or false");
        refused(json!({"images": ["aGk="]}), "images[0]", "PNG, JPEG");
        refused(json!({"images": ["https://example.com/a.png"]}), "images[0]", "never fetches");
        refused(json!({"images": ["iVBORw0KGgo="], "raw": true}), "images", "raw");
    }
}
