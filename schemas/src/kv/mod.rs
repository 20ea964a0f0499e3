//! The KV wire format: the form of a prompt's KV cache outside of any engine, and its transfer between nodes.
//!
//! The same rows have several names on their way, because each says what is known about them:
//!
//! - a [`Chunk`] holds the rows of the positions `[p0, p1)` in a form of no framework: K after RoPE, V untransposed, one
//!   row per position and layer, little-endian. [`layout`] describes their shape. An engine exports chunks.
//! - a [`frame`] is a chunk, encoded by a [`codec`]: the payload of a record.
//! - a [`record`] is a head, a frame, some states, a wait, an end or an error with its header and MAC: the bytes on the wire. A
//!   [`handoff`] is a stream of records, which [`writer`] writes and [`reader`] reads, both without I/O.
//! - [`VerifiedKv`] is a frame that the reader has checked. Only this may reach an engine.
//! - a [`StatePart`] holds states of recurrent layers; a record has one part. [`VerifiedState`] is all states of a position,
//!   checked.
//! - An engine lays verified KV out for its own cache (llama.cpp's is an `ImportBlob`, in `engines/src/llama/placement.rs`).
//!
//! `docs/kv-walk.md` follows a chunk through its rooms. `docs/kv-frames.md` documents every byte.

pub mod chunk;
pub mod codec;
mod coded;
mod dtype;
pub mod error;
mod finite;
pub mod frame;
pub mod handoff;
mod layer_numbers;
pub mod layout;
pub mod mac;
pub mod messages;
pub mod placement;
pub mod prefix;
pub mod profile;
pub mod reader;
pub mod record;
mod record_kind;
pub mod rotation;
pub mod state;
mod state_record;
pub mod verified;
pub mod writer;

pub use chunk::{Chunk, ChunkError, LayerRows, SectionRows};
pub use codec::{Codec, CodecEffect, CodecError, KvqError, ModelKnowledge, ProfileError, TensorProfile};
pub use coded::{decode_rows, encode_rows};
pub use error::{FrameError, WriteError};
pub use finite::all_finite;
pub use frame::{Span, max_frame_positions};
pub use handoff::{Fingerprint, Handoff, HandoffError, HandoffId};
pub use layer_numbers::LayerNumbers;
pub use layout::{
    Dtype, KvLayout, LayerShape, LayoutError, RopePairing, RowTypes, Rows, Section, StateKind, StateShape,
};
pub use mac::Mac;
pub use messages::{HandoffEnd, HandoffHead, PrefillTimings, Wait};
pub use placement::{Contiguous, Placement, Places};
pub use prefix::PrefixHasher;
pub use profile::{CodecLoss, CodecProfile, EXACT_POSITIONS, MAX_PROFILE_BYTES, channel_variances};
pub use reader::{HandoffReader, HandoffRecord, Offer};
pub use record::HandoffKey;
pub use rotation::{KeyRotation, RotationError, SectionRotation};
pub use state::{StatePart, VerifiedState};
pub use state_record::MAX_STATE_POSITIONS;
pub use verified::VerifiedKv;
pub use writer::{HandoffWriter, StreamChoice};

/// The protocol that a reader's request offers in the header `upgrade`. If the writer accepts, the connection then carries
/// the records and no HTTP.
pub const KV_UPGRADE: &str = "baton-kv";
