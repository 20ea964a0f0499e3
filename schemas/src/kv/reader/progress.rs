//! Checks each record against the handoff and the records before it.

use std::sync::Arc;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::offer::Offer;
use super::payload::{Growing, OpenRecord, Payload};
use super::received::HandoffRecord;
use super::rows::IncomingRows;
use super::states::IncomingStates;
use crate::kv::codec::{Codec, Coders, Decoder, TensorRows};
use crate::kv::error::FrameError;
use crate::kv::finite::all_finite;
use crate::kv::frame::{FrameHeader, Span};
use crate::kv::handoff::{Handoff, HandoffError, MAX_FRAME_BYTES, MAX_FRAME_POSITIONS};
use crate::kv::layout::{KvLayout, Rows};
use crate::kv::mac::Mac;
use crate::kv::messages::{HandoffEnd, HandoffHead, MAX_HEAD_BYTES, MAX_MESSAGE_BYTES, Wait, format_version};
use crate::kv::placement::{Placement, Places};
use crate::kv::prefix::PrefixHasher;
use crate::kv::record::{HEADER_BYTES, RecordHeader, RecordKind};
use crate::kv::state_record::StateQueue;
use crate::kv::verified::VerifiedKv;

/// The requested handoff, and the progress of reading it.
pub(super) struct ReaderProgress<P> {
    handoff: Handoff,
    layout: Arc<KvLayout>,
    codecs: Vec<Codec>,
    state_codecs: Vec<Codec>,
    macs: Vec<Mac>,
    placement: P,
    /// The buffer of an earlier frame, for the next one.
    spare: Vec<u8>,
    /// Set by the head.
    mac: Mac,
    /// Set by the head.
    codec: Codec,
    /// Set by the head.
    is_lossy: bool,
    decoders: Option<Coders<Decoder>>,
    states: IncomingStates,
    /// The hash of the tokens before `next`.
    prefix: PrefixHasher,
    next: u32,
    n_frames: u32,
    n_records: u32,
}

impl<P: Placement> ReaderProgress<P> {
    pub(super) fn new(handoff: Handoff, offer: Offer<'_>, placement: P) -> Result<Self, HandoffError> {
        handoff.check()?;
        let mut prefix = PrefixHasher::new();
        prefix.extend(&handoff.tokens[..handoff.start as usize]);
        let layout = Arc::new(handoff.layout.clone());
        Ok(ReaderProgress {
            states: IncomingStates::new(Arc::clone(&layout), StateQueue::none()),
            layout,
            codecs: offer.codecs.to_vec(),
            state_codecs: offer.state_codecs.to_vec(),
            macs: offer.macs.to_vec(),
            placement,
            spare: Vec::new(),
            mac: Mac::Blake3,
            codec: Codec::None,
            is_lossy: false,
            decoders: None,
            prefix,
            next: handoff.start,
            n_frames: 0,
            n_records: 0,
            handoff,
        })
    }

    pub(super) fn position(&self) -> u32 {
        self.next
    }

    /// Returns the MAC of the next record.
    pub(super) fn mac(&self) -> Mac {
        self.mac
    }

    /// Takes a buffer back for the next frame.
    pub(super) fn recycle(&mut self, buffer: Vec<u8>) {
        if buffer.capacity() > self.spare.capacity() {
            self.spare = buffer;
        }
    }

    /// Checks the header of the next record, and prepares to receive its payload.
    pub(super) fn open(&mut self, bytes: &[u8; HEADER_BYTES]) -> Result<OpenRecord, FrameError> {
        let header = RecordHeader::parse(bytes, self.n_records)?;
        let RecordHeader { kind, index: record, length } = header;
        if (kind == RecordKind::Head) != (record == 0) {
            return Err(FrameError::OutOfPlace { record, kind });
        }
        let limit = match kind {
            RecordKind::Head => MAX_HEAD_BYTES,
            RecordKind::End | RecordKind::Error | RecordKind::Wait => MAX_MESSAGE_BYTES,
            RecordKind::Frame => self.max_frame_bytes(),
            RecordKind::State => self.states.max_bytes(record)?,
        };
        if length > limit {
            return Err(FrameError::TooLong { record, kind, length, limit });
        }
        let n_header = FrameHeader::n_bytes(self.layout.sections.len());
        let payload = match kind {
            RecordKind::Head | RecordKind::End | RecordKind::Error | RecordKind::Wait => {
                Payload::Message(Growing::default())
            }
            RecordKind::State => Payload::States(Growing::default()),
            RecordKind::Frame if length < n_header as u64 => {
                return Err(FrameError::FrameTooShort { n_bytes: length as usize });
            }
            RecordKind::Frame if self.decoders.is_none() => Payload::Header(Growing::default(), n_header as u64),
            RecordKind::Frame => Payload::Encoded(Growing::default()),
        };
        self.n_records = record.checked_add(1).ok_or(FrameError::TooManyRecords)?;
        Ok(OpenRecord { header, payload })
    }

