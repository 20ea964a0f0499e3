//! Draws the next token from logits.
//!
//! There is no random state between tokens: the draw at a position is seeded by (request seed, position). So a sequence
//! that is resumed on another engine gets the same draws, and other tokens only where rounding moved the probabilities.
//!
//! llama.cpp's samplers, which [`chain`] has in Rust, would sort an array of the whole vocabulary. Here they get only the
//! tokens that can still be drawn ([`top`]).

mod candidate;
mod chain;
mod logprobs;
mod peak;
mod shaping;
#[cfg(test)]
#[cfg(feature = "llama")]
mod tests;
mod top;
mod twister;

use std::time::Instant;

use baton_schemas::Token;
use baton_schemas::generate::Sampling;
use toktrie::SimpleVob;

use self::chain::Candidates;
pub(crate) use self::logprobs::{logprobs, rank};
#[cfg(all(feature = "llama", any(test, feature = "measure")))]
pub(crate) use self::peak::argmax;
use self::peak::first_largest;
pub(crate) use self::peak::{Peak, peak};
use self::shaping::Shaping;
use super::constrain::{Masks, NoToken};

/// One sequence's sampler.
pub(crate) struct Sampler {
    shaping: Option<Shaping>,
    draw: Option<Draw>,
    /// The constraint on the text.
    constraint: Option<Masks>,
}

/// A random draw; without one, a sequence is greedy.
struct Draw {
    sampling: Sampling,
    /// The memory of the last draw, for reuse.
    candidates: Candidates,
}

impl Sampler {
    /// A sampler for the token after `prompt` and `generated`. Tokens in `banned` are never drawn.
    pub(crate) fn new(sampling: &Sampling, banned: &[Token], prompt: &[Token], generated: &[Token]) -> Self {
        Sampler {
            shaping: Shaping::new(sampling, banned, prompt, generated),
            draw: (sampling.temperature > 0.0)
                .then(|| Draw { sampling: sampling.clone(), candidates: Candidates::default() }),
            constraint: None,
        }
    }

    /// The same sampler under a constraint.
    pub(crate) fn constrained(self, constraint: Option<Masks>) -> Self {
        Sampler { constraint, ..self }
    }

    /// Asks for the first mask, if there is a constraint.
    pub(crate) fn begin(&mut self) {
        self.constraint.iter_mut().for_each(Masks::begin);
    }

    /// Returns true if a token can be drawn, false while its mask is computed.
    pub(crate) fn is_ready(&mut self) -> bool {
        self.constraint.as_mut().is_none_or(Masks::poll)
    }

    /// Waits for the next mask until `deadline`, if the last one was cheap.
    pub(crate) fn wait(&mut self, deadline: Instant) {
        self.constraint.iter_mut().for_each(|masks| masks.wait(deadline));
    }

    /// Returns true while it is not known whether the last token completes the text.
    pub(crate) fn may_be_complete(&self) -> bool {
        self.constraint.as_ref().is_some_and(Masks::may_be_complete)
    }

    #[cfg(test)]
    pub(crate) fn is_constrained(&self) -> bool {
        self.constraint.is_some()
    }

    /// Returns true if there is a constraint, the text satisfies it, and no token can follow.
    pub(crate) fn is_complete(&self) -> bool {
        self.constraint.as_ref().is_some_and(Masks::is_complete)
    }

    /// Draws the token for `position` (the number of tokens before it, prompt included) and updates penalties and
    /// constraint. `peak` is that of `logits`. Only while [`Sampler::is_ready`]. Errors: no token satisfies the constraint.
    pub(crate) fn sample(&mut self, logits: &[f32], peak: Peak, position: usize) -> Result<Token, NoToken> {
        let allowed = self.constraint.as_mut().map(Masks::allowed).transpose()?;
        let chosen = self.choose(logits, peak, allowed.as_ref(), position).ok_or(NoToken::DeadEnd)?;
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(chosen);
        }
        Ok(chosen)
    }

    /// The token that it would draw for `position` from these logits, without the constraint. Nothing is counted.
    pub(crate) fn guess(&mut self, logits: &[f32], peak: Peak, position: usize) -> Option<Token> {
        self.pick(logits, peak, None, position)
    }

    /// Chooses one of the `allowed` tokens, or of all, and counts it for the penalties. `None` if no token is allowed.
    fn choose(&mut self, logits: &[f32], peak: Peak, allowed: Option<&SimpleVob>, position: usize) -> Option<Token> {
        let chosen = self.pick(logits, peak, allowed, position);
        if let (Some(shaping), Some(chosen)) = (&mut self.shaping, chosen) {
            shaping.accept(chosen);
        }
        chosen
    }

    fn pick(&mut self, logits: &[f32], peak: Peak, allowed: Option<&SimpleVob>, position: usize) -> Option<Token> {
        let shaped = self.shaping.as_mut().map(|shaping| shaping.shape(logits));
        match (&mut self.draw, shaped) {
            (Some(Draw { sampling, candidates }), shaped) => {
                let seed = draw_seed(sampling.seed, position);
                candidates.draw(sampling, shaped.unwrap_or(logits), allowed, seed).map(|candidate| candidate.token)
            }
            (None, None) if allowed.is_none() => Some(peak.token),
            (None, shaped) => first_largest(shaped.unwrap_or(logits), allowed),
        }
    }
}

/// The 31-bit seed of the draw at a position: SplitMix64's finalizer (Steele et al. 2014) over seed and position. One
/// bit is left out because llama.cpp reads 0xFFFFFFFF as "choose a seed for me".
fn draw_seed(seed: u64, position: usize) -> u32 {
    let mut z = seed.wrapping_add((position as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 33) as u32
}
