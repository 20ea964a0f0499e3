//! A token that can be drawn, and the order of such tokens.

use std::cmp::Ordering;

use baton_schemas::Token;

/// A token that can be drawn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub(super) token: Token,
    pub(super) logit: f32,
    /// Its probability, once top-p has computed it.
    pub(super) p: f32,
}

impl Candidate {
    pub(super) fn new(token: usize, logit: f32) -> Self {
        Candidate { token: token as Token, logit, p: 0.0 }
    }

    /// The larger logit comes first; among equal ones, the smaller token.
    fn order(&self, other: &Candidate) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.token.cmp(&other.token))
    }
}

/// Moves the first `n` of all to the front, in their order. The others come in no order.
pub(super) fn sort_first(all: &mut [Candidate], n: usize) {
    if 0 < n && n < all.len() {
        all.select_nth_unstable_by(n - 1, Candidate::order);
    }
    all[..n].sort_unstable_by(Candidate::order);
}