    /// Allocates the buffer for the rows of a plain frame after its header has arrived. Only memory may depend on the
    /// header until the MAC is checked.
    pub(super) fn open_rows(&mut self, header: &[u8], n_body: u64) -> Result<(FrameHeader, IncomingRows), FrameError> {
        let (header, _) = self.header(header)?;
        let Span { p0, p1, .. } = header.span;
        let expected = header.span.n_bytes(&self.layout);
        if n_body != expected {
            return Err(FrameError::BodyLength { p0, p1, expected, found: n_body });
        }
        let places = self.places(&header.span)?;
        let buffer = self.buffer(places.n_bytes);
        let rows = IncomingRows::new(&header.span, &self.layout, places, buffer);
        Ok((header, rows))
    }

    /// Parses a record whose MAC is correct. `None`: it has some of a position's states, and the others are missing.
    pub(super) fn accept(&mut self, opened: OpenRecord) -> Result<Option<HandoffRecord>, FrameError> {
        let RecordHeader { kind, index: record, .. } = opened.header;
        let accepted = match (opened.payload, kind) {
            (Payload::Message(json), RecordKind::Head) => self.head(json.received()).map(HandoffRecord::Head),
            (Payload::Message(json), RecordKind::Wait) => {
                self.wait(parse(record, kind, json.received())?, record).map(HandoffRecord::Wait)
            }
            (Payload::Message(json), RecordKind::End) => {
                self.end(parse(record, kind, json.received())?, record).map(HandoffRecord::End)
            }
            (Payload::Message(json), RecordKind::Error) => {
                parse(record, kind, json.received()).map(HandoffRecord::Error)
            }
            (Payload::Plain(header, rows), RecordKind::Frame) => self.plain(header, rows).map(HandoffRecord::Frame),
            (Payload::Encoded(bytes), RecordKind::Frame) => self.encoded(bytes.received()).map(HandoffRecord::Frame),
            (Payload::States(bytes), RecordKind::State) => {
                return Ok(self.states.accept(bytes.into_received())?.map(HandoffRecord::State));
            }
            // Unreachable: `open` pairs kinds and payloads, and refuses frames that are shorter than their header.
            (
                Payload::Message(_)
                | Payload::Plain(..)
                | Payload::Encoded(_)
                | Payload::Header(..)
                | Payload::States(_),
                _,
            ) => Err(FrameError::OutOfPlace { record, kind }),
        };
        accepted.map(Some)
    }

    fn head(&mut self, json: &[u8]) -> Result<HandoffHead, FrameError> {
        // Parse the version first: the rest of another version's head may not parse at all.
        #[derive(Deserialize)]
        struct HeadVersion {
            version: u32,
        }
        let HeadVersion { version } = parse(0, RecordKind::Head, json)?;
        let expected = format_version(&self.layout);
        if version != expected {
            return Err(FrameError::Version { expected, found: version });
        }
        let head: HandoffHead = parse(0, RecordKind::Head, json)?;
        let Handoff { id, fingerprint, start, .. } = self.handoff;
        let end = self.handoff.end();
        if head.handoff != id {
            return Err(FrameError::HandoffId);
        }
        if head.fingerprint != fingerprint {
            return Err(FrameError::Fingerprint);
        }
        if head.layout != self.handoff.layout {
            return Err(FrameError::Layout);
        }
        if (head.start, head.end) != (start, end) {
            return Err(FrameError::Range { start, end, found_start: head.start, found_end: head.end });
        }
        if !self.codecs.contains(&head.codec) {
            return Err(FrameError::CodecRefused { codec: head.codec });
        }
        // A writer that finds no MAC in the offer takes the default.
        if head.mac != Mac::default() && !self.macs.contains(&head.mac) {
            return Err(FrameError::MacRefused { mac: head.mac });
        }
        let is_offered = head.state_codec == Codec::None || self.state_codecs.contains(&head.state_codec);
        if !is_offered || head.state_codec.check_states(&self.layout).is_err() {
            return Err(FrameError::StateCodecRefused { codec: head.state_codec });
        }
        let states = StateQueue::new(&self.handoff, &head.states_at, head.state_codec)?;
        self.states = IncomingStates::new(Arc::clone(&self.layout), states);
        self.mac = head.mac;
        self.codec = head.codec;
        self.is_lossy = head.codec.is_lossy() || head.state_codec.is_lossy();
        let rotation = head.rotation.as_ref().filter(|_| head.codec.undoes_rotation());
        rotation.map_or(Ok(()), |rotation| rotation.check(&self.layout))?;
        let decoders = Coders::new(self.layout.n_tensors(), || Decoder::new(head.codec, &self.layout, rotation));
        self.decoders = decoders.map_err(|reason| FrameError::Codec { codec: head.codec, reason })?;
        Ok(head)
    }

