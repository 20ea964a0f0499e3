//! Records that are being received.

use super::payload::{OpenRecord, Payload};
use super::progress::ReaderProgress;
use crate::kv::error::FrameError;
use crate::kv::mac::RecordMac;
use crate::kv::placement::Placement;
use crate::kv::record::{MAC_BYTES, RecordHeader};

/// A field of `N` bytes that arrives in pieces.
pub(super) struct Fixed<const N: usize> {
    bytes: [u8; N],
    n_filled: usize,
}

impl<const N: usize> Fixed<N> {
    pub(super) fn new() -> Self {
        Fixed { bytes: [0; N], n_filled: 0 }
    }

    /// The room for the missing bytes.
    pub(super) fn space(&mut self) -> &mut [u8] {
        &mut self.bytes[self.n_filled..]
    }

    /// Takes the first `n_bytes` of the room as received. Returns the field if it is complete.
    pub(super) fn filled(&mut self, n_bytes: usize) -> Option<[u8; N]> {
        self.n_filled = (self.n_filled + n_bytes).min(N);
        (self.n_filled == N).then_some(self.bytes)
    }
}

/// A record whose header has arrived.
pub(super) struct IncomingRecord {
    record: OpenRecord,
    mac: RecordMac,
    n_missing: u64,
}

impl IncomingRecord {
    /// Creates a record whose header was parsed from `bytes`. `mac` is empty.
    pub(super) fn new(mut mac: RecordMac, bytes: &[u8], record: OpenRecord) -> Self {
        mac.update(bytes);
        IncomingRecord { mac, n_missing: record.header.length, record }
    }

    /// The room for the next bytes of the payload.
    pub(super) fn space(&mut self) -> &mut [u8] {
        match &mut self.record.payload {
            Payload::Message(payload) | Payload::Encoded(payload) | Payload::States(payload) => {
                payload.space(self.n_missing)
            }
            Payload::Header(header, n_missing) => header.space(*n_missing),
            Payload::Plain(_, rows) => rows.space(),
        }
    }

    /// Takes the first `n_bytes` of the room as received.
    pub(super) fn filled<P: Placement>(
        &mut self,
        n_bytes: usize,
        progress: &mut ReaderProgress<P>,
    ) -> Result<(), FrameError> {
        self.n_missing = self.n_missing.saturating_sub(n_bytes as u64);
        match &mut self.record.payload {
            Payload::Message(payload) | Payload::Encoded(payload) | Payload::States(payload) => {
                self.mac.update(payload.filled(n_bytes));
            }
            Payload::Plain(_, rows) => rows.filled(n_bytes, &mut self.mac),
            Payload::Header(header, n_missing) => {
                self.mac.update(header.filled(n_bytes));
                *n_missing = n_missing.saturating_sub(n_bytes as u64);
                if *n_missing == 0 {
                    let (header, rows) = progress.open_rows(header.received(), self.n_missing)?;
                    self.record.payload = Payload::Plain(header, rows);
                }
            }
        }
        Ok(())
    }

    pub(super) fn is_complete(&self) -> bool {
        self.n_missing == 0
    }

    /// Returns the record if `mac` is its MAC.
    pub(super) fn verify(self, mac: &[u8; MAC_BYTES]) -> Result<OpenRecord, FrameError> {
        if !self.mac.is(mac) {
            let RecordHeader { index: record, kind, .. } = self.record.header;
            return Err(FrameError::Mac { record, kind });
        }
        Ok(self.record)
    }
}
