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
use crate::image::{
    Image, ImageFileFormat, LinkedImage, MAX_IMAGE_BYTES, MAX_IMAGE_URL_BYTES, MAX_IMAGES, NOT_FETCHED,
};
use crate::message_role::MessageRole;

/// Accepts base64 with and without padding: clients differ.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Line breaks inside base64. RFC 2045 requires one after at most 76 characters.
const LINE_BREAKS: [char; 2] = ['\r', '\n'];

/// The images of a request so far.
#[derive(Debug, Default)]
pub(crate) struct Images {
    images: Vec<Image>,
    linked: Vec<LinkedImage>,
    n_bytes: usize,
}

impl Images {
    /// Returns the files and the links, each in the order in which they were added.
    pub(crate) fn into_lists(self) -> (Vec<Image>, Vec<LinkedImage>) {
        (self.images, self.linked)
    }

    /// Returns true if none was added.
    pub(crate) fn is_empty(&self) -> bool {
        self.images.is_empty() && self.linked.is_empty()
    }

    /// Adds the image of a field that holds a data URI, or a URL for an upstream. Returns its mark for the message's text.
    pub(crate) fn add_uri(&mut self, uri: &str, field: String) -> Result<String, InvalidRequest> {
        match scheme(uri).as_deref() {
            Some("http" | "https") => self.add_link(uri, field),
            _ => self.add_data_uri(uri, field),
        }
    }

    /// Adds an image by its URL. Returns its mark for the message's text.
    pub(crate) fn add_link(&mut self, url: &str, field: String) -> Result<String, InvalidRequest> {
        self.check_number(&field)?;
        if !matches!(scheme(url).as_deref(), Some("http" | "https")) {
            return Err(not_fetched(field));
        }
        if url.len() > MAX_IMAGE_URL_BYTES {
            return Err(InvalidRequest::at(field, format_args!("may have {MAX_IMAGE_URL_BYTES} bytes")));
        }
        if url.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(InvalidRequest::at(field, "is not a URL: it has spaces or control characters"));
        }
        let link = LinkedImage::new(url, field);
        let mark = link.mark();
        self.linked.push(link);
        Ok(mark)
    }

    /// Errors: the request has as many images as it may have.
    fn check_number(&self, field: &str) -> Result<(), InvalidRequest> {
        if self.images.len() + self.linked.len() == MAX_IMAGES {
            return Err(InvalidRequest::at(field, format_args!("a request may have {MAX_IMAGES} images")));
        }
        Ok(())
    }

    /// Adds the image of a field that holds a data URI. Returns its mark for the message's text.
    fn add_data_uri(&mut self, uri: &str, field: String) -> Result<String, InvalidRequest> {
        match scheme(uri).as_deref() {
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
        self.check_number(&field)?;
        // Some programs break the lines of base64.
        let data = if data.contains(LINE_BREAKS) { Cow::Owned(data.replace(LINE_BREAKS, "")) } else { data.into() };
        // Check the size before decoding.
        if data.len() / 4 * 3 > MAX_IMAGE_BYTES.saturating_sub(self.n_bytes) {
            let limit = MAX_IMAGE_BYTES >> 20;
            return Err(InvalidRequest::at(field, format_args!("a request's images may have {limit} MiB together")));
        }
        let bytes = BASE64.decode(data.as_bytes()).map_err(|_| InvalidRequest::at(&*field, "is not valid base64"))?;
        if ImageFileFormat::of(&bytes).is_none() {
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
            marks += &if data.contains(':') { self.add_data_uri(&data, path)? } else { self.add_base64(&data, path)? };
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

/// Returns true if Ollama's field `images` has something.
pub(crate) fn wants_images(images: &Field<Demand>) -> bool {
    images.peek().is_some_and(|images| images.is_one(&Off::ZERO))
}

/// Refuses Ollama's field `images` of the message at `at`, in a dialect that has images in the content. `instead` says how. A
/// reply's own pictures, which some servers send there and clients send back, are named as ignored.
pub(crate) fn refuse_beside(
    images: &Field<Demand>,
    role: MessageRole,
    at: &str,
    instead: &str,
) -> Result<(), InvalidRequest> {
    if !wants_images(images) {
        return Ok(());
    }
    if role == MessageRole::Assistant {
        let list = at.split_once('[').map_or(at, |(list, _)| list);
        notes::ignored(&format!("{list}[].images"));
        return Ok(());
    }
    Err(InvalidRequest::unsupported_but(join(at, "images"), "Images beside the content ('images')", instead))
}

/// The URL's scheme in lower case.
fn scheme(uri: &str) -> Option<String> {
    uri.split_once(':').map(|(scheme, _)| scheme.to_ascii_lowercase())
}

/// Creates the error for an image's URL. A server that fetches URLs for clients lets them reach its internal network.
fn not_fetched(field: String) -> InvalidRequest {
    InvalidRequest::at(field, NOT_FETCHED)
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
        let (images, linked) = images.into_lists();
        assert!(linked.is_empty());
        assert_eq!(images.iter().map(Image::field).collect::<Vec<_>>(), ["a", "b", "c", "images[0]", "images[1]"]);
        assert!(images.iter().all(|image| image.bytes() == b"\x89PNG\r\n\x1a\n"));
    }

    #[test]
    fn what_is_no_image_or_elsewhere_is_refused_by_name() {
        let refused = |uri: &str, part: &str| {
            let error = Images::default().add_uri(uri, "f".into()).unwrap_err();
            assert!(error.param.as_deref() == Some("f") && error.message.contains(part), "{error:?}");
        };
        refused("file:///etc/passwd", "never fetches");
        refused("ftp://example.com/a.png", "never fetches");
        refused("http://example.com/a b.png", "spaces");
        refused(&format!("http://{}", "a".repeat(MAX_IMAGE_URL_BYTES)), "8192 bytes");
        refused("data:image/png,abc", "base64");
        refused("data:image/png;base64", "base64");
        refused("data:image/png;base64,%", "base64");
        refused("data:image/png;base64,aGk=", "PNG, JPEG");
        refused("data:image/png;base64,", "PNG, JPEG");
        refused(PNG, "data URI");
    }

    #[test]
    fn links_are_kept_for_upstreams_and_ollamas_list_has_none() {
        let mut images = Images::default();
        let mark = images.add_uri("HTTPS://example.com/a.png", "a".into()).unwrap();
        images.add_base64(PNG, "b".into()).unwrap();
        let list = read::<List>(br#"{"images": ["http://example.com/a.png"]}"#).unwrap().images;
        let refused = images.add_list(list, "").unwrap_err();
        assert!(refused.message.contains("never fetches"), "{refused:?}");
        let (files, linked) = images.into_lists();
        assert_eq!((files.len(), linked[0].url(), linked[0].mark()), (1, "HTTPS://example.com/a.png", mark));
    }

    #[test]
    fn number_and_size_are_limited() {
        let mut images = Images::default();
        for i in 0..MAX_IMAGES {
            match i % 2 {
                0 => images.add_base64(PNG, i.to_string()).unwrap(),
                _ => images.add_uri("http://example.com", i.to_string()).unwrap(),
            };
        }
        for more in [images.add_base64(PNG, "f".into()), images.add_uri("http://example.com", "f".into())] {
            assert!(more.unwrap_err().message.contains("16 images"));
        }
        let mut images = Images::default();
        images.add_base64(PNG, "a".into()).unwrap();
        let large = "A".repeat(MAX_IMAGE_BYTES / 3 * 4);
        assert!(images.add_base64(&large, "f".into()).unwrap_err().message.contains("12 MiB"));
    }
}