    fn wait(&self, wait: Wait, record: u32) -> Result<Wait, FrameError> {
        if wait.n_done > self.handoff.end() {
            return Err(FrameError::Numbers { record, kind: RecordKind::Wait });
        }
        Ok(wait)
    }

    fn end(&self, message: HandoffEnd, record: u32) -> Result<HandoffEnd, FrameError> {
        let start = self.handoff.start;
        let end = self.handoff.end();
        if self.next != end {
            return Err(FrameError::Incomplete { next: self.next, end });
        }
        self.states.missing().map_or(Ok(()), |position| Err(FrameError::StateMissing { position }))?;
        if message.n_frames != self.n_frames {
            return Err(FrameError::FrameCount { expected: self.n_frames, found: message.n_frames });
        }
        if (message.start, message.end) != (start, end) {
            return Err(FrameError::Range { start, end, found_start: message.start, found_end: message.end });
        }
        if !message.timings.are_possible(end) {
            return Err(FrameError::Numbers { record, kind: RecordKind::End });
        }
        Ok(message)
    }

    fn plain(&mut self, header: FrameHeader, rows: IncomingRows) -> Result<VerifiedKv, FrameError> {
        let prefix = self.prefix_of(&header)?;
        let Span { p0, p1, .. } = header.span;
        let (buffer, places) = rows.finish().map_err(|tensor| FrameError::NotFinite { p0, p1, tensor })?;
        Ok(self.take_in(header.span, prefix, places, buffer))
    }

    fn encoded(&mut self, bytes: &[u8]) -> Result<VerifiedKv, FrameError> {
        let (header, body) = self.header(bytes)?;
        let prefix = self.prefix_of(&header)?;
        let Span { p0, p1, .. } = header.span;
        let tensors = split_body(body, &header.span, self.layout.n_tensors())?;
        let places = self.places(&header.span)?;
        let mut buffer = self.buffer(places.n_bytes);
        let n_bytes = buffer.len();
        let layout = Arc::clone(&self.layout);
        let shapes = header.span.tensors(&layout).zip(header.span.tensor_starts(&layout));
        let rows = shapes.enumerate().map(|(index, ((rows, _), start))| TensorRows { index, start, rows });
        let tensors = rows.zip(tensors).zip(places.split(&mut buffer));
        let decode = |decoder: &mut Decoder, ((tensor, encoded), decoded): ((TensorRows, &[u8]), &mut [u8])| {
            let TensorRows { index, rows, .. } = tensor;
            let wrong = |reason| FrameError::Decode { p0, p1, tensor: index, reason };
            decoder.decode(tensor, encoded, decoded).map_err(wrong)?;
            match all_finite(rows.dtype, decoded) {
                true => Ok(()),
                false => Err(FrameError::NotFinite { p0, p1, tensor: index }),
            }
        };
        match &mut self.decoders {
            Some(decoders) => _ = decoders.for_all(tensors, n_bytes, decode)?,
            // Unreachable: without decoders, frames are not encoded.
            None => drop(tensors),
        }
        Ok(self.take_in(header.span, prefix, places, buffer))
    }

