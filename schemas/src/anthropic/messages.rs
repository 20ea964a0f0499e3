//! `system` and `messages` → a conversation's messages.

use schemars::json_schema;
use serde::de::SeqAccess;
use serde_json::{Map, Value};

use crate::generate::Message;
use crate::image;
use crate::openai::messages::{MessageList, template_call};
use crate::request::field::{Field, Items, join, object};
use crate::request::images::{self, Images};
use crate::request::read::{Read, Reading};
use crate::request::schema::{Variant, described, view};
use crate::request::values::NonEmpty;
use crate::request::{InvalidRequest, history};

/// A system block that Claude Code writes for Anthropic's accounts. It differs from request to request, and with it at
/// the front of the prompt nothing would be cached.
const BILLING: &str = "x-anthropic-billing-header";

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
pub(crate) struct SystemText(Blocks);

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

/// The messages as templates read them.
pub(super) fn check_history(
    system: Option<SystemText>,
    messages: MessageList<MessagesMessage>,
    images: &mut Images,
) -> Result<Vec<Message>, InvalidRequest> {
    let mut turns = MessagesTurns { messages: Vec::new(), images };
    if let Some(system) = system {
        turns.push("system", &system.check()?);
    }
    for message in messages.0.each("messages") {
        let (at, message) = message?;
        turns.add(&at, message)?;
    }
    if turns.messages.last().is_some_and(|last| last.role == "assistant") {
        return Err(InvalidRequest::unsupported("messages", "Continuing the assistant's last message"));
    }
    Ok(history::with_one_system_message(turns.messages))
}

impl SystemText {
    fn check(self) -> Result<String, InvalidRequest> {
        match self.0 {
            Blocks::Text(text) => Ok(text),
            Blocks::Blocks(blocks) => {
                let mut texts = Vec::new();
                for block in blocks.each("system") {
                    let (at, block) = block?;
                    texts.push(block.only_text(&at)?);
                }
                texts.retain(|text| !text.starts_with(BILLING));
                Ok(texts.join("\n\n"))
            }
        }
    }
}

/// Messages so far. Messages of one role in a row are one, as Anthropic has it: most templates insist on turns.
struct MessagesTurns<'i> {
    messages: Vec<Message>,
    images: &'i mut Images,
}

impl MessagesTurns<'_> {
    fn push(&mut self, role: &str, text: &str) {
        if text.is_empty() {
            return;
        }
        let message = self.turn(role);
        if !message.content.is_empty() && !image::ends_with_mark(&message.content) {
            message.content.push('\n');
        }
        message.content += text;
    }

    /// The last message if it is of this role, else a new one.
    fn turn(&mut self, role: &str) -> &mut Message {
        if self.messages.last().is_none_or(|last| last.role != role) {
            self.messages.push(Message { role: role.to_owned(), ..Message::default() });
        }
        let at = self.messages.len() - 1;
        &mut self.messages[at]
    }

    fn add(&mut self, at: &str, message: MessagesMessage) -> Result<(), InvalidRequest> {
        let role = match message.role.get(at)? {
            Some(role) if matches!(&*role, "user" | "assistant" | "system") => role,
            _ => return Err(InvalidRequest::at(join(at, "role"), "must be user or assistant")),
        };
        match message.content.get(at)?.ok_or_else(|| InvalidRequest::at(join(at, "content"), "is missing"))? {
            Blocks::Text(text) => {
                // An empty text is a turn, too.
                self.turn(&role);
                self.push(&role, &text);
            }
            Blocks::Blocks(blocks) => {
                for block in blocks.each(&join(at, "content")) {
                    let (at, block) = block?;
                    self.block(&role, &at, block)?;
                }
            }
        }
        Ok(())
    }

    fn block(&mut self, role: &str, at: &str, mut block: MessagesBlock) -> Result<(), InvalidRequest> {
        match (block.r#type.take().get(at)?.as_deref(), role) {
            (Some("text"), _) => self.push(role, &required(block.text, "text", at)?),
            (Some("document"), "user") => self.push(role, &block.document(at)?),
            (Some("tool_use"), "assistant") => {
                let input = block.input.get(at)?.unwrap_or_default();
                let id = required(block.id, "id", at)?.0;
                let name = required(block.name, "name", at)?.0;
                self.turn(role).tool_calls.push(template_call(Some(id), &name, input.into()));
            }
            (Some("tool_result"), "user") => {
                let tool_call_id = Some(required(block.tool_use_id, "tool_use_id", at)?.0);
                let mut content = match block.content.get(at)? {
                    Some(content) => content.result(&join(at, "content"), self.images)?,
                    None => String::new(),
                };
                // No template knows of failed results but by their words.
                if block.is_error.get(at)?.unwrap_or(false) {
                    content.insert_str(0, "Error: ");
                }
                self.messages.push(Message { role: "tool".into(), content, tool_call_id, ..Message::default() });
            }
            (Some("thinking"), "assistant") => {
                let thinking = block.thinking.get(at)?.unwrap_or_default();
                self.turn(role).reasoning_content.get_or_insert_default().push_str(&thinking);
            }
            // What another server encrypted, nobody here can read.
            (Some("redacted_thinking"), "assistant") => {}
            // Calls of tools that Anthropic defines. They are not shown to the model.
            (Some("server_tool_use" | "mcp_tool_use"), "assistant") => {}
            (Some(kind), "assistant") if kind.ends_with("_tool_result") => {}
            (Some("image"), "user") => {
                let mark = block.image(at, self.images)?;
                self.turn(role).content += &mark;
            }
            (Some(other), _) => {
                let other: String = other.chars().take(40).collect();
                let what = format!("A block of type \"{}\" in a message of the {role}", other.escape_debug());
                return Err(InvalidRequest::unsupported(join(at, "type"), what));
            }
            (None, _) => return Err(InvalidRequest::at(join(at, "type"), "is missing")),
        }
        Ok(())
    }
}

