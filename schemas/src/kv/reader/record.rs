//! A record while it arrives.

use super::payload::Payload;
use super::progress::ReaderProgress;
use crate::kv::error::FrameError;
use crate::kv::placement::Placement;
use crate::kv::record::{HandoffKey, RecordHeader};

/// A field of `N` bytes, however they are cut.
pub(super) struct Fixed<const N: usize> {
    bytes: [u8; N],
    n_filled: usize,
}

impl<const N: usize> Fixed<N> {
    pub(super) fn new() -> Self {
        Fixed { bytes: [0; N], n_filled: 0 }
    }

    /// Takes what is missing off `input`; the field once it is whole.
    pub(super) fn fill(&mut self, input: &mut &[u8]) -> Option<[u8; N]> {
        let taken = take(input, N - self.n_filled);
        self.bytes[self.n_filled..][..taken.len()].copy_from_slice(taken);
        self.n_filled += taken.len();
        (self.n_filled == N).then_some(self.bytes)
    }
}

/// A record whose header has come.
pub(super) struct IncomingRecord {
    header: RecordHeader,
    hasher: blake3::Hasher,
    n_missing: u64,
    payload: Payload,
}

impl IncomingRecord {
    /// A record with the header `header`, which reads as `bytes`.
    pub(super) fn new(key: &HandoffKey, bytes: &[u8], (header, payload): (RecordHeader, Payload)) -> Self {
        let mut hasher = key.hasher();
        hasher.update(bytes);
        IncomingRecord { header, hasher, n_missing: header.length, payload }
    }

    /// Takes as much of the payload as there is off `input`.
    pub(super) fn receive<P: Placement>(
        &mut self,
        input: &mut &[u8],
        progress: &mut ReaderProgress<P>,
    ) -> Result<(), FrameError> {
        let mut bytes = take(input, usize::try_from(self.n_missing).unwrap_or(usize::MAX));
        self.n_missing -= bytes.len() as u64;
        if let Payload::Header(header, length) = &mut self.payload {
            header.extend_from_slice(take(&mut bytes, *length - header.len()));
            if header.len() < *length {
                return Ok(());
            }
            self.hasher.update(header);
            let n_body = self.header.length - header.len() as u64;
            let (header, rows) = progress.open_rows(header, n_body)?;
            self.payload = Payload::Plain(header, rows);
        }
        match &mut self.payload {
            // Grows with what has come, not with what was claimed.
            Payload::Message(payload) | Payload::Encoded(payload) => payload.extend_from_slice(bytes),
            Payload::Header(..) => {}
            Payload::Plain(_, rows) => rows.receive(bytes, &mut self.hasher),
        }
        Ok(())
    }

    pub(super) fn is_complete(&self) -> bool {
        self.n_missing == 0
    }

    /// The record, if this is its MAC.
    pub(super) fn verify(mut self, mac: [u8; 32]) -> Result<(RecordHeader, Payload), FrameError> {
        if let Payload::Message(payload) | Payload::Encoded(payload) = &self.payload {
            self.hasher.update(payload);
        }
        // This comparison takes the same time wherever the bytes differ.
        if self.hasher.finalize() != blake3::Hash::from_bytes(mac) {
            return Err(FrameError::Mac { record: self.header.index, kind: self.header.kind });
        }
        Ok((self.header, self.payload))
    }
}

/// Splits up to `n_bytes` off the front of `input`.
fn take<'a>(input: &mut &'a [u8], n_bytes: usize) -> &'a [u8] {
    let (taken, rest) = input.split_at(n_bytes.min(input.len()));
    *input = rest;
    taken
}
