//! Images in prompts: their bytes, their marks in messages, and their placeholder tokens in prompts.
//!
//! An image is kept as the file that the client sent. An image that is only linked has no bytes: see [`LinkedImage`]. In a
//! message's text, a *mark* takes an image's place. In a prompt, a run
//! of *placeholders* does: tokens outside every vocabulary, derived from a hash of the image. Prompts therefore share a
//! prefix only if their images are equal, and code that compares prompts by their tokens need not know about images.

use std::ops::Range;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::token::Token;

/// The most images in one request.
pub const MAX_IMAGES: usize = 16;

/// The most bytes of all image files in a request. In base64, and with a long prompt, they still fit into the body of a
/// call to a node.
pub const MAX_IMAGE_BYTES: usize = 12 << 20;

/// The most bytes of the URL of a linked image. Signed URLs of object stores have up to 4 KiB.
pub const MAX_IMAGE_URL_BYTES: usize = 8 << 10;

/// The fewest placeholders of an image. Each carries 30 bits of its hash; fewer could not distinguish images.
pub const MIN_PLACEHOLDERS: usize = 8;

/// The smallest placeholder. No vocabulary has tokens from here on: llama.cpp's are non-negative 32-bit integers.
const PLACEHOLDER: Token = 1 << 31;

/// The bit that is set in the first placeholder of an image.
const BEGINS: Token = 1 << 30;

/// Surrounds the hash in a mark. A private-use character: templates do not trim it, and texts do not contain it by
/// chance.
const MARK: char = '\u{F8FE}';

/// The format of an image file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
pub enum ImageFileFormat {
    /// PNG.
    #[strum(serialize = "image/png")]
    Png,
    /// JPEG.
    #[strum(serialize = "image/jpeg")]
    Jpeg,
    /// WebP.
    #[strum(serialize = "image/webp")]
    WebP,
    /// GIF.
    #[strum(serialize = "image/gif")]
    Gif,
}

impl ImageFileFormat {
    /// Returns the format that a file's first bytes show. `None`: it is in none that engines decode.
    pub fn of(bytes: &[u8]) -> Option<ImageFileFormat> {
        match bytes {
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some(ImageFileFormat::Png),
            [0xff, 0xd8, 0xff, ..] => Some(ImageFileFormat::Jpeg),
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(ImageFileFormat::Gif),
            // The name comes after a length.
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(ImageFileFormat::WebP),
            _ => None,
        }
    }

    /// Returns the media type, e.g. `image/png`.
    pub fn media_type(self) -> &'static str {
        self.into()
    }
}

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
        mark_of(&self.hash)
    }

    /// Returns the file in base64, with padding.
    pub fn in_base64(&self) -> String {
        STANDARD.encode(&self.bytes)
    }

    /// Returns the file as a data URI in base64. A file in no known format has the media type of unknown bytes.
    pub fn data_uri(&self) -> String {
        let media_type =
            ImageFileFormat::of(&self.bytes).map_or("application/octet-stream", ImageFileFormat::media_type);
        let mut uri = format!("data:{media_type};base64,");
        STANDARD.encode_string(&self.bytes, &mut uri);
        uri
    }

    /// Returns the placeholders of the image in this shape. Runs of different shapes differ from their first token.
    pub fn placeholders(&self, shape: &ImageShape) -> Vec<Token> {
        let n = shape.n_tokens;
        let mut hasher = blake3::Hasher::new_keyed(&self.hash);
        hasher.update(&(n as u64).to_le_bytes());
        let numbers = shape.shared.as_ref().map(SharedTokens::numbers);
        for number in numbers.iter().flatten() {
            hasher.update(&number.to_le_bytes());
        }
        let mut stream = hasher.finalize_xof();
        let mut drawn = [0; 4];
        let mut next = || {
            stream.fill(&mut drawn);
            PLACEHOLDER | (Token::from_le_bytes(drawn) & (BEGINS - 1))
        };
        let mut run: Vec<Token> = (0..n).map(|_| next()).collect();
        for (token, number) in run.iter_mut().skip(1).zip(numbers.into_iter().flatten()) {
            *token = PLACEHOLDER | number;
        }
        if let Some(first) = run.first_mut() {
            *first |= BEGINS;
        }
        run
    }
}

