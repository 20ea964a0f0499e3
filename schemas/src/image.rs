//! Images in prompts: their bytes, their marks in messages, and their placeholder tokens in prompts.
//!
//! An image is kept as the file that the client sent. In a message's text, a *mark* takes its place. In a prompt, a run
//! of *placeholders* does: tokens outside every vocabulary, derived from a hash of the image. Prompts therefore share a
//! prefix only if their images are equal, and code that compares prompts by their tokens need not know about images.

use std::ops::Range;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::token::Token;

/// The most images in one request.
pub const MAX_IMAGES: usize = 16;

/// The most bytes of all image files in a request. In base64, and with a long prompt, they still fit into the body of a
/// call to a node.
pub const MAX_IMAGE_BYTES: usize = 12 << 20;

/// The fewest placeholders of an image. Each carries 30 bits of its hash; fewer could not distinguish images.
pub const MIN_PLACEHOLDERS: usize = 8;

/// The smallest placeholder. No vocabulary has tokens from here on: llama.cpp's are non-negative 32-bit integers.
const PLACEHOLDER: Token = 1 << 31;

/// The bit that is set in the first placeholder of an image.
const BEGINS: Token = 1 << 30;

/// Surrounds the hash in a mark. A private-use character: templates do not trim it, and texts do not contain it by
/// chance.
const MARK: char = '\u{F8FE}';

/// An image as a file: PNG, JPEG, WebP or GIF. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Wire", into = "Wire")]
pub struct Image {
    bytes: Bytes,
    field: String,
    hash: [u8; 32],
}

impl Image {
    /// Creates an image from a client's field. `field` is the path for errors.
    pub fn new(bytes: impl Into<Bytes>, field: impl Into<String>) -> Image {
        let bytes = bytes.into();
        let hash = *blake3::hash(&bytes).as_bytes();
        Image { bytes, field: field.into(), hash }
    }

    /// Returns the file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the path of the field in the client's request, e.g. `messages[0].content[1]`.
    pub fn field(&self) -> &str {
        &self.field
    }

    /// Returns the mark that takes the image's place in a message's text. A client that writes the mark of an image of
    /// another request does not get that image: a mark without an image in the same request is an error.
    pub fn mark(&self) -> String {
        format!("{MARK}{}{MARK}", hex::encode(self.hash))
    }

    /// Returns the `n` placeholders of the image. Runs of different lengths differ from their first token.
    pub fn placeholders(&self, n: usize) -> Vec<Token> {
        let mut hasher = blake3::Hasher::new_keyed(&self.hash);
        let mut stream = hasher.update(&(n as u64).to_le_bytes()).finalize_xof();
        let mut drawn = [0; 4];
        let mut next = || {
            stream.fill(&mut drawn);
            PLACEHOLDER | (Token::from_le_bytes(drawn) & (BEGINS - 1))
        };
        let mut run: Vec<Token> = (0..n).map(|_| next()).collect();
        if let Some(first) = run.first_mut() {
            *first |= BEGINS;
        }
        run
    }
}

/// Returns true if a token is a placeholder of an image.
pub fn is_placeholder(token: Token) -> bool {
    token & PLACEHOLDER != 0
}

/// Returns true if a token is the first placeholder of an image.
pub fn begins(token: Token) -> bool {
    token & (PLACEHOLDER | BEGINS) == PLACEHOLDER | BEGINS
}

/// Returns true if a token belongs to the same image as the token before it. A prompt must not be cut here.
pub fn continues(token: Token) -> bool {
    token & (PLACEHOLDER | BEGINS) == PLACEHOLDER
}

/// Returns the positions of each image's placeholders in a prompt, in their order.
pub fn runs(prompt: &[Token]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (position, &token) in prompt.iter().enumerate().filter(|(_, token)| is_placeholder(**token)) {
        match runs.last_mut() {
            Some(run) if continues(token) && run.end == position => run.end += 1,
            _ => runs.push(position..position + 1),
        }
    }
    runs
}

/// Returns true if a text ends with the mark of an image.
pub(crate) fn ends_with_mark(text: &str) -> bool {
    text.ends_with(MARK)
}

