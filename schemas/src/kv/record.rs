//! A handoff is a stream of records. The MAC of a record proves its integrity, its origin, its position in the stream,
//! and the pull that it answers.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | magic `BKV1` |
//! | 4 | 1 | [`RecordKind`] |
//! | 5 | 3 | zero |
//! | 8 | 4 | index of the record in its stream, from 0 |
//! | 12 | 8 | length of the payload in bytes |
//! | 20 | length | payload |
//! | 20 + length | 32 | [`Mac`], keyed with the [`HandoffKey`], of everything before |
//!
//! Integers are little-endian. `docs/kv-frames.md` is the whole format.

use std::fmt;

use aegis::aegis128x2::Aegis128X2Mac;
use bytes::Bytes;

use super::error::FrameError;
use super::handoff::HandoffId;
pub use super::mac::MAC_BYTES;
use super::mac::{Mac, RecordMac};
pub use super::record_kind::RecordKind;

/// The first bytes of every record.
pub const MAGIC: [u8; 4] = *b"BKV1";

/// The number of bytes of a record before its payload.
pub const HEADER_BYTES: usize = 20;

/// Separates these keys from all other uses of a cluster key.
const KEY_CONTEXT: &str = "baton kv handoff v1";

/// The same, for AEGIS: no key is used by two algorithms.
const AEGIS_KEY_CONTEXT: &str = "baton kv handoff v1 aegis128x2";

/// A record's fixed header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordHeader {
    /// The kind of the payload.
    pub kind: RecordKind,
    /// The index of the record in the stream, from 0.
    pub index: u32,
    /// The length of the payload in bytes.
    pub length: u64,
}

impl RecordHeader {
    /// Writes the header in the wire format.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[8..12].copy_from_slice(&self.index.to_le_bytes());
        bytes[12..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// Parses the header of record `index`. Errors: the record has another index. Does not check the length.
    pub fn parse(bytes: &[u8; HEADER_BYTES], index: u32) -> Result<RecordHeader, FrameError> {
        let [m0, m1, m2, m3, kind, z0, z1, z2, i0, i1, i2, i3, length @ ..] = *bytes;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(FrameError::Magic { record: index });
        }
        let kind = RecordKind::from_number(kind).ok_or(FrameError::RecordKind { record: index, kind })?;
        if [z0, z1, z2] != [0; 3] {
            return Err(FrameError::Reserved { record: index });
        }
        let found = u32::from_le_bytes([i0, i1, i2, i3]);
        if found != index {
            return Err(FrameError::Index { expected: index, found });
        }
        Ok(RecordHeader { kind, index, length: u64::from_le_bytes(length) })
    }
}

/// The keys of one handoff's MACs. Both sides derive them; they are never sent.
#[derive(Clone)]
pub struct HandoffKey {
    blake3: [u8; 32],
    aegis: [u8; 16],
}

impl fmt::Debug for HandoffKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HandoffKey(..)")
    }
}

impl HandoffKey {
    /// Derives the keys with BLAKE3 from `u64 length of the cluster key ‖ cluster key ‖ handoff id`.
    pub fn derive(cluster_key: &[u8], id: HandoffId) -> HandoffKey {
        let derived = |context| {
            let mut hasher = blake3::Hasher::new_derive_key(context);
            hasher.update(&(cluster_key.len() as u64).to_le_bytes());
            hasher.update(cluster_key);
            hasher.update(&id.0);
            hasher.finalize_xof()
        };
        let mut key = HandoffKey { blake3: [0; 32], aegis: [0; 16] };
        derived(KEY_CONTEXT).fill(&mut key.blake3);
        derived(AEGIS_KEY_CONTEXT).fill(&mut key.aegis);
        key
    }

    /// Begins the MAC of record `index`.
    pub(super) fn begin(&self, mac: Mac, index: u32) -> RecordMac {
        match mac {
            Mac::Blake3 => RecordMac::Blake3(Box::new(blake3::Hasher::new_keyed(&self.blake3))),
            Mac::Aegis128x2 => {
                let mut nonce = [0; 16];
                nonce[..4].copy_from_slice(&index.to_le_bytes());
                RecordMac::Aegis128x2(Box::new(Aegis128X2Mac::new_with_nonce(&self.aegis, &nonce)))
            }
        }
    }

    /// Creates a record with this payload. The payload's pieces are hashed in place and not copied.
    pub fn seal(&self, mac: Mac, kind: RecordKind, index: u32, payload: Vec<Bytes>) -> Vec<Bytes> {
        let length = payload.iter().map(|piece| piece.len() as u64).sum();
        let header = RecordHeader { kind, index, length }.to_bytes();
        let mut mac = self.begin(mac, index);
        mac.update(&header);
        for piece in &payload {
            mac.update(piece);
        }
        let mac = Bytes::copy_from_slice(&mac.finish());
        let header = Bytes::copy_from_slice(&header);
        [header].into_iter().chain(payload.into_iter().filter(|piece| !piece.is_empty())).chain([mac]).collect()
    }
}
