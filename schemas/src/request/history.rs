//! The parts of a conversation's history that every dialect has: the list of messages, a message's content in parts,
//! earlier calls, and system messages.

use schemars::JsonSchema;
use serde::de::SeqAccess;
use serde_json::{Map, Value, json};

use super::field::Items;
use super::invalid::InvalidRequest;
use super::read::{Read, Reading, ValueProblem};
use super::schema::described;
use crate::generate::Message;
use crate::message_role::MessageRole;

const NO_MESSAGES: &str = "must be an array of at least one message";

/// The messages of a body: an array of at least one.
#[derive(Debug)]
pub(crate) struct MessageList<M>(pub(crate) Items<M>);

impl<M: Read> Read for MessageList<M> {
    const EXPECTED: &'static str = "an array";

    fn missing(field: String) -> InvalidRequest {
        InvalidRequest::at(field, NO_MESSAGES)
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        let messages = Items::array(items)?;
        Ok(messages.and_then(|messages: Items<M>| match messages.is_empty() {
            true => Err(ValueProblem::value(NO_MESSAGES)),
            false => Ok(MessageList(messages)),
        }))
    }
}

described!([M: JsonSchema] MessageList<M>: |generator| {
    let mut schema = Items::<M>::json_schema(generator);
    schema.insert("minItems".to_owned(), 1.into());
    schema
});

/// Joins the parts of a message's content. As in llama-server, a newline separates a text from a text right before it;
/// images are marks in the text, without newlines.
#[derive(Debug, Default)]
pub(crate) struct JoinedParts {
    joined: String,
    ends_with_text: bool,
}

impl JoinedParts {
    pub(crate) fn push_text(&mut self, text: &str) {
        if self.ends_with_text {
            self.joined.push('\n');
        }
        self.joined.push_str(text);
        self.ends_with_text = true;
    }

    pub(crate) fn push_image(&mut self, mark: &str) {
        self.joined.push_str(mark);
        self.ends_with_text = false;
    }

    pub(crate) fn into_string(self) -> String {
        self.joined
    }
}

/// Writes a call of an earlier turn in the form that chat templates read, with `arguments` as an object.
pub(crate) fn template_call(id: Option<String>, name: &str, arguments: Value) -> Value {
    let mut call = Map::new();
    if let Some(id) = id {
        call.insert("id".to_owned(), id.into());
    }
    call.insert("type".to_owned(), "function".into());
    call.insert("function".to_owned(), json!({ "name": name, "arguments": arguments }));
    Value::Object(call)
}

/// Joins system messages that follow each other, because some templates accept only one in a place, and drops empty ones.
/// An empty first one stays: it replaces the template's own system message.
pub(crate) fn with_joined_system_messages(messages: Vec<Message>) -> Vec<Message> {
    let mut joined: Vec<Message> = Vec::with_capacity(messages.len());
    for message in messages {
        let is_system = message.role == MessageRole::System;
        match joined.last_mut() {
            Some(_) if is_system && message.content.is_empty() => {}
            Some(last) if is_system && last.role == MessageRole::System => last.append(&message.content),
            _ => joined.push(message),
        }
    }
    joined
}
