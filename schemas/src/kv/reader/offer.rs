//! [`Offer`]: the codecs and MACs between which a writer may choose.

use crate::kv::codec::Codec;
use crate::kv::mac::Mac;

/// The codecs and MACs that a reader offers to its writer.
#[derive(Debug, Clone, Copy)]
pub struct Offer<'a> {
    /// The codecs of rows that it accepts.
    pub codecs: &'a [Codec],
    /// The codecs of states that it accepts, beside none, which every reader accepts.
    pub state_codecs: &'a [Codec],
    /// The MACs that it accepts beside BLAKE3, which every reader accepts.
    pub macs: &'a [Mac],
}