/// A piece of a text that is cut at the marks of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segment<'a> {
    /// Text without a mark.
    Text(&'a str),
    /// An image, by its index.
    Image(usize),
}

/// Cuts a text at the marks of `images`. Equal images have the same mark, which yields the index of the first.
pub fn segments<'a>(text: &'a str, images: &[Image]) -> Vec<Segment<'a>> {
    let marks: Vec<String> = images.iter().map(Image::mark).collect();
    let mut segments = Vec::new();
    let mut begun = 0;
    let mut looked_at = 0;
    while let Some(found) = text[looked_at..].find(MARK) {
        let at = looked_at + found;
        match marks.iter().enumerate().find(|(_, mark)| text[at..].starts_with(mark.as_str())) {
            Some((idx, mark)) => {
                if begun < at {
                    segments.push(Segment::Text(&text[begun..at]));
                }
                segments.push(Segment::Image(idx));
                begun = at + mark.len();
                looked_at = begun;
            }
            None => looked_at = at + MARK.len_utf8(),
        }
    }
    if begun < text.len() {
        segments.push(Segment::Text(&text[begun..]));
    }
    segments
}

/// The images of a prompt's placeholders.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptImages {
    /// The projector that determined the number of placeholders: see
    /// [`NodeInfo::projector`](crate::node::NodeInfo::projector). Another projector computes other embeddings.
    pub projector: String,
    /// The images, in any order.
    pub images: Vec<Image>,
}

/// An image in JSON.
#[derive(Serialize, Deserialize)]
struct Wire {
    field: String,
    #[serde(with = "in_base64")]
    data: Bytes,
}

impl From<Wire> for Image {
    fn from(wire: Wire) -> Image {
        Image::new(wire.data, wire.field)
    }
}

impl From<Image> for Wire {
    fn from(image: Image) -> Wire {
        Wire { field: image.field, data: image.bytes }
    }
}

mod in_base64 {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use bytes::Bytes;
    use serde::{Deserialize, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(bytes: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(bytes))
    }

    /// The size is bounded by the size of the body.
    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        let text = String::deserialize(deserializer)?;
        STANDARD.decode(text).map(Bytes::from).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(bytes: &'static [u8]) -> Image {
        Image::new(bytes, "f")
    }

    #[test]
    fn placeholders_tell_images_and_their_beginnings_apart() {
        let a = image(b"a").placeholders(9);
        let b = image(b"b").placeholders(9);
        assert_eq!(a, image(b"a").placeholders(9));
        assert!(a.iter().zip(&b).all(|(a, b)| a != b), "{a:?} {b:?}");
        assert_ne!(a[..8], image(b"a").placeholders(8));
        assert!(a.iter().all(|t| is_placeholder(*t)) && !continues(a[0]) && a[1..].iter().all(|t| continues(*t)));
        let prompt = [&[1, 2][..], &a, &b, &[3], &a].concat();
        assert_eq!(runs(&prompt), [2..11, 11..20, 21..30]);
        assert_eq!(runs(&[1, 2]), []);
        assert!(!is_placeholder(i32::MAX as u32));
    }

    #[test]
    fn texts_are_cut_at_marks_and_at_nothing_else() {
        let images = [image(b"a"), image(b"b")];
        let check = |text: &str, expected: &[Segment<'_>]| assert_eq!(segments(text, &images), expected, "{text}");
        let a = images[0].mark();
        let b = images[1].mark();
        check("x", &[Segment::Text("x")]);
        check("", &[]);
        check(&format!("{b}{a}"), &[Segment::Image(1), Segment::Image(0)]);
        check(&format!("x{a}y{MARK}z"), &[Segment::Text("x"), Segment::Image(0), Segment::Text(&format!("y{MARK}z"))]);
        check(&image(b"c").mark(), &[Segment::Text(&image(b"c").mark())]);
    }

    #[test]
    fn an_image_survives_json() {
        let before = PromptImages { projector: "p".into(), images: vec![image(b"\x00\xff")] };
        let json = serde_json::to_string(&before).unwrap();
        assert_eq!(serde_json::from_str::<PromptImages>(&json).unwrap(), before, "{json}");
        assert!(serde_json::from_str::<Image>(r#"{"field":"f","data":"%"}"#).is_err());
    }
}
