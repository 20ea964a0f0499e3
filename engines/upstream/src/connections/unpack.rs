//! Unpacks bodies. Baton asks for none that is packed, but some servers, and proxies before them, pack all.

use std::io::{self, Write};
use std::mem;

use bytes::Bytes;
use flate2::write::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use http::{HeaderMap, header};

/// The most packed bytes that are unpacked at once. They grow to a thousand times as much at most.
const STEP_BYTES: usize = 256;

/// Unpacks one body in small steps, so that it grows no faster than it is read.
pub(super) enum Unpacker {
    Gzip(MultiGzDecoder<Vec<u8>>),
    /// `deflate` names two forms; the first byte tells them apart.
    Deflate,
    Zlib(ZlibDecoder<Vec<u8>>),
    Raw(DeflateDecoder<Vec<u8>>),
}

/// A packing that is not read.
#[derive(Debug, thiserror::Error)]
#[error("the body is packed in another way than gzip or deflate")]
pub(crate) struct UnknownPacking;

impl Unpacker {
    /// The unpacker of a body with these headers; `None` if it is not packed.
    pub(super) fn of(headers: &HeaderMap) -> Result<Option<Unpacker>, UnknownPacking> {
        let mut packings = headers.get_all(header::CONTENT_ENCODING).into_iter();
        let (Some(packing), None) = (packings.next(), packings.next()) else {
            return if headers.contains_key(header::CONTENT_ENCODING) { Err(UnknownPacking) } else { Ok(None) };
        };
        match packing.as_bytes().trim_ascii().to_ascii_lowercase().as_slice() {
            b"" | b"identity" => Ok(None),
            b"gzip" | b"x-gzip" => Ok(Some(Unpacker::Gzip(MultiGzDecoder::new(Vec::new())))),
            b"deflate" => Ok(Some(Unpacker::Deflate)),
            _ => Err(UnknownPacking),
        }
    }

    /// Takes some of these bytes, and returns what they become, perhaps nothing yet.
    pub(super) fn unpack(&mut self, packed: &mut Bytes) -> io::Result<Bytes> {
        if let (Unpacker::Deflate, Some(first)) = (&self, packed.first()) {
            // A zlib header begins with the method 8 (RFC 1950); a block of that first byte would be stored, and odd.
            *self = match first & 0x0F {
                8 => Unpacker::Zlib(ZlibDecoder::new(Vec::new())),
                _ => Unpacker::Raw(DeflateDecoder::new(Vec::new())),
            };
        }
        let step = packed.split_to(packed.len().min(STEP_BYTES));
        match self {
            Unpacker::Gzip(decoder) => write(decoder, &step).map(|()| mem::take(decoder.get_mut())),
            Unpacker::Zlib(decoder) => write(decoder, &step).map(|()| mem::take(decoder.get_mut())),
            Unpacker::Raw(decoder) => write(decoder, &step).map(|()| mem::take(decoder.get_mut())),
            Unpacker::Deflate => Ok(Vec::new()),
        }
        .map(Bytes::from)
    }

    /// Ends the body. Returns the rest. Errors: it is cut.
    pub(super) fn end(self) -> io::Result<Bytes> {
        let rest = match self {
            Unpacker::Gzip(decoder) => decoder.finish()?,
            Unpacker::Zlib(mut decoder) => check_end(&mut decoder).and_then(|()| decoder.finish())?,
            Unpacker::Raw(mut decoder) => check_end(&mut decoder).and_then(|()| decoder.finish())?,
            Unpacker::Deflate => Vec::new(),
        };
        Ok(rest.into())
    }
}

fn write(decoder: &mut impl Write, packed: &[u8]) -> io::Result<()> {
    decoder.write_all(packed)?;
    // Otherwise the decoder keeps what a server has sent at once for the client.
    decoder.flush()
}

/// Errors: the body is cut. A decoder takes nothing after the end of its data, and says nothing of an end that is missing.
fn check_end(decoder: &mut impl Write) -> io::Result<()> {
    match decoder.write(&[0]) {
        Ok(0) => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
    use http::HeaderValue;

    use super::*;

    fn unpacker(packing: &'static str) -> Result<Option<Unpacker>, UnknownPacking> {
        Unpacker::of(&HeaderMap::from_iter([(header::CONTENT_ENCODING, HeaderValue::from_static(packing))]))
    }

    /// The unpacked body, and the most bytes that one step gave.
    fn unpacked(packing: &'static str, packed: Vec<u8>) -> io::Result<(Vec<u8>, usize)> {
        let mut unpacker = unpacker(packing).unwrap().unwrap();
        let mut packed = Bytes::from(packed);
        let (mut all, mut most) = (Vec::new(), 0);
        while !packed.is_empty() {
            let part = unpacker.unpack(&mut packed)?;
            most = most.max(part.len());
            all.extend_from_slice(&part);
        }
        all.extend_from_slice(&unpacker.end()?);
        Ok((all, most))
    }

    fn packed(packing: &str, text: &[u8]) -> Vec<u8> {
        let level = Compression::default();
        fn all<E: Write>(mut encoder: E, text: &[u8]) -> E {
            encoder.write_all(text).unwrap();
            encoder
        }
        match packing {
            "gzip" => all(GzEncoder::new(Vec::new(), level), text).finish().unwrap(),
            "deflate" => all(ZlibEncoder::new(Vec::new(), level), text).finish().unwrap(),
            _ => all(DeflateEncoder::new(Vec::new(), level), text).finish().unwrap(),
        }
    }

    #[test]
    fn bodies_are_unpacked_in_bounded_steps_and_cut_ones_are_errors() {
        let zeros = vec![b'0'; 4 << 20];
        for (packing, form) in [("gzip", "gzip"), ("X-GZIP", "gzip"), ("deflate", "deflate"), ("deflate", "raw")] {
            let body = packed(form, b"well");
            assert_eq!(unpacked(packing, body.clone()).unwrap().0, b"well", "{packing} {form}");
            assert!(unpacked(packing, body[..body.len() - 1].to_vec()).is_err(), "{packing} {form}");
            let (all, most) = unpacked(packing, packed(form, &zeros)).unwrap();
            assert!(all == zeros && most <= 300_000, "{packing} {form}: {most}");
        }
        assert!(unpacked("gzip", b"plain text".to_vec()).is_err());
        assert!(matches!(unpacker("identity"), Ok(None)) && matches!(Unpacker::of(&HeaderMap::new()), Ok(None)));
        for unknown in ["br", "zstd", "gzip, gzip"] {
            assert!(unpacker(unknown).is_err(), "{unknown}");
        }
    }

    #[test]
    fn what_a_server_flushes_is_unpacked_at_once() {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        let mut unpacker = unpacker("gzip").unwrap().unwrap();
        for word in ["first", "second"] {
            encoder.write_all(word.as_bytes()).unwrap();
            encoder.flush().unwrap();
            let mut sent = Bytes::from(mem::take(encoder.get_mut()));
            let mut came = Vec::new();
            while !sent.is_empty() {
                came.extend_from_slice(&unpacker.unpack(&mut sent).unwrap());
            }
            assert_eq!(came, word.as_bytes());
        }
    }
}
