//! Errors of reading and writing a handoff stream.

use super::chunk::ChunkError;
use super::codec::{Codec, CodecError, ProfileError};
use super::handoff::HandoffError;
use super::mac::Mac;
use super::record_kind::RecordKind;
use super::rotation::RotationError;

/// Why a reader refused a stream. The frames that it yielded before remain valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message says what it is")]
pub enum FrameError {
    // The record around the payload.
    #[error("record {record} does not begin with the magic")]
    Magic { record: u32 },
    #[error("record {record} has the unknown kind {kind}")]
    RecordKind { record: u32, kind: u8 },
    #[error("record {record} has reserved header bytes that are not zero")]
    Reserved { record: u32 },
    #[error("found record {found}; expected record {expected}")]
    Index { expected: u32, found: u32 },
    #[error("record {record} ({kind:?}) is not allowed at this point of the stream")]
    OutOfPlace { record: u32, kind: RecordKind },
    #[error("record {record} ({kind:?}) claims {length} bytes; at most {limit} are possible")]
    TooLong { record: u32, kind: RecordKind, length: u64, limit: u64 },
    #[error("record {record} ({kind:?}) has a wrong MAC")]
    Mac { record: u32, kind: RecordKind },
    #[error("the stream has too many records")]
    TooManyRecords,
    #[error("there is data after the last record")]
    AfterEnd,

    // Messages.
    #[error("record {record} ({kind:?}) has invalid JSON: {detail}")]
    Message { record: u32, kind: RecordKind, detail: String },
    #[error("the stream has version {found}; expected version {expected}")]
    Version { expected: u32, found: u32 },
    #[error("the stream belongs to another handoff")]
    HandoffId,
    #[error("the stream comes from another model")]
    Fingerprint,
    #[error("the stream has another KV layout")]
    Layout,
    #[error("the stream has the positions {found_start}..{found_end}; requested were {start}..{end}")]
    Range { start: u32, end: u32, found_start: u32, found_end: u32 },
    #[error("the codec {codec:?} was not offered")]
    CodecRefused { codec: Codec },
    #[error("the MAC {mac:?} was not offered")]
    MacRefused { mac: Mac },
    #[error(transparent)]
    Rotation(#[from] RotationError),
    #[error("the stream's end counts {found} frames; {expected} arrived")]
    FrameCount { expected: u32, found: u32 },
    #[error("the stream ends at position {next}, before {end}")]
    Incomplete { next: u32, end: u32 },
    #[error("the numbers in record {record} ({kind:?}) are impossible")]
    Numbers { record: u32, kind: RecordKind },

    // A frame's header.
    #[error("a frame of {n_bytes} bytes is shorter than its header")]
    FrameTooShort { n_bytes: usize },
    #[error("the frame {p0}..{p1} has reserved header bytes that are not zero")]
    FrameReserved { p0: u32, p1: u32 },
    #[error("the frame {p0}..{p1} does not start at {next} and end at or before {end}")]
    Positions { p0: u32, p1: u32, next: u32, end: u32 },
    #[error("the frame {p0}..{p1} has more than {limit} positions")]
    TooManyPositions { p0: u32, p1: u32, limit: u32 },
    #[error("the frame {p0}..{p1} has {n_bytes} bytes of rows; at most {limit} are possible")]
    TooManyBytes { p0: u32, p1: u32, n_bytes: u64, limit: u64 },
    #[error("the frame {p0}..{p1} has {found} sections; the layout has {expected}")]
    SectionCount { p0: u32, p1: u32, expected: usize, found: u32 },
    #[error("section {section} of the frame {p0}..{p1} starts at {start}, not within {earliest}..={latest}")]
    SectionStart { section: usize, start: u32, earliest: u32, latest: u32, p0: u32, p1: u32 },
    #[error("the frame {p0}..{p1} has the unknown codec {codec}")]
    UnknownCodec { p0: u32, p1: u32, codec: u8 },
    #[error("the frame {p0}..{p1} has the codec {found:?}; the stream's head says {expected:?}")]
    OtherCodec { p0: u32, p1: u32, expected: Codec, found: Codec },
    #[error("the frame {p0}..{p1} was computed for other tokens")]
    Prefix { p0: u32, p1: u32 },

    // A frame's rows.
    #[error("the frame {p0}..{p1} has a body of {found} bytes; expected {expected}")]
    BodyLength { p0: u32, p1: u32, expected: u64, found: u64 },
    #[error("the frame {p0}..{p1} has {found} tensors; the layout has {expected}")]
    TensorCount { p0: u32, p1: u32, expected: usize, found: u32 },
    #[error("tensor {tensor} of the frame {p0}..{p1} cannot be decoded: {reason}")]
    Decode { p0: u32, p1: u32, tensor: usize, reason: CodecError },
    #[error("tensor {tensor} of the frame {p0}..{p1} has a value that is not finite")]
    NotFinite { p0: u32, p1: u32, tensor: usize },

    // States.
    #[error("record {record} has states of a model that has none")]
    NoStates { record: u32 },
    #[error("record {record} has states, and all that the head names have arrived")]
    NoMoreStates { record: u32 },
    #[error(
        "the head names {found} positions with states, which do not ascend from {start} to {end}, or are not for this model"
    )]
    StatePositions { found: usize, start: u32, end: u32 },
    #[error("a state record of {n_bytes} bytes is shorter than its header")]
    StateTooShort { n_bytes: usize },
    #[error("the states of position {position} have reserved header bytes that are not zero")]
    StateReserved { position: u32 },
    #[error("the states of position {position} have the unknown codec {codec}")]
    UnknownStateCodec { position: u32, codec: u8 },
    #[error("the states of position {position} have the codec {found:?}; the stream's head says {expected:?}")]
    OtherStateCodec { position: u32, expected: Codec, found: Codec },
    #[error("found states of position {position}; expected those of {expected:?}")]
    StatePosition { position: u32, expected: Option<u32> },
    #[error("found states of position {position} from {found} on; expected those from {expected} on")]
    StateOrder { position: u32, expected: u32, found: u32 },
    #[error("a record has {found} states of position {position}; 1 to {most} are possible")]
    StateCount { position: u32, most: usize, found: u32 },
    #[error("the states of position {position} were computed for other tokens")]
    StatePrefix { position: u32 },
    #[error("a record with states of position {position} has {found} bytes; expected {expected}")]
    StateLength { position: u32, expected: usize, found: usize },
    #[error("state {state} of position {position} has a value that is not finite")]
    StateNotFinite { position: u32, state: usize },
    #[error("the stream ends without all states of position {position}")]
    StateMissing { position: u32 },
    #[error("the codec {codec:?} of states was not offered")]
    StateCodecRefused { codec: Codec },

    // The reader's own side.
    #[error("the buffer layout for the frame {p0}..{p1} does not fit its tensors")]
    Placement { p0: u32, p1: u32 },
    #[error("the codec {codec:?} cannot be set up: {reason}")]
    Codec { codec: Codec, reason: CodecError },
}

/// Why a writer refused its input.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message says what it is")]
pub enum WriteError {
    #[error(transparent)]
    Handoff(#[from] HandoffError),
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error(transparent)]
    Rotation(#[from] RotationError),
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// A reader would refuse the frame or the end.
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("a record ({kind:?}) of {n_bytes} bytes is too long to send")]
    TooLong { kind: RecordKind, n_bytes: usize },
    #[error("a record ({kind:?}) cannot be written as JSON: {detail}")]
    Message { kind: RecordKind, detail: String },
    #[error("the stream has ended")]
    Ended,
}
