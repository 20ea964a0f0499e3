//! The frames that a node sends.

use bytes::{BufMut, BytesMut};
use serde::Serialize;

use super::MAX_NODE_PAYLOAD;
use super::draft::{parse_drafted, put_drafted};
use super::error::{StreamFrameError, UnwritableFrame};
use super::frame::{FrameKind, HEAD_BYTES, RawFrame, put_head};
use super::token;
use crate::draft::{DraftedTokens, MAX_AHEAD};
use crate::error::EngineError;
use crate::node::NodeErrorReply;
use crate::sequence::GeneratedToken;

/// A frame of a node, whose form was checked.
#[derive(Debug, Clone, PartialEq)]
pub enum NodeFrame<'a> {
    /// Tokens of any number of streams.
    Step(StepTokens<'a>),
    /// The request is queued. Comes once, before anything else of the stream but an error.
    Accepted,
    /// JSON: a [`SequenceEvent`](crate::SequenceEvent) that is no token, an
    /// [`EmbedEvent`](crate::embed::EmbedEvent) that is no vector, or a [`NodeLoad`](crate::node::NodeLoad).
    Event(&'a [u8]),
    /// The vector of the next text.
    Vector(Vector<'a>),
    /// JSON: a [`NodeErrorReply`].
    Error(&'a [u8]),
    /// The end of a stream of loads.
    End,
    /// A sign of life.
    Alive,
    /// Candidates for the next tokens of a sequence.
    Drafted(DraftedTokens),
}

impl<'a> NodeFrame<'a> {
    /// Reads a frame's payload. The tokens of a step are read later. Errors: it is malformed, or not a frame of a node.
    pub fn parse(frame: RawFrame<'a>) -> Result<NodeFrame<'a>, StreamFrameError> {
        let RawFrame { kind, payload, .. } = frame;
        let empty = |frame| if payload.is_empty() { Ok(frame) } else { Err(kind.malformed("it is not empty")) };
        match kind {
            FrameKind::Step => Ok(NodeFrame::Step(StepTokens { payload })),
            FrameKind::Accepted => empty(NodeFrame::Accepted),
            FrameKind::Event => Ok(NodeFrame::Event(payload)),
            FrameKind::Vector => Vector::parse(payload).map(NodeFrame::Vector),
            FrameKind::Error => Ok(NodeFrame::Error(payload)),
            FrameKind::End => empty(NodeFrame::End),
            FrameKind::Alive => empty(NodeFrame::Alive),
            FrameKind::Drafted => parse_drafted(payload).map(NodeFrame::Drafted),
            FrameKind::Start | FrameKind::Body | FrameKind::Credit | FrameKind::Cancel | FrameKind::Told => {
                Err(StreamFrameError::UnknownKind(kind as u8))
            }
        }
    }
}

/// A token, and the stream that it belongs to.
#[derive(Debug, Clone, PartialEq)]
pub struct StreamToken {
    /// The stream's number.
    pub stream: u32,
    /// The token.
    pub token: GeneratedToken,
}

/// The tokens of a step, which are read one after another. After an error nothing follows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepTokens<'a> {
    payload: &'a [u8],
}

impl Iterator for StepTokens<'_> {
    type Item = Result<StreamToken, StreamFrameError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.payload.is_empty() {
            return None;
        }
        let taken = token::take(&mut self.payload);
        if taken.is_err() {
            self.payload = &[];
        }
        Some(taken.map(|(stream, token)| StreamToken { stream, token }))
    }
}

/// The values of a vector, all of them finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Vector<'a> {
    payload: &'a [u8],
}

impl<'a> Vector<'a> {
    fn parse(payload: &'a [u8]) -> Result<Vector<'a>, StreamFrameError> {
        let vector = Vector { payload };
        if !payload.len().is_multiple_of(4) {
            Err(FrameKind::Vector.malformed("its length is not a multiple of 4"))
        } else if !vector.values().all(f32::is_finite) {
            Err(FrameKind::Vector.malformed("a value is NaN or infinite"))
        } else {
            Ok(vector)
        }
    }

    /// The values.
    pub fn values(self) -> impl Iterator<Item = f32> + 'a {
        self.payload.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes))
    }
}

/// Writes a node's frames into one buffer. Tokens that follow each other share a step.
#[derive(Debug, Default)]
pub struct NodeFrameWriter {
    bytes: BytesMut,
    /// Where the head of the last frame begins, if that is a step that can take more tokens.
    open_step: Option<usize>,
    n_steps: u64,
}