/// The layout of an image in a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageShape {
    /// All its tokens, the text that its projector puts around it included. At least [`MIN_PLACEHOLDERS`].
    pub n_tokens: usize,
    /// `None`: each token has a position of its own.
    pub shared: Option<SharedTokens>,
}

/// Tokens of an image that share a position, as in models with M-RoPE.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedTokens {
    /// The range of the image's tokens.
    pub tokens: Range<usize>,
    /// The positions that they take, from 1 to their number: the longer side of the image. The text after them goes on
    /// behind these.
    pub n_positions: usize,
}

impl SharedTokens {
    /// The meaning of the second to the fourth placeholder.
    fn numbers(&self) -> [Token; 3] {
        [self.tokens.start, self.tokens.len(), self.n_positions].map(|number| number as Token & (BEGINS - 1))
    }
}

impl ImageShape {
    /// The shape of an image without shared positions.
    pub fn plain(n_tokens: usize) -> ImageShape {
        ImageShape { n_tokens, shared: None }
    }

    /// Returns the shape that a run of placeholders has. In a run without shared positions, random numbers stand in their place:
    /// one in 10^15 runs of 1,000 tokens is misread, and is then no run of its image.
    pub fn of(run: &[Token]) -> ImageShape {
        let number = |token: Token| (token & (BEGINS - 1)) as usize;
        let shared = match *run {
            [_, start, n, n_positions, ..] => {
                let (start, n, n_positions) = (number(start), number(n), number(n_positions));
                let is_within = (1..=run.len()).contains(&n) && start <= run.len() - n;
                (is_within && (1..=n).contains(&n_positions))
                    .then(|| SharedTokens { tokens: start..start + n, n_positions })
            }
            _ => None,
        };
        ImageShape { n_tokens: run.len(), shared }
    }
}

/// An image that a client has not sent but linked. Baton fetches none: clients could reach its network through it. So it
/// goes only to an upstream that fetches it itself, and whose operator allows that; no engine gets one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkedImage {
    url: Arc<str>,
    field: String,
}

/// The reason why a linked image cannot be passed on.
pub const NOT_FETCHED: &str =
    "is a URL, and this server never fetches one: send the image itself, as a data URI in base64";

impl LinkedImage {
    /// Creates an image from a client's field. `field` is the path for errors.
    pub(crate) fn new(url: &str, field: String) -> LinkedImage {
        LinkedImage { url: url.into(), field }
    }

    /// Returns its `http://` or `https://` URL, as the client wrote it.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the path of the field in the client's request.
    pub fn field(&self) -> &str {
        &self.field
    }

    /// Returns the mark that takes the image's place in a message's text. It is never that of a file.
    pub fn mark(&self) -> String {
        mark_of(&blake3::derive_key("baton 2026-11 linked image", self.url.as_bytes()))
    }
}

