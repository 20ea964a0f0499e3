//! `POST /api/generate`: a body → one [`GenerateRequest`](crate::GenerateRequest), or a wish to load the model.

use super::common::{self, LoadOnly};
use crate::generate::{Conversation, GenerateRequest as Generate, Input, Message};
use crate::request::fields::Fields;
use crate::request::images::Images;
use crate::request::{InvalidRequest, json};

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
        let generate = common::generate(root, input, drawn_seed)?;
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
    // No reply carries one, since nothing is stored: a client's own can only be made up.
    if root.array("context")?.is_some_and(|context| !context.is_empty()) {
        return Err(InvalidRequest::at("context", "is not taken; send the history to /api/chat"));
    }
    Ok(())
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
        refused(json!({"context": [1, 2]}), "context", "/api/chat");
        refused(json!({"prompt": ["hi"]}), "prompt", "string");
        refused(json!({"raw": 1}), "raw", "true or false");
        refused(json!({"images": ["aGk="]}), "images[0]", "PNG, JPEG");
        refused(json!({"images": ["https://example.com/a.png"]}), "images[0]", "never fetches");
        refused(json!({"images": ["iVBORw0KGgo="], "raw": true}), "images", "raw");
    }
}
