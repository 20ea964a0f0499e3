//! Chunks through the wire format and back within one process: what an engine takes was verified, here as anywhere.

use baton_schemas::handoff::{HandoffFailure, PrefillRequest};
use baton_schemas::kv::{Chunk, Codec, Handoff, HandoffId, HandoffReader, HandoffRecord, HandoffWriter, VerifiedKv};

use crate::handoff::{LocalKv, PullOrder};

/// Both ends are here.
const KEY: &[u8] = b"simulated";

/// One pull's writer and reader.
pub(super) struct Loopback {
    writer: HandoffWriter,
    reader: HandoffReader,
}

impl Loopback {
    /// What to ask the prefill engine for, and what its chunks have to pass.
    pub(super) fn begin(local: &LocalKv, order: PullOrder) -> Result<(PrefillRequest, Loopback), HandoffFailure> {
        let id = HandoffId(rand::random());
        let fingerprint = local.identity.fingerprint;
        let request = PrefillRequest {
            handoff: id,
            tokens: order.tokens.clone(),
            start: order.start,
            codecs: vec![Codec::None as u8],
            fingerprint,
            cache_scope: order.cache_scope,
            ephemeral: order.ephemeral,
        };
        let layout = local.identity.layout.clone();
        let handoff = Handoff { id, fingerprint, layout, start: order.start, tokens: order.tokens };
        let reader = HandoffReader::new(KEY, handoff.clone(), &[Codec::None]);
        let mut reader = reader.map_err(|_| HandoffFailure::FingerprintMismatch)?;
        let (writer, head) =
            HandoffWriter::begin(KEY, handoff, Codec::None).map_err(|_| HandoffFailure::PrefillRefused)?;
        for piece in head {
            reader.read(&mut &piece[..]).map_err(|_| HandoffFailure::FrameRejected)?;
        }
        Ok((request, Loopback { writer, reader }))
    }

    /// A chunk as it comes out of the wire.
    pub(super) fn pass(&mut self, chunk: &Chunk) -> Result<VerifiedKv, HandoffFailure> {
        let record = self.writer.frame(chunk).map_err(|_| HandoffFailure::FrameRejected)?;
        for piece in record {
            match self.reader.read(&mut &piece[..]) {
                Ok(Some(HandoffRecord::Frame(kv))) => return Ok(kv),
                Ok(None) => {}
                Ok(Some(_)) | Err(_) => break,
            }
        }
        Err(HandoffFailure::FrameRejected)
    }
}