    /// Parses and checks a frame's header. Also returns the bytes after it.
    fn header<'a>(&self, bytes: &'a [u8]) -> Result<(FrameHeader, &'a [u8]), FrameError> {
        let (header, body) = FrameHeader::parse(bytes, self.layout.sections.len())?;
        header.span.check(&self.layout, self.next, self.handoff.end())?;
        if header.codec != self.codec {
            let Span { p0, p1, .. } = header.span;
            return Err(FrameError::OtherCodec { p0, p1, expected: self.codec, found: header.codec });
        }
        Ok((header, body))
    }

    fn places(&mut self, span: &Span) -> Result<Places, FrameError> {
        let places = self.placement.place(span, &self.layout);
        let Span { p0, p1, .. } = *span;
        if places.fit(span, &self.layout) { Ok(places) } else { Err(FrameError::Placement { p0, p1 }) }
    }

    /// Returns a buffer for a frame: an earlier frame's if it is large enough. Otherwise it is zeroed memory, which the
    /// system maps page by page as it is written, so a frame that never arrives costs nothing.
    fn buffer(&mut self, n_bytes: usize) -> Vec<u8> {
        let mut buffer = std::mem::take(&mut self.spare);
        if buffer.capacity() < n_bytes {
            return vec![0; n_bytes];
        }
        buffer.resize(n_bytes, 0);
        buffer
    }

    /// Hashes the tokens up to the frame's end. Errors: the frame has another hash.
    fn prefix_of(&self, header: &FrameHeader) -> Result<PrefixHasher, FrameError> {
        let Span { p0, p1, .. } = header.span;
        let mut prefix = self.prefix.clone();
        prefix.extend(&self.handoff.tokens[p0 as usize..p1 as usize]);
        if prefix.hash() == header.prefix { Ok(prefix) } else { Err(FrameError::Prefix { p0, p1 }) }
    }

    /// Advances past a verified frame.
    fn take_in(&mut self, span: Span, prefix: PrefixHasher, places: Places, buffer: Vec<u8>) -> VerifiedKv {
        self.next = span.p1;
        self.prefix = prefix;
        self.n_frames += 1;
        VerifiedKv::new(self.layout.clone(), span, places, buffer, self.is_lossy)
    }

    /// Returns the most bytes that the payload of the next frame can have.
    fn max_frame_bytes(&self) -> u64 {
        let n_positions = (self.handoff.end() - self.next).min(MAX_FRAME_POSITIONS) as usize;
        let encoded = |rows: Rows| self.codec.max_encoded_bytes(rows, n_positions * rows.bytes()) as u64;
        let body = match self.codec {
            Codec::None => self.layout.tensors().map(encoded).sum::<u64>().min(MAX_FRAME_BYTES),
            // Codecs lengthen rows only slightly.
            _ => (4 + self.layout.tensors().map(|rows| 4 + encoded(rows)).sum::<u64>()).min(2 * MAX_FRAME_BYTES),
        };
        FrameHeader::n_bytes(self.layout.sections.len()) as u64 + body
    }
}

fn parse<T: DeserializeOwned>(record: u32, kind: RecordKind, json: &[u8]) -> Result<T, FrameError> {
    serde_json::from_slice(json).map_err(|e| FrameError::Message { record, kind, detail: e.to_string() })
}

/// Splits the body of an encoded frame into its tensors.
pub(in crate::kv) fn split_body<'a>(
    body: &'a [u8],
    span: &Span,
    n_tensors: usize,
) -> Result<Vec<&'a [u8]>, FrameError> {
    let Span { p0, p1, .. } = *span;
    let wrong = |expected: u64| FrameError::BodyLength { p0, p1, expected, found: body.len() as u64 };
    let least = 4 + 4 * n_tensors as u64;
    let (count, rest) = body.split_first_chunk::<4>().ok_or(wrong(least))?;
    let found = u32::from_le_bytes(*count);
    if found as usize != n_tensors {
        return Err(FrameError::TensorCount { p0, p1, expected: n_tensors, found });
    }
    let (lengths, mut rest) = rest.split_at_checked(4 * n_tensors).ok_or(wrong(least))?;
    let lengths = lengths.as_chunks::<4>().0.iter().map(|length| u32::from_le_bytes(*length));
    let expected = least + lengths.clone().map(u64::from).sum::<u64>();
    if expected != body.len() as u64 {
        return Err(wrong(expected));
    }
    let tensors = lengths.map_while(|length| {
        let (tensor, later) = rest.split_at_checked(length as usize)?;
        rest = later;
        Some(tensor)
    });
    Ok(tensors.collect())
}
