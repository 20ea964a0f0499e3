//! The parameters of a handoff, which both ends know before its first byte.

use serde::{Deserialize, Serialize};

use super::layout::{KvLayout, LayoutError};
use crate::token::Token;

/// Positions one frame may hold.
pub const MAX_FRAME_POSITIONS: u32 = 4096;

/// Bytes of rows one frame may hold: what a reader may have to set aside before a MAC proves anything.
pub const MAX_FRAME_BYTES: u64 = 1 << 30;

/// One past the highest position: llama.cpp's are signed, and it gives the largest a meaning of its own.
pub const MAX_POSITIONS: u32 = i32::MAX as u32;

/// Names one pull. The reader draws it at random each time, so that a record of an earlier pull is worth nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HandoffId(#[serde(with = "hex")] pub [u8; 16]);

/// Which model computed the KV, as 32-byte hashes; in JSON hexadecimal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Hash of the tokenizer, which gives token ids their meaning.
    #[serde(with = "hex")]
    pub vocabulary: [u8; 32],
    /// Hash of the weights.
    #[serde(with = "hex")]
    pub weights: [u8; 32],
}

/// One pull of the KV of the positions `[start, tokens.len())`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handoff {
    /// Drawn by the reader for this pull.
    pub id: HandoffId,
    /// The model of the node that computes the KV.
    pub fingerprint: Fingerprint,
    /// The shape of that model's KV.
    pub layout: KvLayout,
    /// First position that is handed over; the reader has those before it.
    pub start: u32,
    /// The tokens of all positions from 0, those before `start` included.
    pub tokens: Vec<Token>,
}

/// Why a handoff cannot take place at all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandoffError {
    /// The layout is not usable.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// There are no positions to hand over, or more than an engine can count.
    #[error("the positions {start}..{end} cannot be handed over")]
    Positions {
        /// First position.
        start: u32,
        /// Number of tokens.
        end: usize,
    },
}

impl Handoff {
    /// Checks the layout and the range of positions.
    pub fn check(&self) -> Result<(), HandoffError> {
        self.layout.check()?;
        let end = self.tokens.len();
        if self.start as usize >= end || end > MAX_POSITIONS as usize {
            return Err(HandoffError::Positions { start: self.start, end });
        }
        Ok(())
    }

    /// One past the last position. Fits once [`Handoff::check`] has passed.
    pub fn end(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }
}