fn mark_of(hash: &[u8; 32]) -> String {
    format!("{MARK}{}{MARK}", hex::encode(hash))
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

/// Cuts a text at these marks. Equal images have the same mark, which yields the index of the first.
pub fn segments<'a>(text: &'a str, marks: &[String]) -> Vec<Segment<'a>> {
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
        let plain = ImageShape::plain;
        let a = image(b"a").placeholders(&plain(9));
        let b = image(b"b").placeholders(&plain(9));
        assert_eq!(a, image(b"a").placeholders(&plain(9)));
        assert!(a.iter().zip(&b).all(|(a, b)| a != b), "{a:?} {b:?}");
        assert_ne!(a[..8], image(b"a").placeholders(&plain(8)));
        assert!(a.iter().all(|t| is_placeholder(*t)) && !continues(a[0]) && a[1..].iter().all(|t| continues(*t)));
        let prompt = [&[1, 2][..], &a, &b, &[3], &a].concat();
        assert_eq!(runs(&prompt), [2..11, 11..20, 21..30]);
        assert_eq!(runs(&[1, 2]), []);
        assert!(!is_placeholder(i32::MAX as u32));
    }

    #[test]
    fn placeholders_say_which_tokens_share_a_position() {
        let shared = |tokens: Range<usize>, n_positions| ImageShape {
            n_tokens: 14,
            shared: Some(SharedTokens { tokens, n_positions }),
        };
        let shapes = [shared(1..13, 4), shared(1..13, 12), shared(0..13, 4), shared(2..14, 1), ImageShape::plain(14)];
        let run_of = |shape| image(b"a").placeholders(shape);
        for shape in &shapes {
            let run = run_of(shape);
            assert_eq!((&ImageShape::of(&run), runs(&run)), (shape, vec![0..14]), "{shape:?}");
            let alike = shapes.iter().filter(|other| run_of(other)[0] == run[0]).count();
            assert_eq!(alike, 1, "{shape:?}");
        }
        assert_eq!(ImageShape::of(&run_of(&shapes[0])[..3]), ImageShape::plain(3));
        assert_eq!(ImageShape::of(&[0, 1, 13, 13, 0, 0, 0, 0]).shared, None, "more tokens than there are");
        assert_eq!(ImageShape::of(&[0, 1, 4, 5, 0, 0, 0, 0]).shared, None, "more positions than tokens");
        assert_eq!(ImageShape::of(&[0, 7, 2, 1, 0, 0, 0, 0]).shared, None, "tokens beyond the run");
        assert_eq!(ImageShape::of(&[]), ImageShape::plain(0));
    }

    #[test]
    fn texts_are_cut_at_marks_and_at_nothing_else() {
        let marks = [image(b"a"), image(b"b")].map(|image| image.mark());
        let check = |text: &str, expected: &[Segment<'_>]| assert_eq!(segments(text, &marks), expected, "{text}");
        let [a, b] = &marks;
        check("x", &[Segment::Text("x")]);
        check("", &[]);
        check(&format!("{b}{a}"), &[Segment::Image(1), Segment::Image(0)]);
        check(&format!("x{a}y{MARK}z"), &[Segment::Text("x"), Segment::Image(0), Segment::Text(&format!("y{MARK}z"))]);
        check(&image(b"c").mark(), &[Segment::Text(&image(b"c").mark())]);
    }

    #[test]
    fn a_file_has_the_media_type_of_its_first_bytes() {
        for (file, uri) in [
            (&b"\x89PNG\r\n\x1a\n"[..], "data:image/png;base64,iVBORw0KGgo="),
            (b"\xff\xd8\xff\xe0", "data:image/jpeg;base64,/9j/4A=="),
            (b"GIF89a", "data:image/gif;base64,R0lGODlh"),
            (b"RIFF\x04\0\0\0WEBP", "data:image/webp;base64,UklGRgQAAABXRUJQ"),
            (b"RIFF\x04\0\0\0WAVE", "data:application/octet-stream;base64,UklGRgQAAABXQVZF"),
        ] {
            assert_eq!(Image::new(file, "f").data_uri(), uri);
        }
    }

    #[test]
    fn a_link_to_the_bytes_of_a_file_has_another_mark() {
        let link = LinkedImage::new("https://example.com/a.png", "f".into());
        assert_ne!(link.mark(), Image::new(&b"https://example.com/a.png"[..], "f").mark());
        assert_eq!((link.url(), link.field()), ("https://example.com/a.png", "f"));
    }

    #[test]
    fn an_image_survives_json() {
        let before = PromptImages { projector: "p".into(), images: vec![image(b"\x00\xff")] };
        let json = serde_json::to_string(&before).unwrap();
        assert_eq!(serde_json::from_str::<PromptImages>(&json).unwrap(), before, "{json}");
        assert!(serde_json::from_str::<Image>(r#"{"field":"f","data":"%"}"#).is_err());
    }
}
