//! Images in requests of any dialect: decodes base64 and enforces the limits.

use std::borrow::Cow;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use schemars::JsonSchema;

use super::demand::{Demand, Off};
use super::field::{Field, Items, join};
use super::read::{Read, Reading, ValueProblem};
use super::{InvalidRequest, notes};
use crate::image::{Image, MAX_IMAGE_BYTES, MAX_IMAGES};
use crate::message_role::MessageRole;

/// Accepts base64 with and without padding: clients differ.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Line breaks inside base64. RFC 2045 requires one after at most 76 characters.
const LINE_BREAKS: [char; 2] = ['\r', '\n'];

/// First bytes of the formats that engines decode. WebP has its name after a length.
const BEGINNINGS: [&[u8]; 5] = [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"RIFF"];

/// The images of a request so far.
#[derive(Debug, Default)]
pub(crate) struct Images {
    images: Vec<Image>,
    n_bytes: usize,
}

impl Images {
    /// Returns the images in the order in which they were added.
    pub(crate) fn into_vec(self) -> Vec<Image> {
        self.images
    }

    /// Adds the image of a field that holds a data URI. Returns its mark for the message's text.
    pub(crate) fn add_uri(&mut self, uri: &str, field: String) -> Result<String, InvalidRequest> {
        let scheme = uri.split_once(':').map(|(scheme, _)| scheme.to_ascii_lowercase());
        match scheme.as_deref() {
            Some("data") => {}
            Some(_) => return Err(not_fetched(field)),
            None => {
                let problem = "must be a data URI, as in data:image/png;base64,iVBORw0…";
                return Err(InvalidRequest::at(field, problem));
            }
        }
        let parts = uri["data:".len()..].split_once(',');
        let Some((_, data)) = parts.filter(|(kind, _)| kind.to_ascii_lowercase().ends_with(";base64")) else {
            return Err(InvalidRequest::at(
                field,
                "must be a data URI in base64, as in data:image/png;base64,iVBORw0…",
            ));
        };
        self.add_base64(data, field)
    }

    /// Adds the image of a field that holds base64. Returns its mark for the message's text.
    pub(crate) fn add_base64(&mut self, data: &str, field: String) -> Result<String, InvalidRequest> {
        if self.images.len() == MAX_IMAGES {
            return Err(InvalidRequest::at(field, format_args!("a request may have {MAX_IMAGES} images")));
        }
        // Some programs break the lines of base64.
        let data = if data.contains(LINE_BREAKS) { Cow::Owned(data.replace(LINE_BREAKS, "")) } else { data.into() };
        // Check the size before decoding.
        if data.len() / 4 * 3 > MAX_IMAGE_BYTES.saturating_sub(self.n_bytes) {
            let limit = MAX_IMAGE_BYTES >> 20;
            return Err(InvalidRequest::at(field, format_args!("a request's images may have {limit} MiB together")));
        }
        let bytes = BASE64.decode(data.as_bytes()).map_err(|_| InvalidRequest::at(&*field, "is not valid base64"))?;
        let is_webp = || bytes.get(8..12) == Some(b"WEBP");
        let is_known = BEGINNINGS.iter().any(|first| bytes.starts_with(first));
        if !is_known || (bytes.starts_with(b"RIFF") && !is_webp()) {
            return Err(InvalidRequest::at(field, "is not a PNG, JPEG, WebP or GIF image"));
        }
        self.n_bytes += bytes.len();
        let image = Image::new(bytes, field);
        let mark = image.mark();
        self.images.push(image);
        Ok(mark)
    }

    /// Adds the files of Ollama's field `images`. Returns their marks, to be put before the text. `at` is the path of
    /// the object with the field.
    pub(crate) fn add_list(&mut self, files: Field<Items<ImageFile>>, at: &str) -> Result<String, InvalidRequest> {
        let mut marks = String::new();
        for file in files.get(at)?.unwrap_or_default().each(&join(at, "images")) {
            let (path, ImageFile(data)) = file?;
            // Base64 has no colon, a data URI has one.
            marks += &if data.contains(':') { self.add_uri(&data, path)? } else { self.add_base64(&data, path)? };
        }
        Ok(marks)
    }
}

/// An image file in base64, plain or as a data URI.
#[derive(Debug, JsonSchema)]
#[schemars(inline, extend("contentEncoding" = "base64"))]
pub(crate) struct ImageFile(String);

