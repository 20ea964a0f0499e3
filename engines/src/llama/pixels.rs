//! Decodes a client's image file to pixels.
//!
//! The file is not trusted: its size in pixels is read from its header and limited before anything is decoded, and the
//! decoder's allocations are limited.

use std::io::Cursor;

use baton_schemas::EngineError;
use baton_schemas::image::Image;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};

/// The most pixels of a side.
const MAX_SIDE: u32 = 16_384;

/// The most pixels of an image, as many as cameras take. Projectors use one to four million of them.
const MAX_PIXELS: u64 = 36 << 20;

/// The largest ratio of the longer side to the shorter. Projectors reduce longer strips to nothing.
const MAX_ASPECT: u32 = 100;

/// Bytes that a decoder may allocate: [`MAX_PIXELS`] with four 16-bit channels.
const MAX_DECODED_BYTES: u64 = MAX_PIXELS * 8;

/// An image's pixels, row by row, with three bytes each: red, green, blue.
pub(super) struct Pixels {
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) rgb: Vec<u8>,
}

impl Pixels {
    /// Decodes a file, or the first picture of an animation. Blocking: up to a second for the largest. Errors: the file
    /// cannot be read as an image, or the image is too large.
    pub(super) fn decode(image: &Image) -> Result<Pixels, EngineError> {
        let wrong = |problem: String| EngineError::invalid_field(image.field(), problem);
        // Some of the decoders' messages end with a line break.
        let unreadable =
            |error: image::ImageError| wrong(format!("the image cannot be read ({})", error.to_string().trim_end()));
        let mut reader = ImageReader::new(Cursor::new(image.bytes()))
            .with_guessed_format()
            .map_err(|error| wrong(format!("the image cannot be read ({error})")))?;
        let mut limits = Limits::default();
        limits.max_image_width = Some(MAX_SIDE);
        limits.max_image_height = Some(MAX_SIDE);
        limits.max_alloc = Some(MAX_DECODED_BYTES);
        reader.limits(limits);
        if reader.format() == Some(ImageFormat::Jpeg) && !has_end(image.bytes()) {
            return Err(wrong("the image cannot be read (the file ends before the picture's end)".to_owned()));
        }
        let mut decoder = reader.into_decoder().map_err(unreadable)?;
        let (width, height) = decoder.dimensions();
        if u64::from(width) * u64::from(height) > MAX_PIXELS {
            let limit = MAX_PIXELS >> 20;
            return Err(wrong(format!("the image has {width}×{height} pixels, and at most {limit} Mi are taken")));
        }
        if width.max(height) / width.min(height).max(1) > MAX_ASPECT {
            return Err(wrong(format!("the image has {width}×{height} pixels, which is too long and thin")));
        }
        let orientation = decoder.orientation().map_err(unreadable)?;
        let mut decoded = DynamicImage::from_decoder(decoder).map_err(unreadable)?;
        // Cameras store their orientation instead of turning the image.
        decoded.apply_orientation(orientation);
        let rgb = decoded.into_rgb8();
        Ok(Pixels { width: rgb.width(), height: rgb.height(), rgb: rgb.into_raw() })
    }
}

