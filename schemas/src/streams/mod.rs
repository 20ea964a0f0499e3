//! The frames of a connection that carries all streams between an endpoint and a node. `docs/node-streams.md` has the
//! byte tables.
//!
//! An endpoint opens one connection to each node: `GET /node/v1/streams`, upgraded by HTTP/1.1. Then the endpoint sends
//! [`ClientFrame`]s and the node sends [`NodeFrame`]s. This room encodes and decodes them and does no I/O.
//!
//! A stream's number is chosen by the endpoint and never reused on a connection. The node sends at most as many tokens,
//! vectors or loads of a stream as the endpoint has granted credit for, so a slow reader stops only its own stream.

mod client;
mod draft;
mod error;
mod frame;
mod node;
#[cfg(test)]
mod tests;
mod token;

pub use self::client::{ClientFrame, NewStream, StartFrame, StreamWork, put_body, put_cancel, put_credit, put_start};
pub use self::draft::{ToldTokens, put_told};
pub use self::error::{StreamFrameError, UnwritableFrame};
pub use self::frame::{FrameBuffer, FrameKind, HEAD_BYTES, RawFrame};
pub use self::node::{NodeFrame, NodeFrameWriter, StepTokens, StreamToken, Vector};

/// The protocol that the upgrade requests, in the header `upgrade`.
pub const STREAMS_UPGRADE: &str = "baton-streams";

/// The header with the versions that the endpoint speaks, as [`StreamVersions`](crate::stream_versions::StreamVersions) writes them: `1-2`.
pub const VERSIONS_HEADER: &str = "baton-streams-versions";

/// The header of the answer with the version that the node has chosen: `2`.
pub const VERSION_HEADER: &str = "baton-streams-version";

/// The longest body of a request: that of the endpoint's clients, 32 MiB, with what the endpoint adds.
pub const MAX_BODY_BYTES: usize = 48 << 20;

/// The longest piece of a request's body. Longer bodies are cut, so that other frames pass in between.
pub const MAX_PIECE_BYTES: usize = 64 << 10;

/// Bodies that an endpoint sends in pieces at the same time on one connection.
pub const MAX_PARTIAL_BODIES: usize = 16;

/// The longest payload of a client's frame: a piece, and what precedes it in a start.
pub const MAX_CLIENT_PAYLOAD: usize = MAX_PIECE_BYTES + 512;

/// The longest payload of a node's frame. A token takes at most [`MAX_TOKEN_BYTES`] of it.
pub const MAX_NODE_PAYLOAD: usize = 1 << 20;

/// The most alternatives of a token. A client may request 20; `baton doctor` compares 200.
pub const MAX_ALTERNATIVES: usize = 200;

/// The most bytes of a token on the wire, with its alternatives: what a stream can make the endpoint hold is its credit
/// times this.
pub const MAX_TOKEN_BYTES: usize = 64 << 10;

/// The most bytes of a token, and of an alternative. Tokens of models have a few hundred at most.
pub const MAX_TOKEN_TEXT: usize = 4 << 10;

/// The most credit of a stream.
pub const MAX_CREDIT: u32 = 1 << 16;

/// The longest `traceparent` in a start: version 00 has 55 bytes, and later versions may add some.
pub const MAX_TRACEPARENT_BYTES: usize = 255;
