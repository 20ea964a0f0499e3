//! Records that are being received.

use super::payload::{OpenRecord, Payload};
use super::progress::ReaderProgress;
use crate::kv::error::FrameError;
use crate::kv::placement::Placement;
use crate::kv::record::{HandoffKey, RecordHeader};

/// A field of `N` bytes that arrives in pieces.
pub(super) struct Fixed<const N: usize> {
    bytes: [u8; N],
    n_filled: usize,
}

impl<const N: usize> Fixed<N> {
    pub(super) fn new() -> Self {
        Fixed { bytes: [0; N], n_filled: 0 }
    }

    /// Takes missing bytes from the front of `input`. Returns the field if it is complete.
    pub(super) fn fill(&mut self, input: &mut &[u8]) -> Option<[u8; N]> {
        let taken = take(input, N - self.n_filled);
        self.bytes[self.n_filled..][..taken.len()].copy_from_slice(taken);
        self.n_filled += taken.len();
        (self.n_filled == N).then_some(self.bytes)
    }
}

/// A record whose header has arrived.
pub(super) struct IncomingRecord {
    record: OpenRecord,
    hasher: blake3::Hasher,
    n_missing: u64,
}

impl IncomingRecord {
    /// Creates a record whose header was parsed from `bytes`.
    pub(super) fn new(key: &HandoffKey, bytes: &[u8], record: OpenRecord) -> Self {
        let mut hasher = key.hasher();
        hasher.update(bytes);
        IncomingRecord { hasher, n_missing: record.header.length, record }
    }

    /// Takes as much of the payload as possible from the front of `input`.
    pub(super) fn receive<P: Placement>(
        &mut self,
        input: &mut &[u8],
        progress: &mut ReaderProgress<P>,
    ) -> Result<(), FrameError> {
        let mut bytes = take(input, usize::try_from(self.n_missing).unwrap_or(usize::MAX));
        self.n_missing -= bytes.len() as u64;
        let OpenRecord { header: RecordHeader { length: n_payload, .. }, payload } = &mut self.record;
        if let Payload::Header(header, length) = payload {
            header.extend_from_slice(take(&mut bytes, *length - header.len()));
            if header.len() < *length {
                return Ok(());
            }
            self.hasher.update(header);
            let n_body = *n_payload - header.len() as u64;
            let (header, rows) = progress.open_rows(header, n_body)?;
            *payload = Payload::Plain(header, rows);
        }
        match payload {
            // Grows with the received bytes, not with the claimed length.
            Payload::Message(payload) | Payload::Encoded(payload) => payload.extend_from_slice(bytes),
            Payload::Header(..) => {}
            Payload::Plain(_, rows) => rows.receive(bytes, &mut self.hasher),
        }
        Ok(())
    }

    pub(super) fn is_complete(&self) -> bool {
        self.n_missing == 0
    }

    /// Returns the record if `mac` is its MAC.
    pub(super) fn verify(mut self, mac: [u8; 32]) -> Result<OpenRecord, FrameError> {
        if let Payload::Message(payload) | Payload::Encoded(payload) = &self.record.payload {
            self.hasher.update(payload);
        }
        // This comparison takes constant time.
        if self.hasher.finalize() != blake3::Hash::from_bytes(mac) {
            let RecordHeader { index: record, kind, .. } = self.record.header;
            return Err(FrameError::Mac { record, kind });
        }
        Ok(self.record)
    }
}

/// Splits up to `n_bytes` off the front of `input`.
fn take<'a>(input: &mut &'a [u8], n_bytes: usize) -> &'a [u8] {
    let (taken, rest) = input.split_at(n_bytes.min(input.len()));
    *input = rest;
    taken
}
