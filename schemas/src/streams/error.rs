//! Why a frame is refused, or cannot be written.

/// The first fault in a peer's bytes. What follows cannot be read: the connection ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StreamFrameError {
    /// No frame has this kind, or not in this direction.
    #[error("a frame of the unknown kind {0}")]
    UnknownKind(u8),
    /// Bytes that are reserved are not zero.
    #[error("a frame whose reserved bytes are not zero")]
    Reserved,
    /// The payload is longer than this kind of peer may send.
    #[error("a frame of {length} bytes, more than {most}")]
    TooLong {
        /// The claimed length of the payload.
        length: u32,
        /// The limit.
        most: usize,
    },
    /// A frame of a stream without a number, or of the connection with one.
    #[error("a frame with the stream number {0}")]
    Stream(u32),
    /// The payload does not have the form of its kind.
    #[error("a malformed {kind} frame: {problem}")]
    Malformed {
        /// The kind.
        kind: &'static str,
        /// What is wrong.
        problem: &'static str,
    },
}

/// A node's frame that would break a limit of the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnwritableFrame {
    /// It is longer than a frame may be.
    #[error("{bytes} bytes are more than one frame may hold")]
    TooLong {
        /// The payload's length.
        bytes: usize,
    },
    /// A log-probability or a vector's value is NaN or infinite.
    #[error("a value is NaN or infinite")]
    NotFinite,
    /// It has no form in JSON.
    #[error("an event has no form in JSON")]
    Json,
}
