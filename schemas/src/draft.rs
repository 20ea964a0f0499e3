//! Drafts by another node: a decode node tells it a sequence's tokens, and it sends candidates for the next ones.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cache_scope::CacheScope;
use crate::sampling::Sampling;
use crate::token::Token;

/// The most tokens that a draft node is ahead of the tokens that it was told.
pub const MAX_AHEAD: usize = 32;

/// The most tokens of a sequence that one frame tells.
pub const MAX_TOLD: usize = 64;

/// A sequence to follow. Its further tokens come in frames of their own ([`streams`](crate::streams)).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DraftRequest {
    /// The hash of the decode node's vocabulary. A draft node with another one refuses.
    #[serde(with = "hex")]
    pub vocabulary: [u8; 32],
    /// Prompt and reply so far, at least one token.
    pub tokens: Vec<Token>,
    /// How the decode node draws tokens. A draft node that draws alike guesses right more often.
    pub sampling: Sampling,
    /// The caller's scope in the prefix cache.
    #[serde(default, skip_serializing_if = "CacheScope::is_shared")]
    pub cache_scope: CacheScope,
}

/// Candidates for tokens of a sequence. Those that follow the same tokens of the sequence are one chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftedTokens {
    /// The tokens of the sequence that the chain begins after: all of them were told.
    pub from: u32,
    /// The position of the first candidate. The chain has those from `from` to here already.
    pub at: u32,
    /// 1 to [`MAX_AHEAD`] candidates.
    pub tokens: Vec<Token>,
}

/// Why a decode node stopped following a draft node in a sequence. The reply goes on without it. Each has a number on the wire
/// ([`streams`](crate::streams)), which is never reused.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
    strum::IntoStaticStr,
    strum::FromRepr,
)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum DrafterLoss {
    /// No connection, or it broke.
    Lost = 1,
    /// The draft node refused the sequence, or failed at it.
    Refused = 2,
    /// It has another vocabulary.
    OtherVocabulary = 3,
    /// It sent candidates that no draft node may send.
    Invalid = 4,
    /// For too many steps no candidate came in time.
    Late = 5,
    /// Its candidates were wrong too often in a row.
    Wrong = 6,
}

impl DrafterLoss {
    /// The word in metrics and logs.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The source of proposed tokens. Each has a number on the wire ([`streams`](crate::streams)), which is never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::FromRepr, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum DrafterKind {
    /// The client's own prediction of the reply.
    Prediction = 1,
    /// The prompt and the reply, where they have the last tokens before.
    PromptLookup = 2,
    /// A smaller model of the same vocabulary.
    DraftModel = 3,
    /// The model's own head that predicts further tokens.
    Mtp = 4,
    /// A draft node.
    Remote = 5,
}

impl DrafterKind {
    /// All of them, in the order of their numbers.
    pub const ALL: [DrafterKind; 5] = [
        DrafterKind::Prediction,
        DrafterKind::PromptLookup,
        DrafterKind::DraftModel,
        DrafterKind::Mtp,
        DrafterKind::Remote,
    ];

    /// Its place in [`DrafterKind::ALL`].
    pub fn index(self) -> usize {
        self as usize - 1
    }

    /// The word in metrics.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The fate of a sequence's guesses since the last report. At least one of both is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftReport {
    /// A drafter, and its tokens that a step has verified, at most [`DraftReport::MAX_TOKENS`]. Those that were right are the token
    /// with the report, and the ones after it.
    pub verified: Option<(DrafterKind, DraftCounts)>,
    /// The draft node was given up.
    pub loss: Option<DrafterLoss>,
}

impl DraftReport {
    /// The most tokens of a report, which has a byte for their number.
    pub const MAX_TOKENS: u32 = u8::MAX as u32;
}

/// Tokens that were guessed and verified, by drafter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DraftTotals {
    /// Guesses from the prompt and the reply.
    pub lookup: DraftCounts,
    /// Guesses from the client's own prediction.
    pub prediction: DraftCounts,
    /// Guesses of a smaller model.
    pub model: DraftCounts,
    /// Guesses of the model's own head.
    pub mtp: DraftCounts,
    /// Guesses of a draft node.
    pub remote: DraftCounts,
}

impl DraftTotals {
    /// The counts of a drafter.
    pub fn of(self, drafter: DrafterKind) -> DraftCounts {
        match drafter {
            DrafterKind::Prediction => self.prediction,
            DrafterKind::PromptLookup => self.lookup,
            DrafterKind::DraftModel => self.model,
            DrafterKind::Mtp => self.mtp,
            DrafterKind::Remote => self.remote,
        }
    }

    /// The same, to be changed.
    pub fn of_mut(&mut self, drafter: DrafterKind) -> &mut DraftCounts {
        match drafter {
            DrafterKind::Prediction => &mut self.prediction,
            DrafterKind::PromptLookup => &mut self.lookup,
            DrafterKind::DraftModel => &mut self.model,
            DrafterKind::Mtp => &mut self.mtp,
            DrafterKind::Remote => &mut self.remote,
        }
    }

    /// The counts of all drafters together.
    pub fn all(self) -> DraftCounts {
        self.lookup.plus(self.prediction).plus(self.model).plus(self.mtp).plus(self.remote)
    }

    /// The sum of both.
    pub fn plus(self, other: DraftTotals) -> DraftTotals {
        DraftTotals {
            lookup: self.lookup.plus(other.lookup),
            prediction: self.prediction.plus(other.prediction),
            model: self.model.plus(other.model),
            mtp: self.mtp.plus(other.mtp),
            remote: self.remote.plus(other.remote),
        }
    }
}

/// Tokens that were guessed and verified.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DraftCounts {
    /// All of them.
    pub n: u32,
    /// The right ones among them.
    pub n_accepted: u32,
}

impl DraftCounts {
    /// Nothing was verified.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// Takes at most `n` tokens off, the right ones first.
    pub fn split(&mut self, n: u32) -> DraftCounts {
        let taken = DraftCounts { n: self.n.min(n), n_accepted: self.n_accepted.min(n) };
        (self.n, self.n_accepted) = (self.n - taken.n, self.n_accepted - taken.n_accepted);
        taken
    }

    /// The sum of both.
    pub fn plus(self, other: DraftCounts) -> DraftCounts {
        let sum = |a: u32, b: u32| a.saturating_add(b);
        DraftCounts { n: sum(self.n, other.n), n_accepted: sum(self.n_accepted, other.n_accepted) }
    }
}
