//! `messages` of `/api/chat` → the messages of a [`Conversation`](crate::generate::Conversation), in the form that chat
//! templates read.

use schemars::json_schema;
use serde_json::{Map, Value};

use crate::generate::Message;
use crate::image::MAX_IMAGES;
use crate::message_role::MessageRole;
use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, Required, join, object};
use crate::request::history::{template_call, with_joined_system_messages};
use crate::request::images::{ImageFile, Images};
use crate::request::schema::described;
use crate::request::values::{NonEmpty, Word, Words};

object! {
    /// A message of the conversation.
    pub(crate) struct OllamaMessage {
        /// Who speaks.
        role: Required<Word<MessageRole>>,
        /// The text.
        content: Field<String>,
        /// The model's reasoning before it answered.
        thinking: Field<String>,
        /// The calls that the model made.
        tool_calls: Field<Items<OllamaCall>>,
        /// The tool whose result this is.
        tool_name: Field<String>,
        /// The id of the call whose result this is.
        tool_call_id: Field<String>,
        /// PNG, JPEG, WebP or GIF files in base64, for a model with a projector.
        #[schemars(length(max = MAX_IMAGES))]
        images: Field<Items<ImageFile>>,
    }
}

impl Words for MessageRole {
    const WRONG: &'static str = "must be system, user, assistant or tool";
}

described!([] MessageRole: |_generator| {
    json_schema!({ "type": "string", "enum": MessageRole::ALL.map(MessageRole::as_str) })
});

object! {
    /// A call that the model made earlier.
    #[schemars(rename = "OllamaEarlierCall")]
    pub(crate) struct OllamaCall {
        /// The id that the call's result refers to.
        id: Field<String>,
        /// The function and its arguments.
        function: Required<OllamaFunction>,
    }
}

object! {
    /// A function that was called.
    #[schemars(rename = "OllamaEarlierFunction")]
    pub(crate) struct OllamaFunction {
        /// Its name.
        name: Required<NonEmpty>,
        /// Its arguments, as an object. OpenAI's API has a string here.
        arguments: Field<Map<String, Value>>,
    }
}

/// Returns the messages as templates read them, possibly none, and adds their images to `images`.
pub(super) fn check(
    messages: Field<Items<OllamaMessage>>,
    images: &mut Images,
) -> Result<Vec<Message>, InvalidRequest> {
    let messages = messages.get("")?.unwrap_or_default().each("messages").map(|message| {
        let (at, message) = message?;
        message.check(&at, images)
    });
    Ok(with_joined_system_messages(messages.collect::<Result<_, _>>()?))
}

impl OllamaMessage {
    fn check(self, at: &str, images: &mut Images) -> Result<Message, InvalidRequest> {
        let role = self.role.get(at)?.0;
        // Ollama puts images before the text.
        let marks = images.add_list(self.images, at)?;
        let mut tool_calls = Vec::new();
        for call in self.tool_calls.get(at)?.unwrap_or_default().each(&join(at, "tool_calls")) {
            let (at, call) = call?;
            let function = call.function.get(&at)?;
            let id = call.id.get(&at)?;
            let at = join(&at, "function");
            let name = function.name.get(&at)?.0;
            let arguments = function.arguments.get(&at)?.unwrap_or_default();
            tool_calls.push(template_call(id, &name, arguments.into()));
        }
        Ok(Message {
            role,
            content: marks + &self.content.get(at)?.unwrap_or_default(),
            reasoning_content: self.thinking.get(at)?.filter(|text| !text.is_empty()),
            tool_calls,
            tool_call_id: self.tool_call_id.get(at)?,
            name: self.tool_name.get(at)?,
            ..Message::default()
        })
    }
}
