//! The KV wire format: the form of a prompt's KV cache outside of any engine, and its transfer between nodes.
//!
//! [`layout`] describes a model's cache, [`chunk`] holds the values of a range of positions. Both are independent of
//! any framework: K is stored after RoPE, V untransposed, one row per position and layer, little-endian.
//!
//! A [`handoff`] is a stream of [`record`]s from the prefill node to the decode node: a head, frames as they are
//! computed, an end ([`messages`], [`frame`], [`codec`]). [`writer`] and [`reader`] are its two ends, without I/O. The
//! reader yields [`verified`] KV, the only KV that may reach an engine. `docs/kv-frames.md` documents every byte.

pub mod chunk;
pub mod codec;
pub mod error;
mod finite;
pub mod frame;
pub mod handoff;
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
pub mod verified;
pub mod writer;

pub use chunk::{Chunk, ChunkError, LayerRows, SectionRows};
pub use codec::{Codec, CodecEffect, CodecError, KvqError, ModelKnowledge, ProfileError, TensorProfile};
pub use error::{FrameError, WriteError};
pub use finite::all_finite;
pub use frame::{Span, max_frame_positions};
pub use handoff::{Fingerprint, Handoff, HandoffError, HandoffId};
pub use layout::{Dtype, KvLayout, LayerShape, LayoutError, RopePairing, Rows, Section};
pub use mac::Mac;
pub use messages::{HandoffEnd, HandoffHead, PrefillTimings, Wait};
pub use placement::{Contiguous, Placement, Places};
pub use prefix::PrefixHasher;
pub use profile::{CodecLoss, CodecProfile, EXACT_POSITIONS, MAX_PROFILE_BYTES, channel_variances};
pub use reader::{HandoffReader, HandoffRecord, Offer};
pub use record::HandoffKey;
pub use rotation::{KeyRotation, RotationError, SectionRotation};
pub use verified::VerifiedKv;
pub use writer::HandoffWriter;

/// The protocol that a reader's request offers in the header `upgrade`. If the writer accepts, the connection then carries
/// the records and no HTTP.
pub const KV_UPGRADE: &str = "baton-kv";
