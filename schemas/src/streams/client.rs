//! The frames that an endpoint sends.

use bytes::{Buf, BufMut, BytesMut};

use super::draft::ToldTokens;
use super::error::StreamFrameError;
use super::frame::{FrameKind, RawFrame, put_head};
use super::{MAX_BODY_BYTES, MAX_CREDIT, MAX_PIECE_BYTES, MAX_TRACEPARENT_BYTES};

/// The kind of work of a stream. Its numbers are never given to another kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum StreamWork {
    /// Continues a sequence. The body is a [`SequenceRequest`](crate::SequenceRequest); tokens come in steps, and each
    /// takes one credit.
    Generate = 1,
    /// Computes vectors. The body is an [`EmbedSequences`](crate::embed::EmbedSequences); each vector takes one credit.
    Embed = 2,
    /// Reports the node's load. The body is empty; each load takes one credit.
    Loads = 3,
    /// Drafts a sequence's next tokens. The body is a [`DraftRequest`](crate::draft::DraftRequest); candidates take no credit.
    Draft = 4,
}

impl StreamWork {
    fn from_number(number: u8) -> Option<StreamWork> {
        let all = [StreamWork::Generate, StreamWork::Embed, StreamWork::Loads, StreamWork::Draft];
        all.into_iter().find(|work| *work as u8 == number)
    }
}

/// A frame of an endpoint, whose form was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientFrame<'a> {
    /// A new stream.
    Start(StartFrame<'a>),
    /// The next piece of the body of a start, at least one byte.
    Body(&'a [u8]),
    /// More credit, at least 1.
    Credit(u32),
    /// The stream is no longer wanted.
    Cancel,
    /// Tokens that the sequence of a stream of drafts has got.
    Told(ToldTokens),
}

/// A new stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartFrame<'a> {
    /// What it does.
    pub work: StreamWork,
    /// Its first credit, at most [`MAX_CREDIT`].
    pub credit: u32,
    /// The caller's span, as a W3C `traceparent`.
    pub traceparent: Option<&'a str>,
    /// The length of the whole body, at most [`MAX_BODY_BYTES`].
    pub body_bytes: usize,
    /// The first piece of the body. The rest follows in body frames.
    pub piece: &'a [u8],
}

/// What precedes the `traceparent` in a start: `u8 work, u8 length of the traceparent, 2 zero bytes, u32 credit, u32
/// length of the body`.
const START_BYTES: usize = 12;

impl<'a> ClientFrame<'a> {
    /// Reads a frame's payload. Errors: it is malformed, or not a frame of an endpoint.
    pub fn parse(frame: RawFrame<'a>) -> Result<ClientFrame<'a>, StreamFrameError> {
        let RawFrame { kind, payload, .. } = frame;
        match kind {
            FrameKind::Start => StartFrame::parse(payload).map(ClientFrame::Start),
            FrameKind::Body if payload.is_empty() || payload.len() > MAX_PIECE_BYTES => {
                Err(kind.malformed("a piece has 1 to 65,536 bytes"))
            }
            FrameKind::Body => Ok(ClientFrame::Body(payload)),
            FrameKind::Credit => match <[u8; 4]>::try_from(payload).map(u32::from_le_bytes) {
                Ok(credit @ 1..=MAX_CREDIT) => Ok(ClientFrame::Credit(credit)),
                Ok(_) => Err(kind.malformed("the credit is out of range")),
                Err(_) => Err(kind.malformed("its length is not 4")),
            },
            FrameKind::Cancel if payload.is_empty() => Ok(ClientFrame::Cancel),
            FrameKind::Cancel => Err(kind.malformed("it is not empty")),
            FrameKind::Told => ToldTokens::parse(payload).map(ClientFrame::Told),
            FrameKind::Step
            | FrameKind::Accepted
            | FrameKind::Event
            | FrameKind::Vector
            | FrameKind::Error
            | FrameKind::End
            | FrameKind::Alive
            | FrameKind::Drafted => Err(StreamFrameError::UnknownKind(kind as u8)),
        }
    }
}

impl<'a> StartFrame<'a> {
    fn parse(payload: &'a [u8]) -> Result<StartFrame<'a>, StreamFrameError> {
        let malformed = |problem| FrameKind::Start.malformed(problem);
        let (mut head, rest) = payload.split_at_checked(START_BYTES).ok_or_else(|| malformed("it is too short"))?;
        let work = StreamWork::from_number(head.get_u8()).ok_or_else(|| malformed("its work is unknown"))?;
        let n_traceparent = usize::from(head.get_u8());
        if head.get_u16_le() != 0 {
            return Err(StreamFrameError::Reserved);
        }
        let credit = head.get_u32_le();
        if credit > MAX_CREDIT {
            return Err(malformed("the credit is out of range"));
        }
        let body_bytes = head.get_u32_le() as usize;
        if body_bytes > MAX_BODY_BYTES {
            return Err(malformed("the body is too long"));
        }
        let (traceparent, piece) =
            rest.split_at_checked(n_traceparent).ok_or_else(|| malformed("the traceparent is cut off"))?;
        let traceparent = std::str::from_utf8(traceparent).map_err(|_| malformed("the traceparent is not text"))?;
        if piece.len() > body_bytes.min(MAX_PIECE_BYTES) {
            return Err(malformed("the piece is longer than the body"));
        }
        let traceparent = Some(traceparent).filter(|text| !text.is_empty());
        Ok(StartFrame { work, credit, traceparent, body_bytes, piece })
    }
}

/// A stream to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewStream<'a> {
    /// What it does.
    pub work: StreamWork,
    /// Its first credit, at most [`MAX_CREDIT`].
    pub credit: u32,
    /// The caller's span, as a W3C `traceparent`. One that is too long is left out.
    pub traceparent: Option<&'a str>,
    /// The body, at most [`MAX_BODY_BYTES`].
    pub body: &'a [u8],
}

/// Appends a start with as much of the body as one piece holds. Returns the rest, which the caller sends with
/// [`put_body`].
pub fn put_start<'a>(out: &mut BytesMut, stream: u32, new: &NewStream<'a>) -> &'a [u8] {
    let NewStream { work, credit, traceparent, body } = *new;
    let traceparent = traceparent.filter(|text| text.len() <= MAX_TRACEPARENT_BYTES).unwrap_or_default();
    let (piece, rest) = body.split_at(body.len().min(MAX_PIECE_BYTES));
    put_head(out, FrameKind::Start, stream, START_BYTES + traceparent.len() + piece.len());
    out.put_u8(work as u8);
    out.put_u8(traceparent.len() as u8);
    out.put_u16_le(0);
    out.put_u32_le(credit);
    out.put_u32_le(body.len() as u32);
    out.put_slice(traceparent.as_bytes());
    out.put_slice(piece);
    rest
}

/// Appends the next piece of a body. Returns the rest.
pub fn put_body<'a>(out: &mut BytesMut, stream: u32, body: &'a [u8]) -> &'a [u8] {
    let (piece, rest) = body.split_at(body.len().min(MAX_PIECE_BYTES));
    put_head(out, FrameKind::Body, stream, piece.len());
    out.put_slice(piece);
    rest
}

/// Appends a grant of credit.
pub fn put_credit(out: &mut BytesMut, stream: u32, credit: u32) {
    put_head(out, FrameKind::Credit, stream, 4);
    out.put_u32_le(credit);
}

/// Appends the end of a stream that is no longer wanted.
pub fn put_cancel(out: &mut BytesMut, stream: u32) {
    put_head(out, FrameKind::Cancel, stream, 0);
}
