//! The declaration of a chat's messages: what is read and what `/openapi.json` describes.

use schemars::{JsonSchema, Schema};
use serde::de::{MapAccess, SeqAccess};
use serde_json::{Map, Value, json};

use crate::json_values::count_values;
use crate::request::demand::Demand;
use crate::request::field::{Field, Items, Required, object};
use crate::request::read::{LONG_NUMBER_ROOM, Read, Reading, ValueProblem};
use crate::request::room;
use crate::request::schema::{Variant, described};
use crate::request::values::NonEmpty;
use crate::written_number::{self, MarkedJson};

/// Requires one of these fields in an assistant's message.
fn describe_assistant(schema: &mut Schema) {
    schema.ensure_object()["anyOf"][1]["anyOf"] = json!([
        {"required": ["content"]},
        {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
        {"required": ["function_call"], "properties": {"function_call": {"type": "object"}}},
        {"required": ["reasoning_content"], "properties": {"reasoning_content": {"type": "string"}}},
        {"required": ["reasoning"], "properties": {"reasoning": {"type": "string"}}},
        {"required": ["refusal"], "properties": {"refusal": {"type": "string"}}},
    ]);
}

object! {
    /// A message of the conversation.
    #[schemars(transform = describe_assistant)]
    pub(crate) struct ChatMessage {
        /// Who speaks. `developer` means `system`, and `function` means `tool`.
        role: Field<String>,
        /// The text. An assistant's message may have calls, reasoning or a refusal instead.
        content: Field<ChatContent>,
        /// The text with which the model refused.
        refusal: Field<String>,
        /// The speaker's or the tool's name.
        name: Field<String>,
        /// The id of the call whose result this is.
        tool_call_id: Field<String>,
        /// The model's earlier reasoning, for templates that show it.
        reasoning_content: Field<String>,
        /// The same under OpenRouter's name.
        reasoning: Field<String>,
        /// The calls that the model made.
        tool_calls: Field<Items<EarlierCall>>,
        /// The call that the model made, in the older form.
        function_call: Field<EarlierFunction>,
        #[schemars(skip)]
        prefix: Field<Demand>,
        #[schemars(skip)]
        images: Field<Demand>,
    }
    by "role" {
        Variant {
            words: &["system", "developer", "user", "tool", "function"],
            needs_key: &["content"],
            may_have: &["name", "tool_call_id", "reasoning_content", "reasoning", "refusal"],
            ..Variant::NEW
        },
        Variant {
            words: &["assistant"],
            may_have: &[
                "content",
                "refusal",
                "name",
                "tool_call_id",
                "reasoning_content",
                "reasoning",
                "tool_calls",
                "function_call",
            ],
            ..Variant::NEW
        },
    }
}

/// A message's content. Audio and files are a 400. So are images for a model without a projector.
#[derive(Debug, JsonSchema)]
#[schemars(rename = "Content")]
#[serde(untagged)]
pub(crate) enum ChatContent {
    /// A text.
    Text(String),
    /// Texts, joined by newlines, and images.
    Parts(Items<ContentPart>),
}

impl Read for ChatContent {
    const EXPECTED: &'static str = "a string, null or an array of parts";

    fn string(text: &str) -> Reading<Self> {
        Ok(ChatContent::Text(text.to_owned()))
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        Ok(Items::array(items)?.map(ChatContent::Parts))
    }
}

object! {
    /// A text or an image of a content in parts.
    pub(crate) struct ContentPart {
        /// The kind of part, in the words of chats or responses.
        r#type: Field<String>,
        /// The text.
        text: Field<String>,
        /// The text with which the model refused.
        refusal: Field<String>,
        /// The image as a data URI. Baton fetches no URL: it passes one only to an upstream that does, if the operator allows it.
        image_url: Field<ImageUrl>,
        #[schemars(skip)]
        file_id: Field<Demand>,
        #[schemars(skip)]
        images: Field<Demand>,
    }
    by "type" {
        Variant { words: &["text", "input_text", "output_text"], needs: &["text"], ..Variant::NEW },
        Variant { words: &["refusal"], needs: &["refusal"], ..Variant::NEW },
        Variant { words: &["image_url", "input_image"], needs: &["image_url"], ..Variant::NEW },
    }
}

/// An image's data URI, plain or in an object.
#[derive(Debug, JsonSchema)]
#[serde(untagged)]
pub(crate) enum ImageUrl {
    /// The form of `/v1/responses`.
    Plain(DataUri),
    /// The form of `/v1/chat/completions`.
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
        /// The image as a data URI.
        url: Required<DataUri>,
    }
}

/// A PNG, JPEG, WebP or GIF file as a data URI in base64.
#[derive(Debug, JsonSchema)]
#[schemars(inline)]
pub(crate) struct DataUri(
    #[schemars(regex(pattern = r"^data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}$"))] pub(super) String,
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
        /// The id that the call's result refers to.
        id: Field<String>,
        /// The only supported type.
        #[schemars(extend("enum" = ["function", null]))]
        r#type: Field<String>,
        /// The function and its arguments.
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

/// The arguments of an earlier call, as an object. Arguments that are not an object stay a string: the client sends the
/// history with every request, so refusing them would end the conversation for good.
#[derive(Debug)]
pub(crate) struct Arguments(pub(crate) Value);

impl Default for Arguments {
    fn default() -> Self {
        Arguments(Value::Object(Map::new()))
    }
}

impl Read for Arguments {
    const EXPECTED: &'static str = String::EXPECTED;

    fn string(text: &str) -> Reading<Self> {
        if text.trim().is_empty() {
            return Ok(Arguments::default());
        }
        let fits = |marked: &MarkedJson<'_>| {
            room::take(count_values(text.as_bytes()) * Value::ROOM + marked.n_marked * LONG_NUMBER_ROOM)
        };
        let Some(marked) = written_number::mark(text.as_bytes()).filter(fits) else {
            return Err(ValueProblem::value("has too many values"));
        };
        let object = marked.value().filter(Value::is_object);
        Ok(Arguments(object.unwrap_or_else(|| text.into())))
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(Value::object(fields)?.map(Arguments))
    }
}

described!([] Arguments: named "Arguments", |_generator| {
    schemars::json_schema!({
        "description": "The arguments of a call.",
        "anyOf": [
            { "description": "The arguments as JSON in a string.", "type": "string" },
            { "description": "The arguments as an object.", "type": "object", "additionalProperties": true },
        ],
    })
});
