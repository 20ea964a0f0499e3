//! The messages of a chat → the messages of a [`Conversation`](crate::generate::Conversation), in the form that chat
//! templates read.

use serde_json::Value;

use super::body::{ChatContent, ChatMessage, ContentPart, EarlierCall, EarlierFunction, ImageUrl};
use crate::generate::Message;
use crate::message_role::MessageRole;
use crate::request::InvalidRequest;
use crate::request::demand::Off;
use crate::request::field::{join, missing};
use crate::request::foreign::{CONTINUED, LAST_MESSAGE};
use crate::request::history::{JoinedParts, MessageList, template_call, with_joined_system_messages};
use crate::request::images::{IN_TEXT, Images, refuse_beside, wants_images};
use crate::request::invalid::quoted;

const IMAGE_PARTS: &str = "send them as parts of type 'image_url' in 'content'";

impl MessageList<ChatMessage> {
    /// Returns the messages as templates read them, and adds their images to `images`.
    pub(crate) fn check(self, images: &mut Images) -> Result<Vec<Message>, InvalidRequest> {
        let messages = self.0.each("messages").map(|message| {
            let (at, message) = message?;
            message.check(&at, images)
        });
        Ok(with_joined_system_messages(messages.collect::<Result<_, _>>()?))
    }
}

/// Returns the role that a word means to OpenAI. No template knows its newer name of the system, `developer`, or its
/// older name of a tool, `function`.
pub(crate) fn openai_role(word: &str) -> Option<MessageRole> {
    match word {
        "developer" => Some(MessageRole::System),
        "function" => Some(MessageRole::Tool),
        _ => MessageRole::of(word),
    }
}

impl ChatMessage {
    fn check(self, at: &str, images: &mut Images) -> Result<Message, InvalidRequest> {
        let word = self.role.required("role", at)?;
        let role = openai_role(&word).ok_or_else(|| {
            let problem = format!("must be system, developer, user, assistant or tool, but is {}", quoted(&word));
            InvalidRequest::at(join(at, "role"), problem)
        })?;
        if self.prefix.peek().is_some_and(|prefix| prefix.is_one(&Off::ZERO)) {
            return Err(InvalidRequest::unsupported_but(join(at, "prefix"), CONTINUED, LAST_MESSAGE));
        }
        refuse_beside(&self.images, role, at, IMAGE_PARTS)?;
        let mut tool_calls = Vec::new();
        if role == MessageRole::Assistant {
            for call in self.tool_calls.get(at)?.unwrap_or_default().each(&join(at, "tool_calls")) {
                let (at, call) = call?;
                tool_calls.push(call.check(&at)?);
            }
            if let Some(call) = self.function_call.get(at)? {
                // The older form has no id: the result names the function.
                tool_calls.push(call.check(&join(at, "function_call"), None)?);
            }
        }
        // Two names are in use: DeepSeek's, which llama-server and vLLM adopted, and OpenRouter's. Both are checked.
        let under_deepseeks_name = self.reasoning_content.get(at)?;
        let under_openrouters_name = self.reasoning.get(at)?;
        let reasoning_content = under_deepseeks_name.or(under_openrouters_name);
        let refusal = self.refusal.get(at)?.filter(|text| role == MessageRole::Assistant && !text.is_empty());
        let has_other = !tool_calls.is_empty() || reasoning_content.is_some() || refusal.is_some();
        let may_be_missing = role == MessageRole::Assistant && has_other;
        if !self.content.has_key() && !may_be_missing {
            return Err(missing(at, "content"));
        }
        let content = self.content.get(at)?.map(|content| content.check(&join(at, "content"), images)).transpose()?;
        // As Baton's own replies have them, one after the other.
        let texts = content.filter(|text| !text.is_empty()).into_iter().chain(refusal);
        Ok(Message {
            role,
            content: texts.collect::<Vec<_>>().join("\n\n"),
            reasoning_content,
            tool_calls,
            tool_call_id: self.tool_call_id.get(at)?,
            name: self.name.get(at)?,
            ..Message::default()
        })
    }
}

impl ChatContent {
    /// Returns the text, with marks where images are, and adds the images to `images`.
    pub(crate) fn check(self, at: &str, images: &mut Images) -> Result<String, InvalidRequest> {
        let parts = match self {
            ChatContent::Text(text) => return Ok(text),
            ChatContent::Parts(parts) => parts,
        };
        let mut joined = JoinedParts::default();
        for part in parts.each(at) {
            let (at, part) = part?;
            part.check(&at, images, &mut joined)?;
        }
        Ok(joined.into_string())
    }
}

impl ContentPart {
    fn check(self, at: &str, images: &mut Images, joined: &mut JoinedParts) -> Result<(), InvalidRequest> {
        match self.r#type.required("type", at)?.as_str() {
            "text" | "input_text" | "output_text" if self.image_url.is_given() => {
                return Err(InvalidRequest::unsupported_but(join(at, "image_url"), IN_TEXT, IMAGE_PARTS));
            }
            "text" | "input_text" | "output_text" if wants_images(&self.images) => {
                return Err(InvalidRequest::unsupported_but(join(at, "images"), IN_TEXT, IMAGE_PARTS));
            }
            "text" | "input_text" | "output_text" => joined.push_text(&self.text.required("text", at)?),
            "refusal" => joined.push_text(&self.refusal.required("refusal", at)?),
            "image_url" | "input_image" => {
                let field = join(at, "image_url");
                let mark = match self.image_url.get(at)? {
                    Some(ImageUrl::Plain(uri)) => images.add_uri(&uri.0, field)?,
                    Some(ImageUrl::Object(object)) => {
                        images.add_uri(&object.url.get(&field)?.0, join(&field, "url"))?
                    }
                    None if self.file_id.is_given() => {
                        let problem = "nothing is stored here: send the image itself as a data URI";
                        return Err(InvalidRequest::at(join(at, "file_id"), problem));
                    }
                    None => return Err(missing(at, "image_url")),
                };
                joined.push_image(&mark);
            }
            // As Anthropic's API has them.
            "image" => {
                let what = "Images as parts of type 'image'";
                return Err(InvalidRequest::unsupported_but(at, what, IMAGE_PARTS));
            }
            // Audio and files belong here once an engine can take them.
            other => return Err(InvalidRequest::unsupported(at, format!("Content of type {}", quoted(other)))),
        }
        Ok(())
    }
}

impl EarlierCall {
    fn check(self, at: &str) -> Result<Value, InvalidRequest> {
        if self.r#type.get(at)?.is_some_and(|kind| kind != "function") {
            return Err(InvalidRequest::unsupported(join(at, "type"), "A tool call other than 'function'"));
        }
        let function = self.function.get(at)?;
        let id = self.id.get(at)?;
        function.check(&join(at, "function"), id)
    }
}

impl EarlierFunction {
    /// Returns the call as templates read it.
    fn check(self, at: &str, id: Option<String>) -> Result<Value, InvalidRequest> {
        let name = self.name.get(at)?.0;
        let arguments = self.arguments.get(at)?.unwrap_or_default();
        Ok(template_call(id, &name, arguments.0))
    }
}
