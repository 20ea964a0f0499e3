//! Writes a handoff stream. Plain rows are not copied: a record is a list of pieces, and each tensor is a piece.

use bytes::Bytes;
use serde::Serialize;

use super::chunk::Chunk;
use super::codec::{Codec, Coders, Encoder, ModelKnowledge, TensorRows, knowledge};
use super::error::{FrameError, WriteError};
use super::frame::{FrameHeader, Span};
use super::handoff::Handoff;
use super::layout::KvLayout;
use super::mac::Mac;
use super::messages::{HandoffEnd, HandoffHead, MAX_HEAD_BYTES, MAX_MESSAGE_BYTES, PrefillTimings, Wait};
use super::prefix::PrefixHasher;
use super::record::{HandoffKey, RecordKind};
use super::state::StatePart;
use super::state_record::{StateHeader, StateQueue};
use crate::error::EngineError;

/// What a writer decides about its stream, and what it knows of the model.
#[derive(Debug, Clone, Copy)]
pub struct StreamChoice<'a> {
    /// The encoding of rows.
    pub codec: Codec,
    /// The encoding of states. Ignored if the layout has none.
    pub state_codec: Codec,
    /// The MAC of every record after the head.
    pub mac: Mac,
    /// Positions before the end for which the stream has states, too, ascending. Ignored if the layout has no states.
    pub checkpoints: &'a [u32],
    /// What is known of the model.
    pub known: ModelKnowledge<'a>,
}

/// The writing end of a handoff. Each call returns a record as pieces to send one after the other. A call that fails
/// changes nothing.
///
/// A [`HandoffReader`](super::reader::HandoffReader) with the same handoff accepts everything that it writes, except
/// values that are not finite: only the reader checks for those.
pub struct HandoffWriter {
    key: HandoffKey,
    handoff: Handoff,
    codec: Codec,
    /// The MAC of the next record.
    mac: Mac,
    encoders: Option<Coders<Encoder>>,
    states: StateQueue,
    /// The hash of the tokens before `next`.
    prefix: PrefixHasher,
    next: u32,
    n_frames: u32,
    n_records: u32,
    ended: bool,
}

impl HandoffWriter {
    /// Creates a writer and its first record, the head, which says that `mac` seals the others. States, if the model has any,
    /// are those of the end.
    pub fn begin(
        cluster_key: &[u8],
        handoff: Handoff,
        codec: Codec,
        mac: Mac,
    ) -> Result<(HandoffWriter, Vec<Bytes>), WriteError> {
        let choice =
            StreamChoice { codec, state_codec: Codec::None, mac, checkpoints: &[], known: ModelKnowledge::default() };
        HandoffWriter::begin_as(cluster_key, handoff, choice)
    }

    /// The same with more choices.
    pub fn begin_as(
        cluster_key: &[u8],
        handoff: Handoff,
        choice: StreamChoice<'_>,
    ) -> Result<(HandoffWriter, Vec<Bytes>), WriteError> {
        let StreamChoice { codec, state_codec, mac, checkpoints, known } = choice;
        handoff.check()?;
        let rotation = known.rotation.filter(|_| codec.undoes_rotation());
        rotation.map_or(Ok(()), |rotation| rotation.check(&handoff.layout))?;
        if !known.tensors.is_empty() {
            knowledge::check(known.tensors, &handoff.layout)?;
        }
        let known = ModelKnowledge { rotation, ..known };
        let encoders = Coders::new(handoff.layout.n_tensors(), || Encoder::new(codec, &handoff.layout, known))?;
        let states_at = handoff.states_at(checkpoints);
        let state_codec = if states_at.is_empty() { Codec::None } else { state_codec };
        state_codec.check_states(&handoff.layout)?;
        let states = StateQueue::new(&handoff, &states_at, state_codec)?;
        let mut prefix = PrefixHasher::new();
        prefix.extend(&handoff.tokens[..handoff.start as usize]);
        let mut writer = HandoffWriter {
            key: HandoffKey::derive(cluster_key, handoff.id),
            codec,
            mac: Mac::Blake3,
            encoders,
            states,
            prefix,
            next: handoff.start,
            n_frames: 0,
            n_records: 0,
            ended: false,
            handoff,
        };
        let head = HandoffHead::of(&writer.handoff, codec, mac);
        let head =
            json(RecordKind::Head, &HandoffHead { rotation: rotation.cloned(), states_at, state_codec, ..head })?;
        let head = writer.record(RecordKind::Head, vec![head])?;
        writer.mac = mac;
        Ok((writer, head))
    }

    /// Returns the first position of the next frame.
    pub fn position(&self) -> u32 {
        self.next
    }

    /// Writes a sign of life.
    pub fn wait(&mut self, wait: Wait) -> Result<Vec<Bytes>, WriteError> {
        self.record(RecordKind::Wait, vec![json(RecordKind::Wait, &wait)?])
    }

