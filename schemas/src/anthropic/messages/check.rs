//! `system` and `messages` → the messages of a [`Conversation`](crate::generate::Conversation), in the form that chat
//! templates read.

use super::body::{Blocks, MessagesBlock, MessagesMessage, SystemText};
use super::references::ToolReferences;
use crate::generate::Message;
use crate::image;
use crate::message_role::MessageRole;
use crate::request::InvalidRequest;
use crate::request::field::join;
use crate::request::history::{JoinedParts, MessageList, template_call, with_joined_system_messages};
use crate::request::images::{self, Images, refuse_beside};
use crate::request::invalid::quoted;

const IMAGE_BLOCKS: &str = "send them as blocks of type 'image' in 'content'";

/// Begins a system block that Claude Code writes for Anthropic's accounts. The block differs in every request, so
/// keeping it at the front of the prompt would defeat the prefix cache.
const BILLING: &str = "x-anthropic-billing-header";

/// Returns the messages as templates read them, and adds their images to `images`.
pub(in crate::anthropic) fn check_history(
    system: Option<SystemText>,
    messages: MessageList<MessagesMessage>,
    images: &mut Images,
    references: &mut ToolReferences,
) -> Result<Vec<Message>, InvalidRequest> {
    let mut turns = MessagesTurns { messages: Vec::new(), images, references };
    if let Some(system) = system {
        turns.push(MessageRole::System, &system.check()?);
    }
    for message in messages.0.each("messages") {
        let (at, message) = message?;
        turns.add(&at, message)?;
    }
    if turns.messages.last().is_some_and(|last| last.role == MessageRole::Assistant) {
        return Err(InvalidRequest::unsupported("messages", "Continuing the assistant's last message"));
    }
    Ok(with_joined_system_messages(turns.messages))
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

/// The messages so far. As in Anthropic's API, consecutive messages of one role are one: most templates require that
/// roles alternate.
struct MessagesTurns<'i> {
    messages: Vec<Message>,
    images: &'i mut Images,
    references: &'i mut ToolReferences,
}

impl MessagesTurns<'_> {
    fn push(&mut self, role: MessageRole, text: &str) {
        if text.is_empty() {
            return;
        }
        let message = self.turn(role);
        if !message.content.is_empty() && !image::ends_with_mark(&message.content) {
            message.content.push('\n');
        }
        message.content += text;
    }

    /// Returns the last message if it has this role, else a new one.
    fn turn(&mut self, role: MessageRole) -> &mut Message {
        if self.messages.last().is_none_or(|last| last.role != role) {
            self.messages.push(Message::new(role, String::new()));
        }
        let at = self.messages.len() - 1;
        &mut self.messages[at]
    }

    fn add(&mut self, at: &str, message: MessagesMessage) -> Result<(), InvalidRequest> {
        let role = message.role.get(at)?.as_deref().and_then(MessageRole::of).filter(|role| *role != MessageRole::Tool);
        let role = role.ok_or_else(|| InvalidRequest::at(join(at, "role"), "must be user or assistant"))?;
        refuse_beside(&message.images, role, at, IMAGE_BLOCKS)?;
        match message.content.required("content", at)? {
            Blocks::Text(text) => {
                // Even an empty text is a turn.
                self.turn(role);
                self.push(role, &text);
            }
            Blocks::Blocks(blocks) => {
                for block in blocks.each(&join(at, "content")) {
                    let (at, block) = block?;
                    self.block(role, &at, block)?;
                }
            }
        }
        Ok(())
    }

    fn block(&mut self, role: MessageRole, at: &str, mut block: MessagesBlock) -> Result<(), InvalidRequest> {
        use MessageRole::{Assistant, User};
        if role == Assistant && block.is_unread() {
            return Ok(());
        }
        match (&*block.r#type.take().required("type", at)?, role) {
            ("text", _) => self.push(role, &block.own_text(at)?),
            ("document", User) => self.push(role, &block.document(at)?),
            ("tool_use", Assistant) => {
                let input = block.input.get(at)?.unwrap_or_default();
                let id = block.id.required("id", at)?.0;
                let name = block.name.required("name", at)?.0;
                self.turn(role).tool_calls.push(template_call(Some(id), &name, input.into()));
            }
            ("tool_result", User) => {
                let tool_call_id = Some(block.tool_use_id.required("tool_use_id", at)?.0);
                let mut content = match block.content.get(at)? {
                    Some(content) => content.result(&join(at, "content"), self.images, self.references)?,
                    None => String::new(),
                };
                // Templates have no field for a failed call, so the text says it.
                if block.is_error.get(at)?.unwrap_or(false) {
                    content.insert_str(0, "Error: ");
                }
                self.messages.push(Message { tool_call_id, ..Message::new(MessageRole::Tool, content) });
            }
            ("thinking", Assistant) => {
                let thinking = block.thinking.get(at)?.unwrap_or_default();
                self.turn(role).reasoning_content.get_or_insert_default().push_str(&thinking);
            }
            ("image", User) => {
                let mark = block.image(at, self.images)?;
                self.turn(role).content += &mark;
            }
            // As OpenAI's APIs have them.
            (other @ ("image_url" | "input_image"), User) => {
                let what = format!("Images as blocks of type '{other}'");
                return Err(InvalidRequest::unsupported_but(join(at, "type"), &what, IMAGE_BLOCKS));
            }
            (other, _) => {
                let what = format!("A block of type {} in a message of the {}", quoted(other), role.as_str());
                return Err(InvalidRequest::unsupported(join(at, "type"), what));
            }
        }
        Ok(())
    }
}

