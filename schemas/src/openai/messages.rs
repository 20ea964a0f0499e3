//! A client's `messages` → a [`Conversation`](crate::generate::Conversation)'s messages, in the one form that chat
//! templates read.

use schemars::{JsonSchema, Schema};
use serde::de::{MapAccess, SeqAccess};
use serde_json::{Map, Value, json};

use crate::generate::Message;
use crate::request::field::{Field, Items, Required, join, object};
use crate::request::images::Images;
use crate::request::read::{Read, Reading, ValueProblem};
use crate::request::schema::{Variant, described};
use crate::request::unsupported::Demand;
use crate::request::values::NonEmpty;
use crate::request::{InvalidRequest, history};

/// A history of at least one message.
#[derive(Debug)]
pub(crate) struct MessageList<M>(pub(crate) Items<M>);

impl<M: Read> Read for MessageList<M> {
    const EXPECTED: &'static str = "an array";
    const MISSING: &'static str = "must be an array of at least one message";

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        let messages = Items::array(items)?;
        Ok(messages.and_then(|messages: Items<M>| match messages.is_empty() {
            true => Err(ValueProblem::value(Self::MISSING)),
            false => Ok(MessageList(messages)),
        }))
    }
}

described!([M: JsonSchema] MessageList<M>: |generator| {
    let mut schema = Items::<M>::json_schema(generator);
    schema.insert("minItems".to_owned(), 1.into());
    schema
});

