//! What was learned about a model's routes: links, how long replies are, and by how much predictions were wrong.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::rates::{Curve, LinkRates, ewma};

/// Output length expected before any reply was seen.
const FIRST_GUESS_TOKENS: f64 = 256.0;

/// Corrections stay within these: a factor beyond them is no error of the model but an outage.
const CORRECTIONS: std::ops::RangeInclusive<f64> = 0.2..=5.0;

/// See the module. Nodes are named by their places in the model's lists.
#[derive(Debug)]
pub struct Routes {
    learned: Mutex<Learned>,
    turns: AtomicU64,
}

#[derive(Debug, Clone)]
struct Learned {
    links: Vec<Vec<LinkRates>>,
    corrections: Vec<Vec<f64>>,
    /// Tokens of a reply, by the most that its client would take.
    n_output: Curve,
    /// Mean of |ln(actual ÷ predicted)| of the time to first token, over the last predictions.
    error: f64,
}

/// A copy of what is known, for a snapshot.
#[derive(Debug, Clone)]
pub struct RoutesView {
    /// `[prefill][decode]`.
    pub links: Vec<Vec<LinkRates>>,
    /// See [`Snapshot`](crate::plan::snapshot::Snapshot).
    pub corrections: Vec<Vec<f64>>,
    /// Tokens of a reply, by the most that its client would take; see [`expected_output`].
    pub n_output: Curve,
    /// Mean absolute error of predicted times to first token, as a factor's logarithm.
    pub error: f64,
}

impl Routes {
    /// Nothing known of so many nodes.
    pub fn new(n_prefill: usize, n_decode: usize) -> Routes {
        let learned = Learned {
            links: vec![vec![LinkRates::default(); n_decode]; n_prefill],
            corrections: vec![vec![1.0; n_decode]; n_prefill + 1],
            n_output: Curve::default(),
            error: 0.0,
        };
        Routes { learned: Mutex::new(learned), turns: AtomicU64::new(0) }
    }

    /// What is known now.
    pub fn view(&self) -> RoutesView {
        let Learned { links, corrections, n_output, error } = self.lock().clone();
        RoutesView { links, corrections, n_output, error }
    }

    /// The number that the next request will have.
    pub fn turn(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// The next request's number.
    pub fn next_turn(&self) -> u64 {
        self.turns.fetch_add(1, Ordering::Relaxed)
    }

    /// Takes a measurement of a link into account.
    pub fn learn_link(&self, prefill: usize, decode: usize, update: impl FnOnce(&mut LinkRates)) {
        if let Some(link) = self.lock().links.get_mut(prefill).and_then(|row| row.get_mut(decode)) {
            update(link);
        }
    }

    /// A reply had this many tokens, of at most `max_tokens`.
    pub fn learn_output(&self, max_tokens: Option<u32>, n_tokens: u32) {
        self.lock().n_output.learn(limit(max_tokens), f64::from(n_tokens.max(1)));
    }

    /// A request's first token came after `actual_ms`, where `predicted_ms` was predicted with all corrections.
    pub fn learn_error(&self, prefill: Option<usize>, decode: usize, predicted_ms: f64, actual_ms: f64) {
        if !(predicted_ms > 0.0 && actual_ms > 0.0) {
            return;
        }
        let mut learned = self.lock();
        let ratio = (actual_ms + NOISE_MS) / (predicted_ms + NOISE_MS);
        learned.error = ewma(learned.error, ratio.ln().abs().max(1e-6));
        let row = prefill.map_or(0, |p| 1 + p);
        if let Some(correction) = learned.corrections.get_mut(row).and_then(|row| row.get_mut(decode)) {
            // In logarithms, so that twice and half are equally far from right.
            let step = LEARNING_RATE * ratio.ln();
            *correction = (*correction * step.exp()).clamp(*CORRECTIONS.start(), *CORRECTIONS.end());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Learned> {
        self.learned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tokens that a reply of at most `max_tokens` will probably have, going by those before it. Clients that want a label
/// and clients that want an essay set different limits, so replies under a similar limit tell the most.
pub fn expected_output(seen: &Curve, max_tokens: Option<u32>) -> f64 {
    let limit = limit(max_tokens);
    seen.at(limit).unwrap_or(FIRST_GUESS_TOKENS).min(limit)
}

fn limit(max_tokens: Option<u32>) -> f64 {
    // Without a limit: beyond every real one.
    max_tokens.map_or(f64::from(u32::MAX), |n| f64::from(n.max(1)))
}

/// An error of some milliseconds is large for a short prompt and says nothing about a long one. Milliseconds.
const NOISE_MS: f64 = 50.0;

/// Share of an error that is corrected at once. The rest may be noise.
const LEARNING_RATE: f64 = 0.2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_systematic_error_is_gone_within_twenty_requests() {
        let routes = Routes::new(1, 1);
        // The model says 1,000 ms for what takes 2,500.
        for _ in 0..20 {
            let correction = routes.view().corrections[1][0];
            routes.learn_error(Some(0), 0, 1_000.0 * correction, 2_500.0);
        }
        let correction = routes.view().corrections[1][0];
        assert!((correction / 2.5 - 1.0).abs() < 0.02, "{correction}");
        assert_eq!(routes.view().corrections[0][0], 1.0, "other routes are not touched");
    }

    #[test]
    fn a_reply_is_expected_to_be_as_long_as_others_under_its_limit() {
        let routes = Routes::new(0, 1);
        let expected = |max_tokens| expected_output(&routes.view().n_output, max_tokens);
        assert_eq!((expected(None), expected(Some(16))), (FIRST_GUESS_TOKENS, 16.0));
        for (max_tokens, n_tokens) in [(Some(1_000), 700), (Some(16), 2), (None, 300)] {
            routes.learn_output(max_tokens, n_tokens);
        }
        assert_eq!((expected(Some(16)), expected(Some(1_000)), expected(None)), (2.0, 700.0, 300.0));
        assert!((2.0..700.0).contains(&expected(Some(128))), "between them");
    }

    #[test]
    fn an_outage_or_nonsense_does_not_spoil_the_model() {
        let routes = Routes::new(0, 1);
        for (predicted, actual) in [(0.0, 5.0), (5.0, 0.0), (f64::NAN, 1.0), (1.0, 1e12), (1.0, 1e12)] {
            routes.learn_error(None, 0, predicted, actual);
        }
        let correction = routes.view().corrections[0][0];
        assert!(CORRECTIONS.contains(&correction), "{correction}");
    }
}