impl Blocks {
    /// What a tool said: a string, or blocks of text and images.
    fn result(self, at: &str, images: &mut Images) -> Result<String, InvalidRequest> {
        let blocks = match self {
            Blocks::Text(text) => return Ok(text),
            Blocks::Blocks(blocks) => blocks,
        };
        let (mut content, mut after_text) = (String::new(), false);
        for block in blocks.each(at) {
            let (at, block) = block?;
            let is_image = block.r#type.peek().is_some_and(|kind| kind == "image");
            let part = if is_image { block.image(&at, images)? } else { block.only_text(&at)? };
            if after_text && !is_image {
                content.push('\n');
            }
            content += &part;
            after_text = !is_image;
        }
        Ok(content)
    }
}

impl MessagesBlock {
    /// An image, whose mark is returned.
    fn image(self, at: &str, images: &mut Images) -> Result<String, InvalidRequest> {
        let source = required(self.source, "source", at)?;
        let at = join(at, "source");
        match source.r#type.get(&at)?.as_deref() {
            Some("base64") => images.add_base64(&required(source.data, "data", &at)?, join(&at, "data")),
            Some("url") => Err(images::not_fetched(join(&at, "url"))),
            _ => Err(InvalidRequest::at(
                join(&at, "type"),
                "must be base64: nothing is stored here, and no URL is fetched",
            )),
        }
    }

    /// A document that is text. Others would have to be read from their bytes.
    fn document(self, at: &str) -> Result<String, InvalidRequest> {
        let source = required(self.source, "source", at)?;
        let path = join(at, "source");
        if source.r#type.get(&path)?.as_deref() != Some("text") {
            return Err(InvalidRequest::unsupported(path, "A document that is not plain text"));
        }
        let text = required(source.data, "data", &path)?;
        let title = self.title.get(at)?.map(|title| format!("{title}\n\n")).unwrap_or_default();
        Ok(title + &text)
    }

    /// The text of a block that can only be text.
    fn only_text(self, at: &str) -> Result<String, InvalidRequest> {
        match self.r#type.get(at)?.as_deref() {
            Some("text") => required(self.text, "text", at),
            Some(other) => {
                let other: String = other.chars().take(40).collect();
                let what = format!("A block of type \"{}\" here", other.escape_debug());
                Err(InvalidRequest::unsupported(join(at, "type"), what))
            }
            None => Err(InvalidRequest::at(join(at, "type"), "is missing")),
        }
    }
}