/// An assistant's message has at least one of these.
fn describe_assistant(schema: &mut Schema) {
    schema.ensure_object()["anyOf"][1]["anyOf"] = json!([
        {"required": ["content"]},
        {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
        {"required": ["function_call"], "properties": {"function_call": {"type": "object"}}},
        {"required": ["reasoning_content"], "properties": {"reasoning_content": {"type": "string"}}},
        {"required": ["reasoning"], "properties": {"reasoning": {"type": "string"}}},
    ]);
}

object! {
    /// A message of the history.
    #[schemars(transform = describe_assistant)]
    pub(crate) struct ChatMessage {
        /// Who speaks. `developer` is `system`, and `function` is `tool`.
        role: Field<String>,
        /// What is said. An assistant's message may have calls or reasoning instead.
        content: Field<Content>,
        /// The speaker's or the tool's name.
        name: Field<String>,
        /// Which call this is the result of.
        tool_call_id: Field<String>,
        /// The model's reasoning, kept for the template.
        reasoning_content: Field<String>,
        /// The same under OpenRouter's name.
        reasoning: Field<String>,
        /// What the model called.
        tool_calls: Field<Items<EarlierCall>>,
        /// What the model called, in the older form.
        function_call: Field<EarlierFunction>,
    }
    by "role" {
        Variant {
            words: &["system", "developer", "user", "tool", "function"],
            needs_key: &["content"],
            may_have: &["name", "tool_call_id", "reasoning_content", "reasoning"],
            ..Variant::NEW
        },
        Variant {
            words: &["assistant"],
            may_have: &[
                "content", "name", "tool_call_id", "reasoning_content", "reasoning", "tool_calls", "function_call",
            ],
            ..Variant::NEW
        },
    }
}

/// A message's content. Audio and files are a 400, and so are images for a model without a projector.
#[derive(Debug, JsonSchema)]
#[serde(untagged)]
pub(crate) enum Content {
    /// A text.
    Text(String),
    /// Texts, which newlines will join, and images.
    Parts(Items<ContentPart>),
}

impl Read for Content {
    const EXPECTED: &'static str = "a string, null or an array of parts";

    fn string(text: &str) -> Reading<Self> {
        Ok(Content::Text(text.to_owned()))
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        Ok(Items::array(items)?.map(Content::Parts))
    }
}

object! {
    /// A text or an image among others.
    pub(crate) struct ContentPart {
        /// What it is, in any dialect's words.
        r#type: Field<String>,
        /// The text.
        text: Field<String>,
        /// What the model said when it refused.
        refusal: Field<String>,
        /// The image itself: URLs are never fetched.
        image_url: Field<ImageUrl>,
        #[schemars(skip)]
        file_id: Field<Demand>,
    }
    by "type" {
        Variant { words: &["text", "input_text", "output_text"], needs: &["text"], ..Variant::NEW },
        Variant { words: &["refusal"], needs: &["refusal"], ..Variant::NEW },
        Variant { words: &["image_url", "input_image"], needs: &["image_url"], ..Variant::NEW },
    }
}

/// An image, plain or in an object.
#[derive(Debug, JsonSchema)]
#[serde(untagged)]
pub(crate) enum ImageUrl {
    /// As responses have it.
    Plain(DataUri),
    /// As chats have it.
    Object(ImageObject),
}

impl Read for ImageUrl {
    const EXPECTED: &'static str = "an object with a URL, or a URL";

    fn string(uri: &str) -> Reading<Self> {
        Ok(ImageUrl::Plain(DataUri(uri.to_owned())))
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(ImageObject::object(fields)?.map(ImageUrl::Object))
    }
}

object! {
    /// An image in an object.
    #[schemars(inline)]
    pub(crate) struct ImageObject {
        /// The image.
        url: Required<DataUri>,
    }
}

/// A PNG, JPEG, WebP or GIF file as a data URI in base64.
#[derive(Debug, JsonSchema)]
#[schemars(inline)]
pub(crate) struct DataUri(
    #[schemars(regex(pattern = r"^data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}$"))] String,
);

impl Read for DataUri {
    const EXPECTED: &'static str = String::EXPECTED;

    fn string(uri: &str) -> Reading<Self> {
        Ok(DataUri(uri.to_owned()))
    }
}

object! {
    /// A call that the model made earlier.
    pub(crate) struct EarlierCall {
        /// By which its result refers to it.
        id: Field<String>,
        /// The only type there is.
        #[schemars(extend("enum" = ["function", null]))]
        r#type: Field<String>,
        /// Which function, with what.
        function: Required<EarlierFunction>,
    }
}

object! {
    /// A function that was called.
    pub(crate) struct EarlierFunction {
        /// Its name.
        name: Required<NonEmpty>,
        /// Its arguments.
        arguments: Field<Arguments>,
    }
}

/// The arguments of an earlier call, as an object. What a model once wrote and nobody can parse stays a string:
/// refusing it would end the conversation for good, since the client replays its history with every request.
#[derive(Debug)]
pub(crate) struct Arguments(Value);

impl Arguments {
    /// Those of a call whose arguments may be missing.
    pub(crate) fn or_none(arguments: Option<Arguments>) -> Value {
        arguments.map_or_else(|| Value::Object(Map::new()), |arguments| arguments.0)
    }
}

impl Read for Arguments {
    const EXPECTED: &'static str = String::EXPECTED;

    fn string(text: &str) -> Reading<Self> {
        if text.trim().is_empty() {
            return Ok(Arguments(Value::Object(Map::new())));
        }
        Ok(Arguments(match serde_json::from_str(text) {
            Ok(object @ Value::Object(_)) => object,
            _ => text.into(),
        }))
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(Value::object(fields)?.map(Arguments))
    }
}

described!([] Arguments: named "Arguments", |_generator| {
    schemars::json_schema!({
        "description": "The arguments of a call.",
        "anyOf": [
            { "description": "As JSON in a string.", "type": "string" },
            { "description": "As they are.", "type": "object", "additionalProperties": true },
        ],
    })
});

impl MessageList<ChatMessage> {
    /// The messages as templates read them.
    pub(crate) fn check(self, images: &mut Images) -> Result<Vec<Message>, InvalidRequest> {
        let messages = self.0.each("messages").map(|message| {
            let (at, message) = message?;
            message.check(&at, images)
        });
        Ok(history::with_one_system_message(messages.collect::<Result<_, _>>()?))
    }
}

impl ChatMessage {
    fn check(self, at: &str, images: &mut Images) -> Result<Message, InvalidRequest> {
        let role = match self.role.get(at)?.as_deref() {
            // OpenAI's newer name of the same thing; no template knows it.
            Some("system" | "developer") => "system",
            Some("user") => "user",
            Some("assistant") => "assistant",
            // What a tool was called before.
            Some("tool" | "function") => "tool",
            Some(other) => {
                let other = other.chars().take(40).collect::<String>();
                let problem =
                    format!("must be system, developer, user, assistant or tool, but is \"{}\"", other.escape_debug());
                return Err(InvalidRequest::at(join(at, "role"), problem));
            }
            None => return Err(InvalidRequest::at(join(at, "role"), "is missing")),
        };
        let mut tool_calls = Vec::new();
        if role == "assistant" {
            for call in self.tool_calls.get(at)?.unwrap_or_default().each(&join(at, "tool_calls")) {
                let (at, call) = call?;
                tool_calls.push(call.check(&at)?);
            }
            if let Some(call) = self.function_call.get(at)? {
                // It has no id: the result names the function.
                tool_calls.push(call.check(&join(at, "function_call"), None)?);
            }
        }
        // Two names are in use: DeepSeek's, which llama-server and vLLM took, and OpenRouter's.
        let (reasoning, elsewhere) = (self.reasoning_content.get(at)?, self.reasoning.get(at)?);
        let reasoning_content = reasoning.or(elsewhere);
        let may_be_missing = role == "assistant" && (!tool_calls.is_empty() || reasoning_content.is_some());
        if !self.content.has_key() && !may_be_missing {
            return Err(InvalidRequest::at(join(at, "content"), "is missing"));
        }
        let content = self.content.get(at)?.map(|content| content.check(&join(at, "content"), images)).transpose()?;
        Ok(Message {
            role: role.to_owned(),
            content: content.unwrap_or_default(),
            reasoning_content,
            tool_calls,
            tool_call_id: self.tool_call_id.get(at)?,
            name: self.name.get(at)?,
        })
    }
}

impl Content {
    /// The text. Text parts are joined by newlines, as llama-server does; images stand between them as marks.
    pub(crate) fn check(self, at: &str, images: &mut Images) -> Result<String, InvalidRequest> {
        let parts = match self {
            Content::Text(text) => return Ok(text),
            Content::Parts(parts) => parts,
        };
        let (mut content, mut after_text) = (String::new(), false);
        for part in parts.each(at) {
            let (at, part) = part?;
            match part.check(&at, images)? {
                PartText::Text(text) => {
                    if after_text {
                        content.push('\n');
                    }
                    after_text = true;
                    content.push_str(&text);
                }
                PartText::Image(mark) => {
                    after_text = false;
                    content.push_str(&mark);
                }
            }
        }
        Ok(content)
    }
}

/// What a part puts into the text.
enum PartText {
    Text(String),
    /// The mark of an image.
    Image(String),
}

impl ContentPart {
    fn check(self, at: &str, images: &mut Images) -> Result<PartText, InvalidRequest> {
        let (text, name) = match self.r#type.get(at)?.as_deref() {
            Some("text" | "input_text" | "output_text") => (self.text.get(at)?, "text"),
            Some("refusal") => (self.refusal.get(at)?, "refusal"),
            Some("image_url" | "input_image") => {
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
                    None => return Err(InvalidRequest::at(field, "is missing")),
                };
                return Ok(PartText::Image(mark));
            }
            // Here audio and files enter, once an engine can take them.
            Some(other) => {
                let other: String = other.chars().take(40).collect();
                let what = format!("Content of type \"{}\"", other.escape_debug());
                return Err(InvalidRequest::unsupported(at, what));
            }
            None => return Err(InvalidRequest::at(join(at, "type"), "is missing")),
        };
        text.map(PartText::Text).ok_or_else(|| InvalidRequest::at(join(at, name), "is missing"))
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
    /// The call as templates read it.
    fn check(self, at: &str, id: Option<String>) -> Result<Value, InvalidRequest> {
        let name = self.name.get(at)?.0;
        let arguments = Arguments::or_none(self.arguments.get(at)?);
        Ok(template_call(id, &name, arguments))
    }
}

