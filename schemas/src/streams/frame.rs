//! The head that every frame begins with, and the split of received bytes into frames.

use bytes::{Buf, BufMut, BytesMut};

use super::error::StreamFrameError;

/// The length of a head: `u32 length of the payload, u8 kind, 3 zero bytes, u32 stream`.
pub const HEAD_BYTES: usize = 12;

/// The kind of a frame. Numbers are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum FrameKind {
    /// An endpoint starts a stream.
    Start = 1,
    /// The next piece of a start's body.
    Body = 2,
    /// An endpoint grants a stream more credit.
    Credit = 3,
    /// An endpoint no longer wants a stream.
    Cancel = 4,
    /// Tokens that the sequence of a stream of drafts has got.
    Told = 5,
    /// The tokens of one engine step, of any number of streams.
    Step = 16,
    /// A node has queued a stream's request.
    Accepted = 17,
    /// A rare event of a stream, in JSON.
    Event = 18,
    /// The vector of a text.
    Vector = 19,
    /// A stream's request was refused, or failed. Nothing of this stream follows.
    Error = 20,
    /// A stream has ended that has no last event of its own. Nothing of this stream follows.
    End = 21,
    /// A sign of life of the node.
    Alive = 22,
    /// Candidates for the next tokens of a stream of drafts.
    Drafted = 23,
}

impl FrameKind {
    /// Every kind.
    pub const ALL: [FrameKind; 13] = [
        FrameKind::Start,
        FrameKind::Body,
        FrameKind::Credit,
        FrameKind::Cancel,
        FrameKind::Told,
        FrameKind::Step,
        FrameKind::Accepted,
        FrameKind::Event,
        FrameKind::Vector,
        FrameKind::Error,
        FrameKind::End,
        FrameKind::Alive,
        FrameKind::Drafted,
    ];

    /// Returns the kind with this number on the wire.
    pub fn from_number(number: u8) -> Option<FrameKind> {
        FrameKind::ALL.into_iter().find(|kind| *kind as u8 == number)
    }

    /// The word in errors.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns true for frames that belong to the connection and not to one stream.
    fn is_of_connection(self) -> bool {
        matches!(self, FrameKind::Step | FrameKind::Alive)
    }

    /// The error for a payload of the wrong form.
    pub(super) fn malformed(self, problem: &'static str) -> StreamFrameError {
        StreamFrameError::Malformed { kind: self.as_str(), problem }
    }
}

/// A whole frame whose head was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawFrame<'a> {
    /// The kind.
    pub kind: FrameKind,
    /// The number of the stream; 0 if the frame belongs to the connection.
    pub stream: u32,
    /// The payload.
    pub payload: &'a [u8],
}

/// Received bytes, which it splits into frames.
#[derive(Debug)]
pub struct FrameBuffer {
    bytes: BytesMut,
    /// Bytes of the frame that was returned last.
    n_used: usize,
    max_payload: usize,
}

impl FrameBuffer {
    /// An empty buffer. A payload may have `max_payload` bytes.
    pub fn new(max_payload: usize) -> FrameBuffer {
        FrameBuffer { bytes: BytesMut::new(), n_used: 0, max_payload }
    }

    /// The place for received bytes: append them.
    pub fn space(&mut self) -> &mut BytesMut {
        self.bytes.advance(std::mem::take(&mut self.n_used));
        &mut self.bytes
    }

    /// The next whole frame. `None`: more bytes are needed. A length is checked as soon as the head is there, so the
    /// buffer never grows beyond one frame and one read. Errors: the head is invalid.
    pub fn next_frame(&mut self) -> Result<Option<RawFrame<'_>>, StreamFrameError> {
        self.bytes.advance(std::mem::take(&mut self.n_used));
        let Some(&[l0, l1, l2, l3, kind, z0, z1, z2, s0, s1, s2, s3]) = self.bytes.first_chunk::<HEAD_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let kind = FrameKind::from_number(kind).ok_or(StreamFrameError::UnknownKind(kind))?;
        let stream = u32::from_le_bytes([s0, s1, s2, s3]);
        if [z0, z1, z2] != [0; 3] {
            return Err(StreamFrameError::Reserved);
        }
        if length as usize > self.max_payload {
            return Err(StreamFrameError::TooLong { length, most: self.max_payload });
        }
        if kind.is_of_connection() != (stream == 0) {
            return Err(StreamFrameError::Stream(stream));
        }
        let end = HEAD_BYTES + length as usize;
        let Some(payload) = self.bytes.get(HEAD_BYTES..end) else { return Ok(None) };
        self.n_used = end;
        Ok(Some(RawFrame { kind, stream, payload }))
    }
}

/// Appends a head. The caller has checked the length.
pub(super) fn put_head(out: &mut BytesMut, kind: FrameKind, stream: u32, length: usize) {
    out.put_u32_le(length as u32);
    out.put_u8(kind as u8);
    out.put_bytes(0, 3);
    out.put_u32_le(stream);
}