impl Blocks {
    /// Returns the text of a tool's result, with marks where images are.
    fn result(self, at: &str, images: &mut Images, references: &mut ToolReferences) -> Result<String, InvalidRequest> {
        let blocks = match self {
            Blocks::Text(text) => return Ok(text),
            Blocks::Blocks(blocks) => blocks,
        };
        let mut joined = JoinedParts::default();
        for block in blocks.each(at) {
            let (at, block) = block?;
            match block.r#type.peek().map(String::as_str) {
                Some("image") => joined.push_image(&block.image(&at, images)?),
                Some("tool_reference") => {
                    joined.push_text(&references.load(&block.tool_name.required("tool_name", &at)?.0));
                }
                _ => joined.push_text(&block.only_text(&at)?),
            }
        }
        Ok(joined.into_string())
    }
}

impl MessagesBlock {
    /// Adds the block's image to `images` and returns its mark.
    fn image(self, at: &str, images: &mut Images) -> Result<String, InvalidRequest> {
        let source = self.source.required("source", at)?;
        let at = join(at, "source");
        match source.r#type.get(&at)?.as_deref() {
            Some("base64") => images.add_base64(&source.data.required("data", &at)?, join(&at, "data")),
            Some("url") => images.add_link(&source.url.required("url", &at)?, join(&at, "url")),
            _ => Err(InvalidRequest::at(
                join(&at, "type"),
                "must be base64, or url for an upstream that fetches: nothing is stored here",
            )),
        }
    }

    /// Returns a document's text. Documents in other formats are refused: nothing here parses them.
    fn document(self, at: &str) -> Result<String, InvalidRequest> {
        let source = self.source.required("source", at)?;
        let path = join(at, "source");
        if source.r#type.get(&path)?.as_deref() != Some("text") {
            return Err(InvalidRequest::unsupported(path, "A document that is not plain text"));
        }
        let text = source.data.required("data", &path)?;
        let title = self.title.get(at)?.map(|title| format!("{title}\n\n")).unwrap_or_default();
        Ok(title + &text)
    }

    /// Returns the text of a block of text.
    fn own_text(self, at: &str) -> Result<String, InvalidRequest> {
        let lost = [("source", self.source.is_given()), ("images", images::wants_images(&self.images))];
        if let Some((field, _)) = lost.into_iter().find(|(_, is_lost)| *is_lost) {
            return Err(InvalidRequest::unsupported_but(join(at, field), images::IN_TEXT, IMAGE_BLOCKS));
        }
        self.text.required("text", at)
    }

    /// Returns the text of a block where only text is allowed.
    fn only_text(mut self, at: &str) -> Result<String, InvalidRequest> {
        match &*self.r#type.take().required("type", at)? {
            "text" => self.own_text(at),
            other => {
                Err(InvalidRequest::unsupported(join(at, "type"), format!("A block of type {} here", quoted(other))))
            }
        }
    }
}
