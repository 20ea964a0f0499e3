//! Images in the messages of a request to an upstream. A message's text has their marks.

use baton_schemas::generate::Conversation;
use baton_schemas::image::{Image, LinkedImage, Segment, segments};
use serde_json::{Value, json};

/// The images of a conversation, found by their marks.
pub(crate) struct MarkedImages<'a> {
    conversation: &'a Conversation,
    /// The files' first, then the links'.
    marks: Vec<String>,
}

/// A piece of a message.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MessagePiece<'a> {
    Text(&'a str),
    File(&'a Image),
    Link(&'a LinkedImage),
}

impl<'a> MarkedImages<'a> {
    pub(crate) fn of(conversation: &'a Conversation) -> MarkedImages<'a> {
        let files = conversation.images.iter().map(Image::mark);
        let marks = files.chain(conversation.linked_images.iter().map(LinkedImage::mark)).collect();
        MarkedImages { conversation, marks }
    }

    /// The pieces of a message with images. `None`: it has none.
    pub(crate) fn pieces(&self, content: &'a str) -> Option<Vec<MessagePiece<'a>>> {
        if self.marks.is_empty() {
            return None;
        }
        let Conversation { images, linked_images, .. } = self.conversation;
        let pieces: Vec<_> = segments(content, &self.marks)
            .into_iter()
            .filter_map(|segment| match segment {
                Segment::Text(text) => Some(MessagePiece::Text(text)),
                Segment::Image(i) => match i.checked_sub(images.len()) {
                    None => images.get(i).map(MessagePiece::File),
                    Some(i) => linked_images.get(i).map(MessagePiece::Link),
                },
            })
            .collect();
        pieces.iter().any(MessagePiece::is_image).then_some(pieces)
    }
}

impl MessagePiece<'_> {
    pub(crate) fn is_image(&self) -> bool {
        !matches!(self, MessagePiece::Text(_))
    }

    /// The piece as a part of a content in OpenAI's dialect.
    pub(crate) fn part(&self) -> Value {
        let url = match self {
            MessagePiece::Text(text) => return json!({ "type": "text", "text": text }),
            MessagePiece::File(image) => image.data_uri(),
            MessagePiece::Link(link) => link.url().to_owned(),
        };
        json!({ "type": "image_url", "image_url": { "url": url } })
    }
}