/// Looks for the marker at the end of a JPEG file (ISO/IEC 10918-1, annex B). The decoder fills what a shorter file lacks with grey,
/// and the model would be asked about that.
fn has_end(jpeg: &[u8]) -> bool {
    let mut rest = jpeg;
    // Within a scan 0xFF is followed by 0 or by a restart marker, and before a marker it may be repeated.
    let is_marker = |pair: &[u8]| pair[0] == 0xFF && !matches!(pair[1], 0 | 0xD0..=0xD7 | 0xFF);
    while let Some(at) = rest.windows(2).position(is_marker) {
        let (marker, after) = (rest[at + 1], &rest[at + 2..]);
        let n_skipped = match (marker, after.first_chunk()) {
            (0xD9, _) => return true,
            // The start of the file, and a marker for private use, have no length.
            (0xD8 | 0x01, _) => 0,
            (_, Some(length)) => usize::from(u16::from_be_bytes(*length)),
            (_, None) => return false,
        };
        rest = after.get(n_skipped..).unwrap_or_default();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(width: u32, height: u32, format: ImageFormat) -> Image {
        let picture = DynamicImage::new_rgb8(width, height);
        let mut bytes = Cursor::new(Vec::new());
        picture.write_to(&mut bytes, format).unwrap();
        Image::new(bytes.into_inner(), "messages[0].images[0]")
    }

    fn refused(image: &Image, part: &str) {
        let error = Pixels::decode(image).err().expect("a refusal").to_string();
        assert!(error.starts_with("Invalid 'messages[0].images[0]': ") && error.contains(part), "{error}");
    }

    #[test]
    fn all_formats_are_read() {
        for format in [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::Gif, ImageFormat::WebP] {
            let pixels = Pixels::decode(&file(5, 3, format)).unwrap();
            assert_eq!((pixels.width, pixels.height, pixels.rgb.len()), (5, 3, 45), "{format:?}");
        }
    }

    #[test]
    fn large_images_are_refused_by_their_header() {
        refused(&file(1, 101, ImageFormat::Png), "1×101 pixels, which is too long");
        // Some hundred bytes that claim to be a gigapixel: a PNG's first chunk holds its size.
        let sized = |width: u32, height: u32| {
            let mut bytes = file(8, 8, ImageFormat::Png).bytes().to_vec();
            bytes[16..20].copy_from_slice(&width.to_be_bytes());
            bytes[20..24].copy_from_slice(&height.to_be_bytes());
            // CRC-32 of the chunk's type and data (ISO 3309), which decoders check.
            let mut crc = u32::MAX;
            for byte in &bytes[12..29] {
                crc ^= u32::from(*byte);
                for _ in 0..8 {
                    crc = if crc & 1 == 1 { (crc >> 1) ^ 0xEDB8_8320 } else { crc >> 1 };
                }
            }
            bytes[29..33].copy_from_slice(&(!crc).to_be_bytes());
            Image::new(bytes, "messages[0].images[0]")
        };
        refused(&sized(16_000, 16_000), "16000×16000 pixels");
        refused(&sized(100_000, 100_000), "cannot be read");
        refused(&sized(0, 8), "cannot be read");
        assert!(Pixels::decode(&sized(8, 8)).is_ok());
    }

    #[test]
    fn other_files_are_refused() {
        refused(&Image::new(b"hello".to_vec(), "messages[0].images[0]"), "cannot be read");
        let whole = file(64, 64, ImageFormat::Png);
        refused(&Image::new(whole.bytes()[..40].to_vec(), "messages[0].images[0]"), "cannot be read");
    }

    #[test]
    fn a_file_that_is_cut_off_is_refused_in_every_format() {
        let noise = |x: u32, y: u32| image::Rgb([x * y, x ^ y, x + y].map(|value| (value * 37) as u8));
        let picture = DynamicImage::from(image::RgbImage::from_fn(64, 48, noise));
        for format in [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::Gif, ImageFormat::WebP] {
            let mut bytes = Cursor::new(Vec::new());
            picture.write_to(&mut bytes, format).unwrap();
            let whole = bytes.into_inner();
            for n_bytes in [20, whole.len() / 2, whole.len() * 9 / 10] {
                let part = Image::new(whole[..n_bytes].to_vec(), "messages[0].images[0]");
                refused(&part, "the image cannot be read (");
                refused(&part, ")");
            }
            // Cameras append previews and videos.
            let longer = Image::new([&whole[..], b"\xff\xda and more"].concat(), "messages[0].images[0]");
            assert!(Pixels::decode(&longer).is_ok(), "{format:?}");
        }
    }

    #[test]
    fn the_end_of_a_preview_is_not_the_end_of_the_picture() {
        // A segment with a whole file, a scan with a zero byte and a restart, and the end.
        let head = b"\xff\xd8\xff\xe1\x00\x06\xff\xd8\xff\xd9\xff\xda\x00\x02\x01\xff\x00\xff\xd0\x02";
        assert!(!has_end(head));
        assert!(has_end(&[&head[..], b"\xff\xd9"].concat()));
        for wrong in [&b""[..], b"\xff", b"\xff\xd8", b"\xff\xe1\xff", b"\xff\xe1\xff\xff\xff\xd9", b"\xff\xe1\0\0"] {
            assert!(!has_end(wrong), "{wrong:x?}");
        }
    }
}
