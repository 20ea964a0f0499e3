//! A token that can be drawn.

use baton_schemas::Token;

/// A token that can be drawn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub(super) token: Token,
    pub(super) logit: f32,
    /// Its probability, once top-p has computed it.
    pub(super) p: f32,
}
