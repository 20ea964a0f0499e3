//! Errors of reading and writing a handoff stream.

use super::chunk::ChunkError;
use super::codec::{Codec, CodecError};
use super::handoff::HandoffError;
use super::record_kind::RecordKind;

/// Why a reader refused a stream. The frames that it yielded before remain valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message says what it is")]
pub enum FrameError {
    // The record around the payload.
    #[error("record {record} does not begin with the magic")]
    Magic { record: u32 },
    #[error("record {record} is of the unknown kind {kind}")]
    RecordKind { record: u32, kind: u8 },
    #[error("record {record} has header bytes that are not zero")]
    Reserved { record: u32 },
    #[error("record {expected} was expected and {found} came")]
    Index { expected: u32, found: u32 },
    #[error("record {record} is a {kind:?}, which has no place there")]
    OutOfPlace { record: u32, kind: RecordKind },
    #[error("record {record}, a {kind:?}, claims {length} bytes where {limit} are possible")]
    TooLong { record: u32, kind: RecordKind, length: u64, limit: u64 },
    #[error("record {record}, a {kind:?}, has a wrong MAC")]
    Mac { record: u32, kind: RecordKind },
    #[error("there are more records than can be counted")]
    TooManyRecords,
    #[error("there is data after the last record")]
    AfterEnd,

    // Messages.
    #[error("record {record}, a {kind:?}, is not the JSON it should be: {detail}")]
    Message { record: u32, kind: RecordKind, detail: String },
    #[error("the stream is of version {found} and {expected} was expected")]
    Version { expected: u32, found: u32 },
    #[error("the stream belongs to another handoff")]
    HandoffId,
    #[error("the stream is of another model")]
    Fingerprint,
    #[error("the stream has another KV layout")]
    Layout,
    #[error("the stream is of the positions {found_start}..{found_end} and {start}..{end} were asked for")]
    Range { start: u32, end: u32, found_start: u32, found_end: u32 },
    #[error("the codec {codec:?} was not offered")]
    CodecRefused { codec: Codec },
    #[error("the stream counts {found} frames and {expected} came")]
    FrameCount { expected: u32, found: u32 },
    #[error("the stream ends at position {next} of {end}")]
    Incomplete { next: u32, end: u32 },
    #[error("the numbers in record {record}, a {kind:?}, are impossible")]
    Numbers { record: u32, kind: RecordKind },

    // A frame's header.
    #[error("a frame of {n_bytes} bytes is shorter than its header")]
    FrameTooShort { n_bytes: usize },
    #[error("the frame {p0}..{p1} has header bytes that are not zero")]
    FrameReserved { p0: u32, p1: u32 },
    #[error("the frame {p0}..{p1} does not go on at {next} and end by {end}")]
    Positions { p0: u32, p1: u32, next: u32, end: u32 },
    #[error("the frame {p0}..{p1} has more than {limit} positions")]
    TooManyPositions { p0: u32, p1: u32, limit: u32 },
    #[error("the frame {p0}..{p1} has {n_bytes} bytes of rows where {limit} are possible")]
    TooManyBytes { p0: u32, p1: u32, n_bytes: u64, limit: u64 },
    #[error("the frame {p0}..{p1} has {found} sections and the layout {expected}")]
    SectionCount { p0: u32, p1: u32, expected: usize, found: u32 },
    #[error("section {section} of the frame {p0}..{p1} starts at {start}, not within {earliest}..={latest}")]
    SectionStart { section: usize, start: u32, earliest: u32, latest: u32, p0: u32, p1: u32 },
    #[error("the frame {p0}..{p1} has the unknown codec {codec}")]
    UnknownCodec { p0: u32, p1: u32, codec: u8 },
    #[error("the frame {p0}..{p1} has the codec {found:?} and its head says {expected:?}")]
    OtherCodec { p0: u32, p1: u32, expected: Codec, found: Codec },
    #[error("the frame {p0}..{p1} was computed for other tokens")]
    Prefix { p0: u32, p1: u32 },

    // A frame's rows.
    #[error("the frame {p0}..{p1} has a body of {found} bytes where {expected} belong")]
    BodyLength { p0: u32, p1: u32, expected: u64, found: u64 },
    #[error("the frame {p0}..{p1} has {found} tensors and the layout {expected}")]
    TensorCount { p0: u32, p1: u32, expected: usize, found: u32 },
    #[error("tensor {tensor} of the frame {p0}..{p1} cannot be decoded: {reason}")]
    Decode { p0: u32, p1: u32, tensor: usize, reason: CodecError },
    #[error("tensor {tensor} of the frame {p0}..{p1} has a value that is not finite")]
    NotFinite { p0: u32, p1: u32, tensor: usize },

    // The reader's own side.
    #[error("the buffer for the frame {p0}..{p1} is not laid out as its tensors need")]
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
    /// A reader would refuse the frame or the end.
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("a {kind:?} of {n_bytes} bytes is too long to send")]
    TooLong { kind: RecordKind, n_bytes: usize },
    #[error("a {kind:?} cannot be written as JSON: {detail}")]
    Message { kind: RecordKind, detail: String },
    #[error("the stream has ended")]
    Ended,
}
