//! The payload of a record while it arrives.

use super::rows::IncomingRows;
use crate::kv::frame::FrameHeader;

/// The received part of a payload. Only a plain frame is parsed before its MAC is checked, since the size of its
/// buffer depends on its header.
pub(super) enum Payload {
    /// The JSON of a record that is no frame.
    Message(Vec<u8>),
    /// A frame with a codec.
    Encoded(Vec<u8>),
    /// The header of a frame whose rows travel as they are, of the length given.
    Header(Vec<u8>, usize),
    /// Such a frame's header and rows.
    Plain(FrameHeader, IncomingRows),
}