/// A field that this kind of block must have.
fn required<T>(field: Field<T>, name: &str, at: &str) -> Result<T, InvalidRequest> {
    field.get(at)?.ok_or_else(|| InvalidRequest::at(join(at, name), "is missing"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::request::field::Required;
    use crate::request::read::read;

    object! {
        /// Has a history.
        struct HistoryBody {
            messages: Required<MessageList<MessagesMessage>>,
            system: Field<SystemText>,
        }
    }

    fn parsed_with(body: &Value, images: &mut Images) -> Result<Vec<Message>, InvalidRequest> {
        let body: HistoryBody = read(body.to_string().as_bytes())?;
        check_history(body.system.get("")?, body.messages.get("")?, images)
    }

    fn parsed(body: &Value) -> Result<Vec<Message>, InvalidRequest> {
        parsed_with(body, &mut Images::default())
    }

    fn check(body: Value, expected: Value) {
        assert_eq!(serde_json::to_value(parsed(&body).unwrap()).unwrap(), expected, "{body}");
    }

    fn refused(messages: Value, param: &str) {
        let body = json!({ "messages": messages });
        assert_eq!(parsed(&body).unwrap_err().param.as_deref(), Some(param), "{body}");
    }

    #[test]
    fn blocks_become_what_templates_read() {
        let block = |text: &str| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}});
        check(json!({"messages": [{"role": "user", "content": "hi"}]}), json!([{"role": "user", "content": "hi"}]));
        check(
            json!({"system": [block("x-anthropic-billing-header: cc_version=1"), block("be"), block("brief")],
                "messages": [{"role": "user", "content": [block("a"), block("b")]}, {"role": "user", "content": "c"},
                    {"role": "assistant", "content": [block("d")]}, {"role": "user", "content": "e"}]}),
            json!([{"role": "system", "content": "be\n\nbrief"}, {"role": "user", "content": "a\nb\nc"},
                {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}]),
        );
    }

    #[test]
    fn calls_and_their_results_keep_their_order() {
        check(
            json!({"messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                    {"type": "text", "text": "let me see"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}]},
                    {"type": "text", "text": "and now?"}]}]}),
            json!([{"role": "user", "content": "hi"},
                {"role": "assistant", "content": "let me see", "reasoning_content": "hm", "tool_calls": [
                    {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
                {"role": "tool", "content": "4", "tool_call_id": "t1"}, {"role": "user", "content": "and now?"}]),
        );
    }

    #[test]
    fn failed_results_and_documents_are_told_in_words() {
        check(
            json!({"messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "no such file", "is_error": true},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": false},
                {"type": "document", "title": "A", "source": {"type": "text", "media_type": "text/plain", "data": "b"}}]}]}),
            json!([{"role": "tool", "content": "Error: no such file", "tool_call_id": "t1"},
                {"role": "tool", "content": "", "tool_call_id": "t2"}, {"role": "user", "content": "A\n\nb"}]),
        );
        let pdf =
            json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}});
        refused(json!([{"role": "user", "content": [pdf]}]), "messages[0].content[0].source");
    }

    #[test]
    fn images_stand_where_they_were_sent() {
        let picture = json!({"type": "image", "source":
            {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}});
        let text = |text: &str| json!({"type": "text", "text": text});
        let body = json!({"messages": [{"role": "user", "content": [text("a"), picture, text("b"), text("c")]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [picture, text("d")]}]}]});
        let mut images = Images::default();
        let messages = parsed_with(&body, &mut images).unwrap();
        let images = images.into_vec();
        let mark = images[0].mark();
        let contents: Vec<&str> = messages.iter().map(|message| message.content.as_str()).collect();
        assert_eq!(contents, [format!("a{mark}b\nc"), format!("{mark}d")]);
        assert_eq!(images[1].field(), "messages[1].content[0].content[0].source.data");
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        refused(json!([]), "messages");
        refused(json!([{"role": "robot", "content": "x"}]), "messages[0].role");
        refused(json!([{"role": "user"}]), "messages[0].content");
        refused(json!([{"role": "user", "content": [{"type": "image"}]}]), "messages[0].content[0].source");
        let picture = |source: Value| json!([{"role": "user", "content": [{"type": "image", "source": source}]}]);
        let at = "messages[0].content[0].source";
        refused(picture(json!({"type": "url", "url": "https://example.com/a.png"})), &format!("{at}.url"));
        refused(picture(json!({"type": "file", "file_id": "f"})), &format!("{at}.type"));
        refused(picture(json!({"type": "base64", "media_type": "image/png"})), &format!("{at}.data"));
        refused(picture(json!({"type": "base64", "data": "aGk="})), &format!("{at}.data"));
        refused(json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text");
        refused(json!([{"role": "user", "content": [{"type": "tool_use"}]}]), "messages[0].content[0].type");
        refused(json!([{"role": "user", "content": [{"type": "tool_result"}]}]), "messages[0].content[0].tool_use_id");
        refused(json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]), "messages");
    }
}
