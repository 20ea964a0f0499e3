//! The payload of a record that is being received.

use super::rows::IncomingRows;
use crate::kv::frame::FrameHeader;
use crate::kv::record::RecordHeader;

/// A record's header and the received part of its payload.
pub(super) struct OpenRecord {
    pub(super) header: RecordHeader,
    pub(super) payload: Payload,
}

/// The received part of a payload. Only a plain frame is parsed before its MAC is checked, since the size of its buffer
/// depends on its header.
pub(super) enum Payload {
    /// The JSON of a record other than a frame.
    Message(Vec<u8>),
    /// An encoded frame.
    Encoded(Vec<u8>),
    /// The received part of a plain frame's header, and the header's length.
    Header(Vec<u8>, usize),
    /// A plain frame's header and rows.
    Plain(FrameHeader, IncomingRows),
}
