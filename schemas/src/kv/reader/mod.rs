//! Receives a handoff stream in pieces of any size, and yields only verified records.

mod offer;
mod payload;
mod progress;
mod received;
mod record;
mod rows;
mod states;

pub use self::offer::Offer;
use self::progress::ReaderProgress;
pub(super) use self::progress::split_body;
pub use self::received::HandoffRecord;
use self::record::{Fixed, IncomingRecord};
use super::codec::Codec;
use super::error::FrameError;
use super::handoff::{Handoff, HandoffError};
use super::mac::Mac;
use super::placement::{Contiguous, Placement};
use super::record::{HEADER_BYTES, HandoffKey, MAC_BYTES};

/// The reading end of a handoff: a state machine without I/O.
///
/// ```
/// # use baton_schemas::kv::{FrameError, HandoffReader, HandoffRecord};
/// fn received(reader: &mut HandoffReader, mut bytes: &[u8]) -> Result<(), FrameError> {
///     while let Some(record) = reader.read(&mut bytes)? {
///         match record {
///             HandoffRecord::Frame(kv) => println!("positions {}..{}", kv.span().p0, kv.span().p1),
///             other => println!("{other:?}"),
///         }
///     }
///     Ok(()) // All bytes were read. A stream that stops before the reader `is_ended` was cut off.
/// }
/// ```
pub struct HandoffReader<P = Contiguous> {
    key: HandoffKey,
    progress: ReaderProgress<P>,
    step: ReaderStep,
    /// Why the stream was refused, if it was.
    refused: Option<FrameError>,
}

/// The part of the stream that comes next.
enum ReaderStep {
    /// A record's header.
    Header(Fixed<HEADER_BYTES>),
    /// The rest of the record's payload.
    Payload(Box<IncomingRecord>),
    /// The record's MAC.
    Mac(Box<IncomingRecord>, Fixed<MAC_BYTES>),
    /// Nothing: the last record was read.
    Ended,
}

impl HandoffReader {
    /// Creates a reader that accepts `handoff` in one of `codecs`, with any codec of states and any MAC, and places tensors one
    /// after the other.
    pub fn new(cluster_key: &[u8], handoff: Handoff, codecs: &[Codec]) -> Result<HandoffReader, HandoffError> {
        let offer = Offer { codecs, state_codecs: &Codec::OF_STATES, macs: &Mac::ALL };
        HandoffReader::with_placement(cluster_key, handoff, offer, Contiguous)
    }
}

impl<P: Placement> HandoffReader<P> {
    /// Creates a reader that places tensors as `placement` says.
    pub fn with_placement(
        cluster_key: &[u8],
        handoff: Handoff,
        offer: Offer<'_>,
        placement: P,
    ) -> Result<HandoffReader<P>, HandoffError> {
        let key = HandoffKey::derive(cluster_key, handoff.id);
        let progress = ReaderProgress::new(handoff, offer, placement)?;
        Ok(HandoffReader { key, progress, step: ReaderStep::Header(Fixed::new()), refused: None })
    }

    /// The room for the stream's next bytes: rows that are written there need no further copy. A part of it may be
    /// filled. Empty after the last record and after an error.
    pub fn space(&mut self) -> &mut [u8] {
        match &mut self.step {
            _ if self.refused.is_some() => &mut [],
            ReaderStep::Header(header) => header.space(),
            ReaderStep::Payload(record) => record.space(),
            ReaderStep::Mac(_, mac) => mac.space(),
            ReaderStep::Ended => &mut [],
        }
    }

    /// Takes the first `n_bytes` of [`HandoffReader::space`] as received. Returns the record that they complete, if
    /// any: states are returned with the last record of their position. After an error, every call returns the same error.
    pub fn filled(&mut self, n_bytes: usize) -> Result<Option<HandoffRecord>, FrameError> {
        if let Some(refused) = &self.refused {
            return Err(refused.clone());
        }
        self.advance(n_bytes).inspect_err(|refused| self.refused = Some(refused.clone()))
    }

    /// Copies from the front of `input` up to the next record and advances `input`. `None`: all of `input` was read,
    /// and no record is complete. After an error, every call returns the same error.
    pub fn read(&mut self, input: &mut &[u8]) -> Result<Option<HandoffRecord>, FrameError> {
        loop {
            let space = self.space();
            let (now, later) = input.split_at(input.len().min(space.len()));
            space[..now.len()].copy_from_slice(now);
            if now.is_empty() && !later.is_empty() && self.refused.is_none() {
                self.refused = Some(FrameError::AfterEnd);
            }
            *input = later;
            let record = self.filled(now.len())?;
            if record.is_some() || input.is_empty() {
                return Ok(record);
            }
        }
    }

    /// Takes a frame's buffer back for the next frame. Page faults in fresh memory would cost more time than all other
    /// work of a reader.
    pub fn recycle(&mut self, buffer: Vec<u8>) {
        self.progress.recycle(buffer);
    }

    /// Returns the first position that has not arrived.
    pub fn position(&self) -> u32 {
        self.progress.position()
    }

    /// Returns true if the last record was read. A stream that stops earlier was cut off.
    pub fn is_ended(&self) -> bool {
        self.refused.is_none() && matches!(self.step, ReaderStep::Ended)
    }

    fn advance(&mut self, n_bytes: usize) -> Result<Option<HandoffRecord>, FrameError> {
        // Stays so after the last record and after a failure: nothing more is read then.
        match std::mem::replace(&mut self.step, ReaderStep::Ended) {
            ReaderStep::Header(mut header) => {
                self.step = match header.filled(n_bytes) {
                    None => ReaderStep::Header(header),
                    Some(bytes) => {
                        let opened = self.progress.open(&bytes)?;
                        let mac = self.key.begin(self.progress.mac(), opened.header.index);
                        ReaderStep::after(Box::new(IncomingRecord::new(mac, &bytes, opened)))
                    }
                }
            }
            ReaderStep::Payload(mut record) => {
                record.filled(n_bytes, &mut self.progress)?;
                self.step = ReaderStep::after(record);
            }
            ReaderStep::Mac(record, mut mac) => match mac.filled(n_bytes) {
                None => self.step = ReaderStep::Mac(record, mac),
                Some(mac) => {
                    let event = self.progress.accept(record.verify(&mac)?)?;
                    if !matches!(event, Some(HandoffRecord::End(_) | HandoffRecord::Error(_))) {
                        self.step = ReaderStep::Header(Fixed::new());
                    }
                    return Ok(event);
                }
            },
            ReaderStep::Ended => {}
        }
        Ok(None)
    }
}

impl ReaderStep {
    /// The part after the received part of a record.
    fn after(record: Box<IncomingRecord>) -> ReaderStep {
        if record.is_complete() { ReaderStep::Mac(record, Fixed::new()) } else { ReaderStep::Payload(record) }
    }
}
