//! Reads a handoff stream, in whatever pieces it arrives, and yields only what has been verified.

mod payload;
mod progress;
mod received;
mod record;
mod rows;

use self::progress::ReaderProgress;
pub use self::received::HandoffRecord;
use self::record::{Fixed, IncomingRecord};
use super::codec::Codec;
use super::error::FrameError;
use super::handoff::{Handoff, HandoffError};
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
///     Ok(()) // All bytes are taken in. A stream that stops before the reader `is_ended` was cut.
/// }
/// ```
pub struct HandoffReader<P = Contiguous> {
    key: HandoffKey,
    progress: ReaderProgress<P>,
    step: ReaderStep,
    /// Why the stream was refused, if it was.
    refused: Option<FrameError>,
}

/// Which part of the stream comes next.
enum ReaderStep {
    /// A record's header.
    Header(Fixed<HEADER_BYTES>),
    /// The rest of its payload.
    Payload(Box<IncomingRecord>),
    /// Its MAC.
    Mac(Box<IncomingRecord>, Fixed<MAC_BYTES>),
    /// Nothing: the last record has come.
    Ended,
}

impl HandoffReader {
    /// A reader that accepts `handoff` in one of the codecs, and puts the rows one after another.
    pub fn new(cluster_key: &[u8], handoff: Handoff, codecs: &[Codec]) -> Result<HandoffReader, HandoffError> {
        HandoffReader::with_placement(cluster_key, handoff, codecs, Contiguous)
    }
}

impl<P: Placement> HandoffReader<P> {
    /// A reader that puts the rows where `placement` says.
    pub fn with_placement(
        cluster_key: &[u8],
        handoff: Handoff,
        codecs: &[Codec],
        placement: P,
    ) -> Result<HandoffReader<P>, HandoffError> {
        let key = HandoffKey::derive(cluster_key, handoff.id);
        let progress = ReaderProgress::new(handoff, codecs, placement)?;
        Ok(HandoffReader { key, progress, step: ReaderStep::Header(Fixed::new()), refused: None })
    }

    /// Takes bytes off the front of `input` up to the next event; `None` if there is none in it, and then all of it is
    /// taken in. After an error the reader is dead, and says the same error again.
    pub fn read(&mut self, input: &mut &[u8]) -> Result<Option<HandoffRecord>, FrameError> {
        if let Some(refused) = &self.refused {
            return Err(refused.clone());
        }
        self.advance(input).inspect_err(|refused| self.refused = Some(refused.clone()))
    }

    /// Takes a frame's buffer back, so that the next one needs no fresh memory: the system's page faults cost more than
    /// everything a reader does.
    pub fn recycle(&mut self, buffer: Vec<u8>) {
        self.progress.recycle(buffer);
    }

    /// First position that has not come yet.
    pub fn position(&self) -> u32 {
        self.progress.position()
    }

    /// Returns true once the last record was read. A stream that stops earlier was cut.
    pub fn is_ended(&self) -> bool {
        self.refused.is_none() && matches!(self.step, ReaderStep::Ended)
    }

    fn advance(&mut self, input: &mut &[u8]) -> Result<Option<HandoffRecord>, FrameError> {
        while !input.is_empty() {
            // Stays so after the last record and after a failure, when nothing is read any more.
            match std::mem::replace(&mut self.step, ReaderStep::Ended) {
                ReaderStep::Header(mut header) => {
                    self.step = match header.fill(input) {
                        None => ReaderStep::Header(header),
                        Some(bytes) => {
                            let payload = self.progress.open(&bytes)?;
                            ReaderStep::Payload(Box::new(IncomingRecord::new(&self.key, &bytes, payload)))
                        }
                    }
                }
                ReaderStep::Payload(mut record) => {
                    record.receive(input, &mut self.progress)?;
                    self.step = match record.is_complete() {
                        false => ReaderStep::Payload(record),
                        true => ReaderStep::Mac(record, Fixed::new()),
                    }
                }
                ReaderStep::Mac(record, mut mac) => match mac.fill(input) {
                    None => self.step = ReaderStep::Mac(record, mac),
                    Some(mac) => {
                        let event = self.progress.accept(record.verify(mac)?)?;
                        if !matches!(event, HandoffRecord::End(_) | HandoffRecord::Error(_)) {
                            self.step = ReaderStep::Header(Fixed::new());
                        }
                        return Ok(Some(event));
                    }
                },
                ReaderStep::Ended => return Err(FrameError::AfterEnd),
            }
        }
        Ok(None)
    }
}