/// A call in the form that chat templates read.
pub(crate) fn template_call(id: Option<String>, name: &str, arguments: Value) -> Value {
    let mut call = Map::new();
    if let Some(id) = id {
        call.insert("id".to_owned(), id.into());
    }
    call.insert("type".to_owned(), "function".into());
    call.insert("function".to_owned(), json!({ "name": name, "arguments": arguments }));
    Value::Object(call)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::read::read;

    object! {
        /// Has messages.
        struct WithMessages {
            messages: Required<MessageList<ChatMessage>>,
        }
    }

    fn parsed_with(messages: &Value, images: &mut Images) -> Result<Vec<Message>, InvalidRequest> {
        let body: WithMessages = read(json!({ "messages": messages }).to_string().as_bytes())?;
        body.messages.get("")?.check(images)
    }

    fn parsed(messages: &Value) -> Result<Vec<Message>, InvalidRequest> {
        parsed_with(messages, &mut Images::default())
    }

    /// `expected` is what the template sees.
    fn check(messages: Value, expected: Value) {
        assert_eq!(serde_json::to_value(parsed(&messages).unwrap()).unwrap(), expected, "{messages}");
    }

    fn refused(messages: Value, param: &str) {
        assert_eq!(parsed(&messages).unwrap_err().param.as_deref(), Some(param), "{messages}");
    }

    #[test]
    fn history_takes_the_form_templates_read() {
        check(json!([{"role": "user", "content": "hi"}]), json!([{"role": "user", "content": "hi"}]));
        check(
            json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
            json!([{"role": "user", "content": "a\nb"}]),
        );
        check(
            json!([
                {"role": "developer", "content": "one"},
                {"role": "user", "content": "hi", "name": "ann", "odd": 1},
                {"role": "system", "content": [{"type": "text", "text": "two"}]},
                {"role": "system", "content": ""},
            ]),
            json!([{"role": "system", "content": "one\n\ntwo"}, {"role": "user", "content": "hi", "name": "ann"}]),
        );
        check(json!([{"role": "assistant", "content": null}]), json!([{"role": "assistant", "content": ""}]));
        check(
            json!([{"role": "assistant", "reasoning": "hm"}, {"role": "assistant", "content": "x", "reasoning_content": "so"}]),
            json!([
                {"role": "assistant", "content": "", "reasoning_content": "hm"},
                {"role": "assistant", "content": "x", "reasoning_content": "so"},
            ]),
        );
    }

    #[test]
    fn tool_history_carries_arguments_as_objects() {
        let with = |arguments: Value| {
            json!([{"role": "assistant", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, "index": 0}]}])
        };
        let becomes = |arguments: Value| {
            json!([{"role": "assistant", "content": "", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]}])
        };
        check(with(json!("{\"a\":1}")), becomes(json!({"a": 1})));
        check(with(json!({"a": 1})), becomes(json!({"a": 1})));
        check(with(json!("")), becomes(json!({})));
        check(with(json!(null)), becomes(json!({})));
        check(with(json!("{\"a\":")), becomes(json!("{\"a\":")));
        check(with(json!("[1]")), becomes(json!("[1]")));
        refused(with(json!(7)), "messages[0].tool_calls[0].function.arguments");
        check(
            json!([{"role": "tool", "tool_call_id": "c1", "content": "4"}]),
            json!([{"role": "tool", "content": "4", "tool_call_id": "c1"}]),
        );
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        refused(json!(null), "messages");
        refused(json!([]), "messages");
        refused(json!("hi"), "messages");
        refused(json!(["hi"]), "messages[0]");
        refused(json!([{"content": "hi"}]), "messages[0].role");
        refused(json!([{"role": 1, "content": "hi"}]), "messages[0].role");
        refused(json!([{"role": "robot", "content": "hi"}]), "messages[0].role");
        refused(json!([{"role": "user"}]), "messages[0].content");
        let twice = json!([{"role": "user", "content": "", "reasoning_content": "", "reasoning": {}}]);
        refused(twice, "messages[0].reasoning");
        refused(json!([{"role": "assistant"}]), "messages[0].content");
        refused(json!([{"role": "user", "content": 7}]), "messages[0].content");
        refused(json!([{"role": "user", "content": ["a"]}]), "messages[0].content[0]");
        refused(json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text");
        refused(json!([{"role": "user", "content": [{"text": "a"}]}]), "messages[0].content[0].type");
        refused(json!([{"role": "assistant", "tool_calls": [{"id": "c"}]}]), "messages[0].tool_calls[0].function");
        refused(
            json!([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]),
            "messages[0].tool_calls[0].function.name",
        );
        let image = |part: Value, param: &str| {
            let text = json!({"type": "text", "text": "what is it?"});
            refused(json!([{"role": "user", "content": [text, part]}]), &format!("messages[0].content[1].{param}"));
        };
        image(json!({"type": "image_url", "image_url": {"url": "data:,"}}), "image_url.url");
        image(json!({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}), "image_url.url");
        image(json!({"type": "image_url", "image_url": {}}), "image_url.url");
        image(json!({"type": "image_url", "image_url": 7}), "image_url");
        image(json!({"type": "image_url"}), "image_url");
        image(json!({"type": "input_image", "file_id": "file-1"}), "file_id");
    }

    #[test]
    fn an_image_stands_in_the_text_as_its_mark() {
        let uri = "data:image/png;base64,iVBORw0KGgo=";
        let messages = json!([{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": "b"},
            {"type": "image_url", "image_url": {"url": uri, "detail": "low"}}, {"type": "text", "text": "c"},
            {"type": "input_image", "image_url": uri}, {"type": "text", "text": "d"}, {"type": "text", "text": "e"}]}]);
        let mut images = Images::default();
        let messages = parsed_with(&messages, &mut images).unwrap();
        let images = images.into_vec();
        let mark = images[0].mark();
        assert_eq!(messages[0].content, format!("a\nb{mark}c{mark}d\ne"));
        let fields: Vec<_> = images.iter().map(|image| image.field()).collect();
        assert_eq!(fields, ["messages[0].content[2].image_url.url", "messages[0].content[4].image_url"]);
    }
}
