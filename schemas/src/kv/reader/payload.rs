//! The payload of a record that is being received.

use super::rows::IncomingRows;
use crate::kv::frame::FrameHeader;
use crate::kv::record::RecordHeader;

/// The most bytes that a payload grows by before they arrive.
const GROWTH: u64 = 64 << 10;

/// A record's header and the received part of its payload.
pub(super) struct OpenRecord {
    pub(super) header: RecordHeader,
    pub(super) payload: Payload,
}

/// The received part of a payload. Only a plain frame is parsed before its MAC is checked, since the size of its buffer
/// depends on its header.
pub(super) enum Payload {
    /// The JSON of a record other than a frame.
    Message(Growing),
    /// An encoded frame.
    Encoded(Growing),
    /// States.
    States(Growing),
    /// The received part of a plain frame's header, and the number of its missing bytes.
    Header(Growing, u64),
    /// A plain frame's header and rows.
    Plain(FrameHeader, IncomingRows),
}

/// Bytes that are being received. Their memory grows with what has arrived, not with the claimed length.
#[derive(Default)]
pub(super) struct Growing {
    /// The received bytes, then room for more.
    bytes: Vec<u8>,
    n_filled: usize,
}

impl Growing {
    /// Returns room for some of the next `n_missing` bytes; for none if none are missing.
    pub(super) fn space(&mut self, n_missing: u64) -> &mut [u8] {
        if self.bytes.len() == self.n_filled {
            self.bytes.resize(self.n_filled + n_missing.min(GROWTH) as usize, 0);
        }
        &mut self.bytes[self.n_filled..]
    }

    /// Takes the first `n_bytes` of the room as received, and returns them.
    pub(super) fn filled(&mut self, n_bytes: usize) -> &[u8] {
        let from = self.n_filled;
        self.n_filled = (from + n_bytes).min(self.bytes.len());
        &self.bytes[from..self.n_filled]
    }

    /// Returns the received bytes.
    pub(super) fn into_received(mut self) -> Vec<u8> {
        self.bytes.truncate(self.n_filled);
        self.bytes
    }

    /// The received bytes.
    pub(super) fn received(&self) -> &[u8] {
        &self.bytes[..self.n_filled]
    }
}
