//! `POST /api/generate`: a body → one [`GenerateRequest`](crate::GenerateRequest), or a wish to load the model.

use super::common::{self, LoadOnly};
use crate::generate::{Conversation, GenerateRequest as Generate, Input, Message};
use crate::request::fields::Fields;
use crate::request::images::Images;
use crate::request::{InvalidRequest, json, tokens};
use crate::sequence::Token;

/// Tokens of an earlier reply at most: more than any model's context holds.
pub(crate) const MAX_CONTEXT: usize = 1 << 20;

/// The greatest id that a token may have. From here on they are places of images.
pub(crate) const MAX_TOKEN: Token = (1 << 31) - 1;

/// A generation as the client asked for it.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateRequest {
    /// What to generate: one user message, with `raw` the prompt as it is, with `suffix` what stands between both.
    pub generate: Generate,
    /// Set if there is no prompt: then nothing is generated.
    pub load_only: Option<LoadOnly>,
    /// As lines of JSON.
    pub stream: bool,
}

impl GenerateRequest {
    /// Reads a body. `drawn_seed` is used where the client sent none.
    pub fn parse(body: &[u8], drawn_seed: u64) -> Result<Self, InvalidRequest> {
        let object = json::read_object(body)?;
        let root = Fields::root(&object);
        refuse(root)?;
        let prompt = root.string("prompt")?.unwrap_or_default();
        let mut images = Images::default();
        let marks = images.add_list(root, "images")?;
        let load_only = if prompt.is_empty() { Some(LoadOnly::of(root)?) } else { None };
        let suffix = root.string("suffix")?.filter(|suffix| !suffix.is_empty());
        let raw = root.boolean("raw")?.unwrap_or(false);
        if !marks.is_empty() && (raw || suffix.is_some()) {
            return Err(InvalidRequest::at(
                "images",
                "cannot go with \"raw\" or \"suffix\": only a chat template places them",
            ));
        }
        let input = match (suffix, raw) {
            (Some(suffix), _) => Input::Infill { prefix: prompt.to_owned(), suffix: suffix.to_owned() },
            (None, true) => Input::Text(prompt.to_owned()),
            (None, false) => {
                let messages = messages(root, &(marks + prompt))?;
                let (template_args, images) = (common::template_args(root), images.into_vec());
                Input::Chat(Conversation { messages, tools: Vec::new(), template_args, images })
            }
        };
        let context = context(root, &input)?;
        let generate = Generate { context, ..common::generate(root, input, drawn_seed)? };
        Ok(GenerateRequest { generate, load_only, stream: common::stream(root)? })
    }
}

fn messages(root: Fields<'_>, prompt: &str) -> Result<Vec<Message>, InvalidRequest> {
    let message =
        |role: &str, content: &str| Message { role: role.into(), content: content.into(), ..Message::default() };
    let system = root.string("system")?.filter(|system| !system.is_empty()).map(|text| message("system", text));
    Ok(system.into_iter().chain([message("user", prompt)]).collect())
}

/// What `/api/generate` alone has, and cannot have here.
fn refuse(root: Fields<'_>) -> Result<(), InvalidRequest> {
    // A template is a program, and could write control tokens that a message may not.
    if root.string("template")?.is_some_and(|template| !template.is_empty()) {
        return Err(InvalidRequest::at("template", "a chat template is never taken from a client; use \"raw\""));
    }
    Ok(())
}

/// `context`: the tokens that an earlier reply ended with. `None` where the reply is to tell none: what stands in one of
/// the prompts that are no conversation, or is an image, cannot be gone on with.
fn context(root: Fields<'_>, input: &Input) -> Result<Option<Vec<Token>>, InvalidRequest> {
    let items = root.array("context")?.unwrap_or_default();
    if items.len() > MAX_CONTEXT {
        let problem = format!("has {} tokens, but may have at most {MAX_CONTEXT}", items.len());
        return Err(InvalidRequest::at("context", problem));
    }
    let tokens = tokens::parse(items, "context")?;
    if tokens.iter().any(|token| *token > MAX_TOKEN) {
        return Err(InvalidRequest::at("context", "has an item that is not a token's id"));
    }
    match input {
        Input::Chat(conversation) if conversation.images.is_empty() => Ok(Some(tokens)),
        _ if tokens.is_empty() => Ok(None),
        _ => Err(InvalidRequest::at("context", "cannot go with \"raw\", \"suffix\" or \"images\"")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parsed(extra: Value) -> Result<GenerateRequest, InvalidRequest> {
        let mut body = json!({"model": "m", "prompt": "hi"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        GenerateRequest::parse(body.to_string().as_bytes(), 7)
    }

    fn check(extra: Value, expected: Value) {
        let input = parsed(extra.clone()).unwrap().generate.input;
        let got = match input {
            Input::Chat(conversation) => serde_json::to_value(conversation.messages).unwrap(),
            Input::Text(text) => json!(text),
            Input::Infill { prefix, suffix } => json!([prefix, suffix]),
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
        assert!(parsed(json!({})).unwrap().stream && !parsed(json!({"stream": false})).unwrap().stream);
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