    /// Writes the KV of the next positions.
    pub fn frame(&mut self, chunk: &Chunk) -> Result<Vec<Bytes>, WriteError> {
        let layout = &self.handoff.layout;
        chunk.check(layout)?;
        let span = Span { p0: chunk.p0, p1: chunk.p1, starts: chunk.sections.iter().map(|s| s.start).collect() };
        span.check(layout, self.next, self.handoff.end())?;
        let mut prefix = self.prefix.clone();
        prefix.extend(&self.handoff.tokens[span.p0 as usize..span.p1 as usize]);
        let header = FrameHeader { span, prefix: prefix.hash(), codec: self.codec };
        let mut payload = vec![Bytes::from(header.to_bytes())];
        match &mut self.encoders {
            None => payload.extend(chunk.tensors().cloned()),
            Some(encoders) => payload.extend(encode(encoders, chunk, layout)?),
        }
        let record = self.record(RecordKind::Frame, payload)?;
        self.prefix = prefix;
        self.next = chunk.p1;
        self.n_frames += 1;
        Ok(record)
    }

    /// Writes the next states of a position that the head names: each position's in their order, and the positions in theirs.
    /// They may come before the frame that ends at their position.
    pub fn state(&mut self, part: &StatePart) -> Result<Vec<Bytes>, WriteError> {
        let layout = &self.handoff.layout;
        part.check(layout)?;
        let StatePart { position, first, ref tensors } = *part;
        let header = self.states.header(tensors.len() as u32);
        let header = header.ok_or(FrameError::StatePosition { position, expected: None })?;
        let header = StateHeader { position, first, ..header };
        let shapes = self.states.check(&header, layout)?;
        let encoded = header.codec.encode_states(shapes.iter().zip(tensors));
        let payload = [Bytes::from(header.to_bytes())].into_iter().chain(encoded);
        let record = self.record(RecordKind::State, payload.collect())?;
        self.states.advance(tensors.len(), &self.handoff.layout);
        Ok(record)
    }

    /// Writes the end. Errors: not every position, or not every state, was sent.
    pub fn end(&mut self, timings: PrefillTimings) -> Result<Vec<Bytes>, WriteError> {
        let end = self.handoff.end();
        if self.next != end {
            return Err(FrameError::Incomplete { next: self.next, end }.into());
        }
        self.states.missing().map_or(Ok(()), |position| Err(FrameError::StateMissing { position }))?;
        if !timings.are_possible(end) {
            return Err(FrameError::Numbers { record: self.n_records, kind: RecordKind::End }.into());
        }
        let end = HandoffEnd { n_frames: self.n_frames, start: self.handoff.start, end, timings };
        self.record(RecordKind::End, vec![json(RecordKind::End, &end)?])
    }

    /// Writes the end of a handoff that failed.
    pub fn error(&mut self, error: &EngineError) -> Result<Vec<Bytes>, WriteError> {
        let payload = match json(RecordKind::Error, error) {
            // For example, an error that quotes a whole prompt.
            Err(WriteError::TooLong { .. }) => {
                json(RecordKind::Error, &EngineError::internal("an error too long to send"))?
            }
            payload => payload?,
        };
        self.record(RecordKind::Error, vec![payload])
    }

    /// Writes the next record of the stream.
    fn record(&mut self, kind: RecordKind, payload: Vec<Bytes>) -> Result<Vec<Bytes>, WriteError> {
        if self.ended {
            return Err(WriteError::Ended);
        }
        let n_records = self.n_records.checked_add(1).ok_or(FrameError::TooManyRecords)?;
        let record = self.key.seal(self.mac, kind, self.n_records, payload);
        self.n_records = n_records;
        self.ended = matches!(kind, RecordKind::End | RecordKind::Error);
        Ok(record)
    }
}

/// Writes the body of an encoded frame.
pub(super) fn encode(
    encoders: &mut Coders<Encoder>,
    chunk: &Chunk,
    layout: &KvLayout,
) -> Result<Vec<Bytes>, WriteError> {
    let layers = layout.sections.iter().zip(&chunk.sections).flat_map(|(section, rows)| {
        let start = section.rows_of(rows.start, chunk.p1).start;
        section.layers.iter().map(move |shape| (start, shape)).zip(&rows.layers)
    });
    // A missing V is not a tensor.
    let tensors = layers.flat_map(|((start, shape), rows)| {
        let v = shape.v.map(|v| (start, v, &rows.v));
        [Some((start, shape.k, &rows.k)), v].into_iter().flatten()
    });
    let tensors = tensors.enumerate().map(|(index, (start, rows, bytes))| (TensorRows { index, start, rows }, bytes));
    let encoded =
        encoders.for_all(tensors, chunk.n_bytes(), |encoder, (tensor, bytes)| encoder.encode(tensor, bytes))?;
    let mut lengths = (layout.n_tensors() as u32).to_le_bytes().to_vec();
    for encoded in &encoded {
        let too_long = |_| WriteError::TooLong { kind: RecordKind::Frame, n_bytes: encoded.len() };
        lengths.extend(u32::try_from(encoded.len()).map_err(too_long)?.to_le_bytes());
    }
    Ok([lengths].into_iter().chain(encoded).map(Bytes::from).collect())
}

/// Writes a JSON payload. Errors: it is longer than its kind allows.
fn json(kind: RecordKind, message: &impl Serialize) -> Result<Bytes, WriteError> {
    let json = serde_json::to_vec(message).map_err(|e| WriteError::Message { kind, detail: e.to_string() })?;
    let limit = if kind == RecordKind::Head { MAX_HEAD_BYTES } else { MAX_MESSAGE_BYTES };
    if json.len() as u64 > limit {
        return Err(WriteError::TooLong { kind, n_bytes: json.len() });
    }
    Ok(Bytes::from(json))
}