impl Read for ImageFile {
    const EXPECTED: &'static str = "a string of base64";

    fn wrong(_: &'static str) -> ValueProblem {
        ValueProblem::value(format!("must be {}", Self::EXPECTED))
    }

    fn string(data: &str) -> Reading<Self> {
        Ok(ImageFile(data.to_owned()))
    }
}

/// The feature that a part of text with an image asks for.
pub(crate) const IN_TEXT: &str = "Images in a part of text";

/// Refuses Ollama's field `images` of the message at `at`, in a dialect that has images in the content. `instead` says how. A
/// reply's own pictures, which some servers send there and clients send back, are named as ignored.
pub(crate) fn refuse_beside(
    images: &Field<Demand>,
    role: MessageRole,
    at: &str,
    instead: &str,
) -> Result<(), InvalidRequest> {
    match images.peek() {
        Some(images) if !images.is_one(&Off::ZERO) => Ok(()),
        None => Ok(()),
        Some(_) if role == MessageRole::Assistant => {
            let list = at.split_once('[').map_or(at, |(list, _)| list);
            notes::ignored(&format!("{list}[].images"));
            Ok(())
        }
        Some(_) => {
            Err(InvalidRequest::unsupported_but(join(at, "images"), "Images beside the content ('images')", instead))
        }
    }
}

/// Creates the error for an image's URL. A server that fetches URLs for clients lets them reach its internal network.
pub(crate) fn not_fetched(field: String) -> InvalidRequest {
    let problem = "is a URL, and this server never fetches one: send the image itself, as a data URI in base64";
    InvalidRequest::at(field, problem)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::request::field::object;
    use crate::request::read::read;

    object! {
        /// Has images.
        struct List {
            images: Field<Items<ImageFile>>,
        }
    }

    const PNG: &str = "iVBORw0KGgo=";

    #[test]
    fn images_come_as_data_uris_or_base64() {
        let mut images = Images::default();
        let mark = images.add_uri(&format!("data:image/png;base64,{PNG}"), "a".into()).unwrap();
        assert_eq!(images.add_base64(PNG.trim_end_matches('='), "b".into()).unwrap(), mark);
        assert_eq!(images.add_base64("iVBORw\r\n0KGgo=\n", "c".into()).unwrap(), mark);
        let list = |images: Value| read::<List>(json!({ "images": images }).to_string().as_bytes()).unwrap().images;
        let two = list(json!([PNG, format!("DATA:;Base64,{PNG}")]));
        assert_eq!(images.add_list(two, "").unwrap(), format!("{mark}{mark}"));
        assert_eq!(images.add_list(list(json!(null)), "").unwrap(), "");
        let images = images.into_vec();
        assert_eq!(images.iter().map(Image::field).collect::<Vec<_>>(), ["a", "b", "c", "images[0]", "images[1]"]);
        assert!(images.iter().all(|image| image.bytes() == b"\x89PNG\r\n\x1a\n"));
    }

    #[test]
    fn what_is_no_image_or_elsewhere_is_refused_by_name() {
        let refused = |uri: &str, part: &str| {
            let error = Images::default().add_uri(uri, "f".into()).unwrap_err();
            assert!(error.param.as_deref() == Some("f") && error.message.contains(part), "{error:?}");
        };
        refused("http://example.com/a.png", "never fetches");
        refused("HTTPS://example.com/a.png", "never fetches");
        refused("file:///etc/passwd", "never fetches");
        refused("data:image/png,abc", "base64");
        refused("data:image/png;base64", "base64");
        refused("data:image/png;base64,%", "base64");
        refused("data:image/png;base64,aGk=", "PNG, JPEG");
        refused("data:image/png;base64,", "PNG, JPEG");
        refused(PNG, "data URI");
    }

    #[test]
    fn number_and_size_are_limited() {
        let mut images = Images::default();
        for i in 0..MAX_IMAGES {
            images.add_base64(PNG, i.to_string()).unwrap();
        }
        assert!(images.add_base64(PNG, "f".into()).unwrap_err().message.contains("16 images"));
        let mut images = Images::default();
        images.add_base64(PNG, "a".into()).unwrap();
        let large = "A".repeat(MAX_IMAGE_BYTES / 3 * 4);
        assert!(images.add_base64(&large, "f".into()).unwrap_err().message.contains("12 MiB"));
    }
}
