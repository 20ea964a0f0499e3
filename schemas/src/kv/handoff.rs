//! The parameters of a handoff. Both ends know them before the first byte.

use serde::{Deserialize, Serialize};

use super::layout::{KvLayout, LayoutError};
use crate::token::Token;

/// The most positions in a frame.
pub const MAX_FRAME_POSITIONS: u32 = 4096;

/// The most bytes of rows in a frame. A reader may have to allocate this much before it can check the frame's MAC.
pub const MAX_FRAME_BYTES: u64 = 1 << 30;

/// One past the highest position. llama.cpp's positions are signed, and the largest has a special meaning.
pub const MAX_POSITIONS: u32 = i32::MAX as u32;

/// Identifies one pull. The reader draws it at random each time, so that records of an earlier pull cannot be replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HandoffId(#[serde(with = "hex")] pub [u8; 16]);

/// Identifies the model that computed the KV: 32-byte hashes, in JSON hexadecimal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fingerprint {
    /// The hash of the vocabulary, which gives token ids their meaning.
    #[serde(with = "hex")]
    pub vocabulary: [u8; 32],
    /// The hash of the weights.
    #[serde(with = "hex")]
    pub weights: [u8; 32],
}

/// One pull of the KV of the positions `[start, tokens.len())`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handoff {
    /// The reader draws it for this pull.
    pub id: HandoffId,
    /// The model of the node that computes the KV.
    pub fingerprint: Fingerprint,
    /// The shape of that model's KV.
    pub layout: KvLayout,
    /// The first position to hand over. The reader has the KV before it.
    pub start: u32,
    /// The tokens of all positions from 0, including those before `start`.
    pub tokens: Vec<Token>,
}

/// Why a handoff is impossible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandoffError {
    /// The layout cannot be used.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// There are no positions to hand over, or more than an engine supports.
    #[error("the positions {start}..{end} cannot be handed over")]
    Positions {
        /// The first position.
        start: u32,
        /// The number of tokens.
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

    /// Returns the positions for which a stream has states: these `checkpoints`, and the end. None if the layout has no
    /// states.
    pub fn states_at(&self, checkpoints: &[u32]) -> Vec<u32> {
        let all = checkpoints.iter().copied().chain([self.end()]);
        if self.layout.states.is_empty() { Vec::new() } else { all.collect() }
    }

    /// Returns one past the last position. Exact after [`Handoff::check`].
    pub fn end(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }
}