impl NodeFrameWriter {
    /// The number of bytes that wait.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns true if no bytes wait.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The number of step frames so far.
    pub fn n_steps(&self) -> u64 {
        self.n_steps
    }

    /// The whole frames so far. The caller takes what it has sent off their front.
    pub fn frames(&mut self) -> &mut BytesMut {
        self.close_step();
        &mut self.bytes
    }

    /// Appends a token. Errors: it cannot be written; nothing was appended.
    pub fn token(&mut self, stream: u32, token: &GeneratedToken) -> Result<(), UnwritableFrame> {
        let length = token::length(token)?;
        if length > MAX_NODE_PAYLOAD {
            return Err(UnwritableFrame::TooLong { bytes: length });
        }
        if self.open_step.is_some_and(|start| self.bytes.len() - start - HEAD_BYTES + length > MAX_NODE_PAYLOAD) {
            self.close_step();
        }
        if self.open_step.is_none() {
            self.open_step = Some(self.bytes.len());
            self.n_steps += 1;
            put_head(&mut self.bytes, FrameKind::Step, 0, 0);
        }
        token::put(&mut self.bytes, stream, token);
        Ok(())
    }

    /// The node has queued the request.
    pub fn accepted(&mut self, stream: u32) {
        self.put(FrameKind::Accepted, stream, &[]);
    }

    /// Appends an event in JSON. Errors: it is too long; nothing was appended.
    pub fn event(&mut self, stream: u32, event: &impl Serialize) -> Result<(), UnwritableFrame> {
        self.json(FrameKind::Event, stream, event)
    }

    /// Appends a vector. Errors: it is too long, or a value is not finite; nothing was appended.
    pub fn vector(&mut self, stream: u32, vector: &[f32]) -> Result<(), UnwritableFrame> {
        let length = 4 * vector.len();
        if length > MAX_NODE_PAYLOAD {
            return Err(UnwritableFrame::TooLong { bytes: length });
        }
        if !vector.iter().copied().all(f32::is_finite) {
            return Err(UnwritableFrame::NotFinite);
        }
        self.close_step();
        put_head(&mut self.bytes, FrameKind::Vector, stream, length);
        vector.iter().for_each(|value| self.bytes.put_f32_le(*value));
        Ok(())
    }

    /// Appends candidates. Errors: they are not 1 to [`MAX_AHEAD`]; nothing was appended.
    pub fn drafted(&mut self, stream: u32, drafted: &DraftedTokens) -> Result<(), UnwritableFrame> {
        if !(1..=MAX_AHEAD).contains(&drafted.tokens.len()) {
            return Err(UnwritableFrame::TooLong { bytes: 4 * drafted.tokens.len() });
        }
        self.close_step();
        put_drafted(&mut self.bytes, stream, drafted);
        Ok(())
    }

    /// The stream failed. Texts that are too long are cut.
    pub fn error(&mut self, stream: u32, error: EngineError) {
        let error = error.shortened(MAX_ERROR_TEXT);
        // An error has a form in JSON, and a short one now.
        let written = self.json(FrameKind::Error, stream, &NodeErrorReply { error });
        debug_assert!(written.is_ok(), "an error is always written");
    }

    /// The stream has ended without a last event.
    pub fn end(&mut self, stream: u32) {
        self.put(FrameKind::End, stream, &[]);
    }

    /// A sign of life.
    pub fn alive(&mut self) {
        self.put(FrameKind::Alive, 0, &[]);
    }

    fn json(&mut self, kind: FrameKind, stream: u32, value: &impl Serialize) -> Result<(), UnwritableFrame> {
        let json = serde_json::to_vec(value).map_err(|_| UnwritableFrame::Json)?;
        if json.len() > MAX_NODE_PAYLOAD {
            return Err(UnwritableFrame::TooLong { bytes: json.len() });
        }
        self.put(kind, stream, &json);
        Ok(())
    }

    fn put(&mut self, kind: FrameKind, stream: u32, payload: &[u8]) {
        self.close_step();
        put_head(&mut self.bytes, kind, stream, payload.len());
        self.bytes.put_slice(payload);
    }

    fn close_step(&mut self) {
        if let Some(start) = self.open_step.take() {
            let length = (self.bytes.len() - start - HEAD_BYTES) as u32;
            self.bytes[start..start + 4].copy_from_slice(&length.to_le_bytes());
        }
    }
}

/// Bytes of each text of an error. JSON writes a byte as at most six.
const MAX_ERROR_TEXT: usize = 16 << 10;
