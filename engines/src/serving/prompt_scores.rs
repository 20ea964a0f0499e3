//! The log-probabilities of a prompt's tokens, from the logits of its prefill.
//!
//! A position's logits predict the token after it, so the first token has none. Only the most likely tokens of each
//! position are kept, and the prompt is computed in small steps. So logits and results of a whole prompt are never in
//! memory at once. The prefix cache holds no logits, so a sequence with scores starts without it.

use std::collections::VecDeque;

use baton_model::vocabulary::Vocabulary;
use baton_schemas::Token;
use baton_schemas::sequence::{GeneratedToken, Logprobs};

use super::sampler::{logprobs, peak, rank};

/// The most tokens of a step: their results fit a reader's channel, and the logits of a vocabulary of 256k tokens take
/// 32 MiB.
pub(crate) const MAX_STEP_TOKENS: usize = 32;

/// A sequence's log-probabilities of its prompt.
pub(crate) struct PromptScores {
    n_top: usize,
    /// The prompt's tokens that have been reported, or wait. A preempted sequence computes them again, and reports only
    /// the others.
    n_scored: usize,
    /// They wait for room at the reader.
    pub(crate) waiting: VecDeque<GeneratedToken>,
}

/// Logits with a value that is NaN or infinite.
pub(crate) struct NotFinite;

impl PromptScores {
    pub(crate) fn new(n_top: u32, first: Token, vocabulary: &Vocabulary) -> PromptScores {
        let first = reported(first, None, vocabulary);
        PromptScores { n_top: n_top as usize, n_scored: 1, waiting: VecDeque::from([first]) }
    }

    /// Takes the logits that predict the prompt's token `idx`.
    pub(crate) fn score(
        &mut self,
        idx: usize,
        id: Token,
        logits: &[f32],
        vocabulary: &Vocabulary,
    ) -> Result<(), NotFinite> {
        if idx < self.n_scored {
            return Ok(());
        }
        let peak = peak(logits).ok_or(NotFinite)?;
        let logprobs = logprobs(logits, peak.logit, id, self.n_top, |token| vocabulary.piece(token));
        let logprobs = Logprobs { rank: Some(rank(logits, id)), ..logprobs };
        self.waiting.push_back(reported(id, Some(logprobs), vocabulary));
        self.n_scored = idx + 1;
        Ok(())
    }
}

fn reported(id: Token, logprobs: Option<Logprobs>, vocabulary: &Vocabulary) -> GeneratedToken {
    GeneratedToken { id, bytes: vocabulary.piece(id), special: vocabulary.is_control(id), logprobs, drafts: None }
}
