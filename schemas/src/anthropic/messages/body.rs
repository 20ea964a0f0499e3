//! The declaration of `system` and `messages`: what is read and what `/openapi.json` describes.

use schemars::json_schema;
use serde::de::SeqAccess;
use serde_json::{Map, Value};

use crate::request::demand::Demand;
use crate::request::field::{Field, Items, object};
use crate::request::read::{Read, Reading};
use crate::request::schema::{Variant, described, view};
use crate::request::values::NonEmpty;

object! {
    /// A message of the conversation.
    pub(crate) struct MessagesMessage {
        /// Who speaks.
        role: Field<String>,
        /// The text, or blocks.
        content: Field<Blocks>,
        #[schemars(skip)]
        images: Field<Demand>,
    }
    by "role" {
        Variant { words: &["user"], needs: &["content"], forms: &[("content", &[0, 1])], ..Variant::NEW },
        Variant { words: &["assistant"], needs: &["content"], forms: &[("content", &[0, 2])], ..Variant::NEW },
        Variant { words: &["system"], needs: &["content"], forms: &[("content", &[0, 3])], ..Variant::NEW },
    }
}

/// The content of a message or of a tool's result: a text, or blocks.
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

/// The system message: a text, or text blocks.
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
    /// A block of a message's content, of any kind.
    pub(crate) struct MessagesBlock {
        /// The kind of block.
        r#type: Field<String>,
        /// The text.
        text: Field<String>,
        /// An image's file, or a document's text.
        #[schemars(with = "SourceForms")]
        source: Field<BlockSource>,
        /// The document's title.
        title: Field<String>,
        /// The id that the call's result refers to.
        id: Field<NonEmpty>,
        /// The tool to call.
        name: Field<NonEmpty>,
        /// The arguments of the call.
        input: Field<Map<String, Value>>,
        /// The id of the call whose result this is.
        tool_use_id: Field<NonEmpty>,
        /// The result of a call.
        #[schemars(with = "ResultForms")]
        content: Field<Blocks>,
        /// True: the call failed.
        is_error: Field<bool>,
        /// The model's reasoning.
        thinking: Field<String>,
        /// The tool that a search has found.
        tool_name: Field<NonEmpty>,
        #[schemars(skip)]
        images: Field<Demand>,
    }
    skipped by MessagesBlock::is_unread
}

impl MessagesBlock {
    /// Returns true for a block that the model does not see: what another server has encrypted, and calls of tools that
    /// Anthropic defines, with their results.
    pub(super) fn is_unread(&self) -> bool {
        let is_unread = |kind: &str| {
            matches!(kind, "redacted_thinking" | "server_tool_use" | "mcp_tool_use") || kind.ends_with("_tool_result")
        };
        self.r#type.peek().is_some_and(|kind| is_unread(kind))
    }
}

object! {
    /// The source of an image or of a document.
    pub(crate) struct BlockSource {
        /// The kind of source.
        r#type: Field<String>,
        /// The file in base64, or the text.
        data: Field<String>,
        #[schemars(skip)]
        url: Field<String>,
    }
}

view! {
    /// A block of a user's message. Documents other than plain text are a 400. So are images for a model without a
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
    /// A block of the model's message. Calls and results of tools that run on Anthropic's servers are ignored.
    AssistantBlock of MessagesBlock:
    TEXT,
    Variant { words: &["tool_use"], needs: &["id", "name"], may_have: &["input"], ..Variant::NEW },
    Variant { words: &["thinking"], may_have: &["thinking"], ..Variant::NEW },
    Variant { words: &["redacted_thinking"], ..Variant::NEW },
}

view! {
    /// A block of a tool's result. A `tool_reference` loads a tool with `defer_loading`: the prompt describes it there.
    ResultBlock of MessagesBlock:
    TEXT,
    IMAGE,
    Variant { words: &["tool_reference"], needs: &["tool_name"], ..Variant::NEW },
}

view! {
    /// A block of text.
    TextBlock of MessagesBlock: TEXT
}

view! {
    /// A document of plain text.
    PlainDocument of BlockSource: Variant { words: &["text"], needs: &["data"], ..Variant::NEW }
}

view! {
    /// An image in base64. Baton fetches no URL: it passes one only to an upstream that does, if the operator allows it.
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
