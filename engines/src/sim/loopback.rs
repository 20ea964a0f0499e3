//! Passes chunks through the wire format within one process, because an engine accepts only verified KV.

use baton_link::handoff::{LocalKv, PullOrder};
use baton_schemas::handoff::{HandoffFailure, PrefillRequest};
use baton_schemas::kv::{
    Chunk, Codec, Handoff, HandoffId, HandoffReader, HandoffRecord, HandoffWriter, Mac, StatePart, VerifiedKv,
    VerifiedState,
};
use bytes::Bytes;

/// The cluster key of both ends.
const KEY: &[u8] = b"simulated";

/// The writer and the reader of one pull.
pub(super) struct Loopback {
    writer: HandoffWriter,
    reader: HandoffReader,
}

impl Loopback {
    /// The request to the prefill engine, and the loopback for its chunks.
    pub(super) fn begin(local: &LocalKv, order: PullOrder) -> Result<(PrefillRequest, Loopback), HandoffFailure> {
        let id = HandoffId(rand::random());
        let fingerprint = local.identity.fingerprint;
        let request = PrefillRequest {
            images: None,
            handoff: id,
            tokens: order.tokens.clone(),
            start: order.start,
            codecs: vec![Codec::None as u8],
            state_codecs: Vec::new(),
            state_bps: None,
            macs: Vec::new(),
            checkpoints: Vec::new(),
            fingerprint,
            cache_scope: order.cache_scope,
            ephemeral: order.ephemeral,
            gives_way: order.gives_way,
            held_only: order.held_only,
        };
        let layout = local.identity.layout.clone();
        let handoff = Handoff { id, fingerprint, layout, start: order.start, tokens: order.tokens };
        let reader = HandoffReader::new(KEY, handoff.clone(), &[Codec::None]);
        let mut reader = reader.map_err(|_| HandoffFailure::FingerprintMismatch)?;
        let (writer, head) =
            HandoffWriter::begin(KEY, handoff, Codec::None, Mac::Blake3).map_err(|_| HandoffFailure::PrefillRefused)?;
        for piece in head {
            reader.read(&mut &piece[..]).map_err(|_| HandoffFailure::FrameRejected)?;
        }
        Ok((request, Loopback { writer, reader }))
    }

    /// Writes a chunk and reads it again.
    pub(super) fn pass(&mut self, chunk: &Chunk) -> Result<VerifiedKv, HandoffFailure> {
        let record = self.writer.frame(chunk).map_err(|_| HandoffFailure::FrameRejected)?;
        match self.read(record)? {
            Some(HandoffRecord::Frame(kv)) => Ok(kv),
            _ => Err(HandoffFailure::FrameRejected),
        }
    }

    /// The same with states. `None`: others of their position are missing.
    pub(super) fn pass_states(&mut self, part: &StatePart) -> Result<Option<VerifiedState>, HandoffFailure> {
        let record = self.writer.state(part).map_err(|_| HandoffFailure::FrameRejected)?;
        match self.read(record)? {
            Some(HandoffRecord::State(state)) => Ok(Some(state)),
            None => Ok(None),
            _ => Err(HandoffFailure::FrameRejected),
        }
    }

    /// Reads a whole record.
    fn read(&mut self, record: Vec<Bytes>) -> Result<Option<HandoffRecord>, HandoffFailure> {
        for piece in record {
            match self.reader.read(&mut &piece[..]) {
                Ok(None) => {}
                Ok(event) => return Ok(event),
                Err(_) => return Err(HandoffFailure::FrameRejected),
            }
        }
        Ok(None)
    }
}
