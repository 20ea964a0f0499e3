//! How rows of the same tokens differ between two replies, and between batches of other shapes without any guess.

use std::sync::Arc;

use baton_schemas::sequence::{Alternative, DraftTotals, GeneratedToken};
use baton_schemas::{SequenceRequest, Token};
use llama_cpp_2::model::LlamaModel;

use super::speculation::replies;
use super::{Scheduler, scheduler_of};
use crate::engine_options::EngineOptions;

/// How two rows of the same tokens differ.
#[derive(Debug, Default)]
pub(super) struct Rounding {
    pub(super) n_replies: usize,
    pub(super) n_rows: usize,
    /// The largest divergence of two other rows until replies part, nats.
    pub(super) max_kl: f64,
    /// Replies with a row that differs by more than rounding. Where two experts are nearly equally good, rounding exchanges them, and the
    /// row is another one.
    pub(super) n_exchanged: usize,
    /// Where replies part.
    pub(super) partings: Vec<Parting>,
    /// The guesses.
    pub(super) drafts: DraftTotals,
}

/// The first token in which two replies differ.
#[derive(Debug)]
#[allow(dead_code, reason = "they are printed")]
pub(super) struct Parting {
    pub(super) prompt: usize,
    pub(super) n_draft: usize,
    pub(super) at: usize,
    pub(super) distance: RowDistance,
    /// By how much the two drawn tokens' log-probabilities differ without speculation, but for penalties on repeated tokens.
    pub(super) margin: f64,
}

fn top(token: &GeneratedToken) -> &[Alternative] {
    &token.logprobs.as_ref().unwrap().top
}

fn logprob(of: &[Alternative], id: Token) -> f64 {
    of.iter().find(|other| other.id == id).map_or(f64::NEG_INFINITY, |other| f64::from(other.logprob))
}

/// The log-probabilities of a row, by token. Rows have all tokens.
fn by_token(row: &[Alternative]) -> Vec<f64> {
    let mut all = vec![f64::NEG_INFINITY; row.len()];
    row.iter().for_each(|of| all[of.id as usize] = f64::from(of.logprob));
    all
}

/// How far two rows are apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowDistance {
    /// The divergence, nats.
    pub(super) kl: f64,
    /// The largest difference of a token's log-probability.
    pub(super) difference: f64,
}

impl RowDistance {
    fn between(one: &[Alternative], other: &[Alternative]) -> RowDistance {
        let (one, other) = (by_token(one), by_token(other));
        let both = || one.iter().zip(&other);
        RowDistance {
            kl: both().map(|(p, q)| p.exp() * (p - q)).sum::<f64>().abs(),
            difference: both().map(|(p, q)| (p - q).abs()).fold(0.0, f64::max),
        }
    }
}

/// Bounds of what rounding does to two rows of these models: their divergence, and the difference of a token's log-probability. The
/// two tokens of a draw may be further apart: its random number may lie between any two.
const MOST_KL: f64 = 1e-3;
const MOST_DIFFERENCE: f64 = 0.05;

impl Rounding {
    /// Replies are equal, but for a few draws between tokens that rounding may exchange.
    pub(super) fn check(&self, n_replies: usize) {
        assert_eq!(self.n_exchanged, 0, "{self:?}");
        self.check_mixture(n_replies);
    }

    /// The same of a mixture of experts that are often nearly equally good. In one of twenty replies others may be chosen.
    pub(super) fn check_mixture(&self, n_replies: usize) {
        self.check_few(n_replies);
        assert!(self.n_exchanged * 20 <= n_replies, "{self:?}");
    }

    /// The same of so few replies that one with other experts is more than a twentieth.
    pub(super) fn check_few(&self, n_replies: usize) {
        assert!(self.n_replies == n_replies && self.max_kl < MOST_KL, "{self:?}");
        assert!(self.partings.len() * 2 <= n_replies, "{self:?}");
    }

    pub(super) fn compare(
        &mut self,
        (prompt, request): (usize, &SequenceRequest),
        [without, with]: [&[GeneratedToken]; 2],
        n_draft: usize,
    ) {
        self.n_replies += 1;
        let n_wanted = request.max_tokens.map(|n| n as usize);
        assert_eq!((Some(without.len()), Some(with.len())), (n_wanted, n_wanted), "no reply is cut short");
        let mut is_exchanged = false;
        for at in 0..without.len() {
            let rows = [top(&without[at]), top(&with[at])];
            let distance = RowDistance::between(rows[0], rows[1]);
            self.n_rows += 1;
            if distance.difference < MOST_DIFFERENCE {
                self.max_kl = self.max_kl.max(distance.kl);
            } else if !std::mem::replace(&mut is_exchanged, true) {
                self.n_exchanged += 1;
            }
            if without[at].id != with[at].id {
                let margin = logprob(rows[0], without[at].id) - logprob(rows[0], with[at].id);
                let penalty = f64::from(request.sampling.frequency_penalty);
                let margin = if penalty > 0.0 { margin - (margin / penalty).round() * penalty } else { margin };
                return self.partings.push(Parting { prompt, n_draft, at, distance, margin });
            }
        }
    }
}

/// Schedulers without guesses that compute prompts in batches of different numbers of rows.
pub(super) struct BatchShapes<'m>(Vec<Scheduler<'m>>);

impl<'m> BatchShapes<'m> {
    pub(super) fn new(model: &'m Arc<LlamaModel>, options: &EngineOptions, n_cells: u32) -> Self {
        let of_rows = |n| EngineOptions { n_ubatch: Some(n), ..options.clone() };
        BatchShapes([64, 24, 7, 4, 2].map(|n| scheduler_of(model, of_rows(n), n_cells)).into())
    }

    /// How much the row after the first `n` tokens of a reply differs in these shapes: the largest difference of a token's
    /// log-probability.
    pub(super) fn noise(&mut self, request: &SequenceRequest, reply: &[GeneratedToken], n: usize) -> f64 {
        let tokens = tokens(request, &reply[..n]);
        self.difference(request, tokens, &reply[n])
    }

    /// The same if the token before the last one is another: what a token of a refused draft would change, if it stayed in the KV.
    pub(super) fn of_wrong_token(&mut self, request: &SequenceRequest, reply: &[GeneratedToken], n: usize) -> f64 {
        let mut tokens = tokens(request, &reply[..n]);
        let before_last = tokens.len() - 2;
        tokens[before_last] = if tokens[before_last] == 101 { 102 } else { 101 };
        self.difference(request, tokens, &reply[n])
    }

    fn difference(&mut self, request: &SequenceRequest, tokens: Vec<Token>, row: &GeneratedToken) -> f64 {
        let again = SequenceRequest { prompt: tokens, max_tokens: Some(1), ephemeral: true, ..request.clone() };
        let differences = self.0.iter_mut().map(|scheduler| {
            let (found, _) = replies(scheduler, std::slice::from_ref(&again), 1);
            RowDistance::between(top(row), top(&found[0][0])).difference
        });
        differences.fold(0.0, f64::max)
    }
}

fn tokens(request: &SequenceRequest, reply: &[GeneratedToken]) -> Vec<Token> {
    request.prompt.iter().copied().chain(reply.iter().map(|token| token.id)).collect()
}
