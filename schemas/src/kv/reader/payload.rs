//! The payload of a record while it arrives.

use super::rows::IncomingRows;
use crate::kv::frame::FrameHeader;

/// What is received of a payload. Only a plain frame is looked into before its MAC, since the size of its buffer
/// depends on its header.
pub(super) enum Payload {
    /// Of any kind but a frame.
    Message(Vec<u8>),
    /// A frame with a codec.
    Encoded(Vec<u8>),
    /// The header of a frame whose rows travel as they are, of the length given.
    Header(Vec<u8>, usize),
    /// Such a frame's header and rows.
    Plain(FrameHeader, IncomingRows),
}
