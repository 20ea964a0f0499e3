//! The declaration of `system` and `messages`: what is read and what `/openapi.json` describes.

use schemars::json_schema;
use serde::de::SeqAccess;
use serde_json::{Map, Value};

use crate::request::field::{Field, Items, object};
use crate::request::read::{Read, Reading};
use crate::request::schema::{Variant, described, view};
use crate::request::values::NonEmpty;

object! {
    /// A message of the history.
    pub(crate) struct MessagesMessage {
        /// Who speaks.
        role: Field<String>,
        /// What is said.
        content: Field<Blocks>,
    }
    by "role" {
        Variant { words: &["user"], needs: &["content"], forms: &[("content", &[0, 1])], ..Variant::NEW },
        Variant { words: &["assistant"], needs: &["content"], forms: &[("content", &[0, 2])], ..Variant::NEW },
        Variant { words: &["system"], needs: &["content"], forms: &[("content", &[0, 3])], ..Variant::NEW },
    }
}

/// A text, or blocks.
#[derive(Debug)]
pub(crate) enum Blocks {
    Text(String),
    Blocks(Items<MessagesBlock>),
}

impl Read for Blocks {
    const EXPECTED: &'static str = "a string or an array of blocks";

    fn string(text: &str) -> Reading<Self> {
        Ok(Blocks::Text(text.to_owned()))
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        Ok(Items::array(items)?.map(Blocks::Blocks))
    }
}

described!([] Blocks: |generator| json_schema!({ "anyOf": [
    { "type": "string" },
    generator.subschema_for::<Vec<UserBlock>>(),
    generator.subschema_for::<Vec<AssistantBlock>>(),
    generator.subschema_for::<Vec<TextBlock>>(),
] }));

/// The system's message: a text, or text blocks.
#[derive(Debug)]
pub(crate) struct SystemText(pub(super) Blocks);

impl Read for SystemText {
    const EXPECTED: &'static str = "a string or an array of text blocks";

    fn string(text: &str) -> Reading<Self> {
        Blocks::string(text).map(SystemText)
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        Ok(Blocks::array(items)?.map(SystemText))
    }
}

described!([] SystemText: |generator| {
    json_schema!({ "anyOf": [{ "type": "string" }, generator.subschema_for::<Vec<TextBlock>>()] })
});

object! {
    /// A block of any kind.
    pub(crate) struct MessagesBlock {
        /// What it is.
        r#type: Field<String>,
        /// The text.
        text: Field<String>,
        /// The file of an image, or a document.
        #[schemars(with = "SourceForms")]
        source: Field<BlockSource>,
        /// The document's title.
        title: Field<String>,
        /// By which the result of the call refers to it.
        id: Field<NonEmpty>,
        /// Which tool is called.
        name: Field<NonEmpty>,
        /// With what.
        input: Field<Map<String, Value>>,
        /// Which call this is the result of.
        tool_use_id: Field<NonEmpty>,
        /// The result.
        #[schemars(with = "ResultForms")]
        content: Field<Blocks>,
        /// The call failed.
        is_error: Field<bool>,
        /// What the model thought.
        thinking: Field<String>,
    }
}

object! {
    /// An image, or a document.
    pub(crate) struct BlockSource {
        /// What it is.
        r#type: Field<String>,
        /// The file in base64, or the text.
        data: Field<String>,
    }
}

view! {
    /// What a user can say. Documents that are not plain text are a 400, and so are images for a model without a
    /// projector.
    UserBlock of MessagesBlock:
    TEXT,
    Variant {
        words: &["document"], needs: &["source"], may_have: &["title"], forms: &[("source", &[1])], ..Variant::NEW
    },
    Variant { words: &["tool_result"], needs: &["tool_use_id"], may_have: &["content", "is_error"], ..Variant::NEW },
    IMAGE,
}

view! {
    /// What a model can have said. Calls of tools that run on Anthropic's servers, and what they found, are left out.
    AssistantBlock of MessagesBlock:
    TEXT,
    Variant { words: &["tool_use"], needs: &["id", "name"], may_have: &["input"], ..Variant::NEW },
    Variant { words: &["thinking"], may_have: &["thinking"], ..Variant::NEW },
    Variant { words: &["redacted_thinking"], ..Variant::NEW },
}

view! {
    /// What a tool can say.
    ResultBlock of MessagesBlock: TEXT, IMAGE
}

view! {
    /// A block that is a text.
    TextBlock of MessagesBlock: TEXT
}

view! {
    /// A document of plain text.
    PlainDocument of BlockSource: Variant { words: &["text"], needs: &["data"], ..Variant::NEW }
}

view! {
    /// An image itself, in base64: URLs are never fetched.
    Base64Image of BlockSource: Variant { words: &["base64"], needs: &["data"], ..Variant::NEW }
}

const TEXT: Variant = Variant { words: &["text"], needs: &["text"], ..Variant::NEW };
const IMAGE: Variant = Variant { words: &["image"], needs: &["source"], forms: &[("source", &[0])], ..Variant::NEW };

/// Describes the forms of [`MessagesBlock::source`].
enum SourceForms {}

described!([] SourceForms: |generator| {
    let file = json_schema!({
        "description": "A PNG, JPEG, WebP or GIF file.",
        "allOf": [generator.subschema_for::<Base64Image>()],
        "properties": { "data": { "pattern": r"^[A-Za-z0-9+/]+={0,2}$" } },
    });
    json_schema!({ "anyOf": [file, generator.subschema_for::<PlainDocument>()] })
});

/// Describes [`MessagesBlock::content`].
enum ResultForms {}

described!([] ResultForms: |generator| {
    let blocks = generator.subschema_for::<Vec<ResultBlock>>();
    json_schema!({ "anyOf": [{ "type": "string" }, blocks, { "type": "null" }] })
});
